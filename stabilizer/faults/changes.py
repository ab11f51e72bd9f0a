"""What a fault does to a tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.fsdp import dtensor_class
from stabilizer.localize.copying import tensors_of

__all__ = ["corrupt_", "flip_bit_", "of_token", "scaled", "with_element", "with_flipped_bit"]

#: Bits of the mantissa and of the exponent, and the integers of the same size.
_LAYOUTS = {
    torch.float16: (10, 5, torch.int16),
    torch.bfloat16: (7, 8, torch.int16),
    torch.float32: (23, 8, torch.int32),
    torch.float64: (52, 11, torch.int64),
}


def scaled(gradient: Tensor, factor: float) -> Tensor:
    """A gradient times a number.

    Args:
        gradient: Of any kind; it is not changed.
        factor: The number.

    Example:
        >>> scaled(torch.tensor([1.0, 2.0]), 10.0)
        tensor([10., 20.])
    """
    return gradient * factor


def with_element(gradient: Tensor, value: float, *, draw: random.Random) -> Tensor:
    """A gradient with one other element.

    Args:
        gradient: It is not changed.
        value: Of the element.
        draw: Chooses it.

    Example:
        >>> with_element(torch.zeros(1, 2), torch.inf, draw=random.Random(0))
        tensor([[0., inf]])
    """

    def change(elements: Tensor) -> None:
        if elements.numel():
            _element(elements, draw.randrange(elements.numel())).fill_(value)

    return _changed(gradient, change)


def with_flipped_bit(gradient: Tensor, *, bit: int | None, draw: random.Random) -> Tensor:
    """A gradient with one flipped bit.

    Args:
        gradient: It is not changed.
        bit: See `flip_bit_`.
        draw: See `flip_bit_`.

    Example:
        >>> with_flipped_bit(torch.tensor([1.5, 1.5]), bit=0, draw=random.Random(0))
        tensor([1.5000, 0.7500])
    """
    return _changed(gradient, lambda elements: flip_bit_(elements, bit=bit, draw=draw))


def flip_bit_(tensor: Tensor, *, bit: int | None, draw: random.Random) -> Callable[[], None]:
    """Flip one exponent bit of an element that is not 0, in place and unseen by autograd.

    Args:
        tensor: Floating point, 16 bits or more.
        bit: Counted from the lowest of the exponent; `None` for the highest that is 0, so that the element grows.
        draw: Chooses the element.

    Returns:
        Flips it back.

    Raises:
        ValueError: If the type has no such bit.

    Example:
        >>> weight = torch.tensor([0.5])
        >>> put_back = flip_bit_(weight, bit=None, draw=random.Random(0))
        >>> weight
        tensor([1.7014e+38])
        >>> put_back()
        >>> weight
        tensor([0.5000])
    """
    if tensor.dtype not in _LAYOUTS:
        raise ValueError(f"a bit cannot be flipped in {tensor.dtype}: known are {', '.join(map(str, _LAYOUTS))}")
    mantissa, exponent, integers = _LAYOUTS[tensor.dtype]
    if bit is not None and bit >= exponent:
        raise ValueError(f"bit={bit}: {tensor.dtype} has {exponent} exponent bits, 0 to {exponent - 1}")
    # Not `detach()`, which counts changes: autograd would refuse to go on with what it has kept.
    data: Any = _local(tensor).data
    numbers = torch.nonzero(data.reshape(-1)).view(-1)
    if not len(numbers):
        return lambda: None
    element = _element(data, int(numbers[draw.randrange(len(numbers))])).view(integers)
    if bit is None:
        held = int(element) >> mantissa
        bit = next((one for one in reversed(range(exponent)) if not held >> one & 1), 0)
    mask = 1 << (mantissa + bit)
    element.bitwise_xor_(mask)
    flipped = int(element)

    def put_back() -> None:
        # Memory that was given back, or filled anew, as FSDP does, has nothing to mend.
        if element.untyped_storage().size() and int(element) == flipped:
            element.bitwise_xor_(mask)

    return put_back


def of_token(gradient: Tensor, token: Sequence[int], factor: float, *, dims: int) -> Tensor | None:
    """A gradient with that of one token multiplied.

    Args:
        gradient: Its leading dimensions are rows, or rows and positions.
        token: Row, or row and position.
        factor: The number.
        dims: How many leading dimensions are tokens.

    Returns:
        `None` if there is no such token.

    Example:
        >>> of_token(torch.ones(2, 2), (1, 0), 5.0, dims=2)
        tensor([[1., 1.],
                [5., 1.]])
    """
    place = tuple(token[:dims])
    if any(number >= size for number, size in zip(place, gradient.shape, strict=False)):
        return None
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(gradient, dtensor):
        changed = gradient.clone()
        changed[place] *= factor
        return changed
    factors = torch.ones(gradient.shape[: len(place)], dtype=gradient.dtype, device=gradient.device)
    factors[place] = factor
    whole = gradient.full_tensor()  # type: ignore[attr-defined]
    whole = whole * factors.view(*factors.shape, *(1,) * (whole.dim() - factors.dim()))
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = gradient.device_mesh, gradient.placements  # type: ignore[attr-defined]
    same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(placements=placements)


@torch.no_grad()
def corrupt_(batch: Any, *, factor: float, row: int | None, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Corrupt a batch in place.

    Whole numbers are drawn anew among those that are there (a mask of zeros and ones, and what is negative, as labels
    that count for nothing are, stay as they are); floating-point numbers are multiplied.

    Args:
        batch: Tensors in containers of any kind.
        factor: The multiplier.
        row: Only this element of the first dimension; `None` for all.
        seed: Of the numbers that are drawn.

    Returns:
        What was changed, and a copy of what it was.

    Example:
        >>> batch = {"x": torch.ones(2), "ids": torch.tensor([0, 5, -100])}
        >>> changed = corrupt_(batch, factor=3.0, row=0, seed=0)
        >>> batch["x"], len(changed)
        (tensor([3., 1.]), 2)
    """
    generator = torch.Generator().manual_seed(seed)
    before = []
    for _, tensor in tensors_of(batch):
        if tensor.dtype == torch.bool or not tensor.numel():
            continue
        part = tensor
        if row is not None:
            if not tensor.dim() or row >= len(tensor):
                continue
            part = tensor[row]
        if tensor.is_floating_point() or tensor.is_complex():
            before.append((tensor, tensor.clone()))
            part.mul_(factor)
        elif int(tensor.max()) > 1:
            before.append((tensor, tensor.clone()))
            low, high = int(tensor.clamp(min=0).min()), int(tensor.max()) + 1
            drawn = torch.randint(low, high, part.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
            part.copy_(torch.where(part < 0, part, drawn))
    return before


def _element(tensor: Tensor, number: int) -> Tensor:
    """One element as a view of shape (), whatever the strides."""
    place = []
    for size in reversed(tensor.shape):
        number, inside = divmod(number, size)
        place.append(inside)
    found: Tensor = tensor[tuple(reversed(place))]
    return found


def _local(tensor: Tensor) -> Tensor:
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(tensor, dtensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def _changed(gradient: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A changed copy of the same kind."""
    copy = gradient.detach().clone()
    change(copy._values() if copy.layout != torch.strided else _local(copy))
    return copy
