"""What `stabilizer demo --fault` breaks on purpose, and how it is told afterwards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from stabilizer.examples.stdlib_text import RandomWindows, load_stdlib_text
from stabilizer.faults import Fault

__all__ = ["FaultName", "Planted", "plant", "planted_row"]

FaultName: TypeAlias = Literal["token", "layer", "nan", "bit", "rate"]

_ROW, _BLOCK = 5, 3
_AROUND = 10


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault, and what to say of it when the run is over.

    Attributes:
        fault: It.
        text: One line: what, when and where.
    """

    fault: Fault
    text: str


def plant(name: FaultName, *, step: int, rank: int, context: int = 128, batch_size: int = 8, seed: int = 1) -> Planted:
    """Choose where a fault goes: always to the same place.

    Args:
        name: What goes wrong.
        step: At which optimizer step.
        rank: On which process.
        context: Length of a training sequence, in tokens.
        batch_size: Sequences in one step of one process.
        seed: Of the data.

    Example:
        >>> plant("layer", step=120, rank=1).text
        'the gradient of block 3 on rank 1 times 1000, at step 120'
    """
    where: dict[str, Any] = {"step": step, "rank": rank}
    when = f"at step {step}"
    if name == "layer":
        fault = Fault("layer_spike", **where, layer=_BLOCK)
        return Planted(fault, f"the gradient of block {_BLOCK} on rank {rank} times {fault.factor:g}, {when}")
    if name == "nan":
        fault = Fault("nan_gradient", **where, layer=_BLOCK)
        return Planted(fault, f"one NaN in the gradient of block {_BLOCK} on rank {rank}, {when}")
    if name == "bit":
        fault = Fault("bit_flip", **where, layer=_BLOCK)
        what = f"one flipped bit in the gradient of block {_BLOCK} on rank {rank}, {when}"
        return Planted(fault, f"{what}; it does not come again when the step is repeated")
    if name == "rate":
        fault = Fault("learning_rate_jump", step=step, num_steps=3)
        return Planted(fault, f"the learning rate times {fault.factor:g}, at steps {step} to {fault.last_step}")
    targets = planted_row(step=step, rank=rank, context=context, batch_size=batch_size, seed=seed)[1:]
    position = _readable(targets)
    fault = Fault("token_loss", **where, token=(_ROW, position), factor=10_000.0)
    before, after = targets[max(0, position - _AROUND) : position], targets[position + 1 : position + 1 + _AROUND]
    place = f"rank {rank}, micro-batch 0, row {_ROW}, position {position}"
    text = f"the loss of token {_text(targets[position : position + 1])} times {fault.factor:g}, {when}: {place}"
    return Planted(fault, f"{text}, between {_text(before)} and {_text(after)}")


def planted_row(
    *, step: int, rank: int, context: int = 128, batch_size: int = 8, seed: int = 1, row: int = _ROW
) -> list[int]:
    """The tokens of one row of one step.

    Args:
        step: The optimizer step.
        rank: Of which process.
        context: Length of a training sequence, in tokens.
        batch_size: Sequences in one step of one process.
        seed: Of the data.
        row: Which of them.

    Returns:
        Token numbers, one more than the context.
    """
    windows = RandomWindows(load_stdlib_text(), window=context + 1, seed=seed, rank=rank)
    [window] = itertools.islice(windows, step * batch_size + row, step * batch_size + row + 1)
    return [int(token) for token in window]


def _readable(targets: Sequence[int]) -> int:
    """The first letter from the middle on: a line break would be a poor thing to look for."""
    middle = len(targets) // 2
    return next((place for place in range(middle, len(targets)) if chr(targets[place]).isalpha()), middle)


def _text(tokens: Sequence[int]) -> str:
    return repr(bytes(tokens).decode(errors="replace"))
