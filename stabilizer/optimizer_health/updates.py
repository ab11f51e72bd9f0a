"""Updates: by how much a step has moved parameters, and moving them by less.

An update is the difference that an optimizer's step has made to a parameter, weight decay included: the only thing that
all optimizers have in common. Its RMS is sqrt(mean(update^2)) over the elements of a layer. Divided by the learning
rate it is the RMS that update clipping holds against d = 1: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with
Sublinear Memory Cost" (arXiv:1804.04235), section 6; Wortsman et al., "Stable and low-precision training for
large-scale vision-language models" (arXiv:2304.13013), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stabilizer.norms import norms

__all__ = ["Rate", "copies", "learning_rates", "per_rate", "shrink_updates_", "update_coefficients", "update_norms"]

#: Of a parameter's group; a tensor where the optimizer keeps it on the device.
Rate = float | Tensor
# Differences of so many elements are there at a time.
_CHUNK = 1 << 24
# On a CPU the differences of a large parameter are made piece by piece, in the cache, and rows of them shortened to
# their norms at once.
_PIECE, _ROW = 1 << 16, 1 << 11


@torch.no_grad()
def copies(tensors: Sequence[Tensor], *, into: Sequence[Tensor] = ()) -> list[Tensor]:
    """Copies of parameters, to compare them with after a step.

    Args:
        tensors: This rank's elements.
        into: Copies of an earlier step, to be overwritten.
    """
    shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
    if tensors and shapes == [(tensor.shape, tensor.dtype, tensor.device) for tensor in into]:
        torch._foreach_copy_(list(into), list(tensors))
        return list(into)
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def update_norms(before: Sequence[Tensor], after: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """L2 norm of the difference of every pair.

    Args:
        before: Parameters before a step, of any shapes and dtypes.
        after: The same after it.
        device: Where the result goes.

    Returns:
        Shape (pairs,), float32; not finite where a difference is not, and where its norm exceeds 1.8e19.

    Example:
        >>> update_norms([torch.zeros(2)], [torch.tensor([3.0, -4.0])], device=torch.device("cpu"))
        tensor([5.])
    """
    found = [norms([_difference(old, new) for old, new in chunk], device=device) for chunk in _chunks(before, after)]
    return torch.cat(found) if found else torch.zeros(0, device=device)


def learning_rates(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Rate]:
    """The learning rate of every parameter, as it is now.

    Args:
        optimizer: Of torch.
        parameters: Of it.

    Returns:
        One each; 1 for a group that has none, whose updates are taken as they are.
    """
    found: dict[Tensor, Rate] = {}
    for group in optimizer.param_groups:
        rate = group.get("lr")
        # Whoever changes such a tensor does it in place.
        rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        for parameter in group["params"]:
            found[parameter] = 1.0 if rate is None else rate
    return [found.get(parameter, 1.0) for parameter in parameters]


@torch.no_grad()
def per_rate(values: Tensor, rates: Sequence[Rate]) -> Tensor:
    """Values in units of learning rates.

    Args:
        values: One a parameter, shape (parameters,).
        rates: Of them; no step is taken where one is 0.

    Returns:
        Shape (parameters,); 0 where the rate is 0.

    Example:
        >>> per_rate(torch.tensor([0.5, 3.0, 0.0]), [0.1, torch.tensor(2.0), 0.0])
        tensor([5.0000, 1.5000, 0.0000])
    """
    if not rates:
        return values
    # Numbers that the host knows go along with the call: a tensor made of them would have to be copied to the device.
    known = [rate if isinstance(rate, float | int) else 1.0 for rate in rates]
    found = list(torch._foreach_mul(list(values.unbind()), [1.0 / rate if rate else 0.0 for rate in known]))
    for number, rate in enumerate(rates):
        if isinstance(rate, Tensor):
            there = rate.detach().to(values.device, values.dtype, non_blocking=values.device.type != "cpu").reshape(())
            found[number] = torch.where(there == 0, torch.zeros_like(there), found[number] / there)
    return torch.stack(found)


def update_coefficients(rms: Tensor, *, max_rms: float) -> Tensor:
    """What updates are multiplied by so that their RMS is at most a limit: min(1, limit / RMS).

    Args:
        rms: Of every layer, shape (layers,).
        max_rms: The limit, in the same units.

    Returns:
        Shape (layers,), in (0, 1]; 1 where the RMS is not finite: nothing finite comes of multiplying that.

    Example:
        >>> update_coefficients(torch.tensor([0.5, 4.0, float("nan"), 0.0]), max_rms=1.0)
        tensor([1.0000, 0.2500, 1.0000, 1.0000])
    """
    return torch.where(torch.isfinite(rms) & (rms > max_rms), max_rms / rms, torch.ones_like(rms))


@torch.no_grad()
def shrink_updates_(
    before: Sequence[Tensor], after: Sequence[Tensor], coefficients: Tensor, numbers: Sequence[int]
) -> None:
    """Let parameters have moved by less: p <- before + c (p - before). Where c is 1 not a bit is changed.

    Args:
        before: Parameters before a step.
        after: The same after it; changed in place.
        coefficients: Of every layer, shape (layers,), in (0, 1].
        numbers: Layer of every parameter.
    """
    # Numbers on a CPU can be read at no cost: only what changes is touched.
    known = coefficients.tolist() if coefficients.device.type == "cpu" else None
    sent: dict[torch.device, tuple[Tensor, ...]] = {}
    for old, new, number in zip(map(_real, before), map(_real, after), numbers, strict=True):
        if not new.numel() or (known is not None and known[number] == 1.0):
            continue
        if new.device not in sent:
            there = coefficients.to(torch.float32).to(new.device, non_blocking=new.device.type != "cpu")
            sent[new.device] = there.unbind()
        coefficient = sent[new.device][number]
        # From where the parameter was: an update that is far too large has no digits left of it at the other end.
        shrunk = torch.lerp(_wide(old), _wide(new), coefficient.to(_wide(new).dtype)).to(new.dtype)
        new.copy_(shrunk if known is not None else torch.where(coefficient == 1, new, shrunk))


def _real(tensor: Tensor) -> Tensor:
    """The parts of complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    tensor = _real(tensor)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _difference(old: Tensor, new: Tensor) -> Tensor:
    """What has changed, or numbers with the same norm."""
    is_plain = old.device.type == new.device.type == "cpu" and old.is_contiguous() and new.is_contiguous()
    if not is_plain or new.numel() <= _PIECE or new.is_complex():
        return _wide(new) - _wide(old)
    whole = new.numel() // _ROW * _ROW
    old, new = old.view(-1), new.view(-1)
    pieces = zip(old[:whole].split(_PIECE), new[:whole].split(_PIECE), strict=True)
    rows = [torch.linalg.vector_norm((_wide(b) - _wide(a)).view(-1, _ROW), dim=1) for a, b in pieces]
    return torch.cat([*rows, _wide(new[whole:]) - _wide(old[whole:])])


def _chunks(before: Sequence[Tensor], after: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs, so many at a time that their differences stay small."""
    chunk: list[tuple[Tensor, Tensor]] = []
    num = 0
    for old, new in zip(before, after, strict=True):
        if chunk and num + new.numel() > _CHUNK:
            yield chunk
            chunk, num = [], 0
        chunk.append((old, new))
        num += new.numel()
    if chunk:
        yield chunk
