"""Where layers and their parts are in the depth of a model: pure functions on names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stabilizer.localize.classify import part_of

__all__ = ["PARTS", "Layout", "make_layout"]

PARTS = ("attention", "mlp")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layers that are looked at, and where they are.

    Attributes:
        layers: Their names, in the model's order.
        blocks: Names of the repeated blocks, first to last; of the container with most of them.
        layer_blocks: Number of its block for every layer, -1 for a layer in none.
        is_shallow: Whether a layer is in the first half of the blocks, or stands before the first.
        is_before: Whether it stands before the first block.
        modules: Names of the modules that the layers are made of.
        module_parts: 2 * block + part for every module (part 0 is attention, 1 the MLP), -1 for a module in neither.
    """

    layers: tuple[str, ...]
    blocks: tuple[str, ...]
    layer_blocks: tuple[int, ...]
    is_shallow: tuple[bool, ...]
    is_before: tuple[bool, ...]
    modules: tuple[str, ...]
    module_parts: tuple[int, ...]


def make_layout(layers: Sequence[str], *, modules: Sequence[str]) -> Layout:
    """Find blocks among names.

    Args:
        layers: Names of the layers that are looked at, in the model's order.
        modules: Names of the modules that they are made of.

    Returns:
        Their places; without blocks, if no name has a number.

    Example:
        >>> layout = make_layout(["embed", "layers.0", "layers.1", "head"], modules=["layers.1.attn.q", "layers.1.mlp"])
        >>> layout.blocks, layout.is_shallow, layout.module_parts
        (('layers.0', 'layers.1'), (True, True, False, False), (2, 3))
    """
    places = [_block_of(name) for name in layers]
    numbers: dict[str, set[int]] = {}
    for place in places:
        if place is not None:
            numbers.setdefault(place[0], set()).add(place[1])
    container = max(numbers, key=lambda name: len(numbers[name]), default="")
    order = {number: position for position, number in enumerate(sorted(numbers.get(container, ())))}
    layer_blocks = [order[place[1]] if place is not None and place[0] == container else -1 for place in places]
    first = next((position for position, block in enumerate(layer_blocks) if block >= 0), 0)
    is_before = tuple(position < first for position in range(len(layer_blocks)))
    half = (len(order) + 1) // 2
    return Layout(
        layers=tuple(layers),
        blocks=tuple(f"{container}.{number}".lstrip(".") for number in order),
        layer_blocks=tuple(layer_blocks),
        is_shallow=tuple(0 <= block < half or before for block, before in zip(layer_blocks, is_before, strict=True)),
        is_before=is_before,
        modules=tuple(modules),
        module_parts=tuple(_part(name, container, order) for name in modules),
    )


def _block_of(name: str) -> tuple[str, int] | None:
    """Container and number of the outermost block that a name is in."""
    pieces = name.split(".")
    depth = next((depth for depth, piece in enumerate(pieces) if piece.isdigit()), None)
    return None if depth is None else (".".join(pieces[:depth]), int(pieces[depth]))


def _part(module: str, container: str, order: dict[int, int]) -> int:
    place = _block_of(module)
    if place is None or place[0] != container or place[1] not in order:
        return -1
    inside = module.removeprefix(f"{container}.{place[1]}".lstrip("."))
    part = part_of(inside)
    return -1 if part is None else 2 * order[place[1]] + PARTS.index(part)
