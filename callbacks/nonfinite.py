"""What is said of gradients that are not finite: which parameters, how many elements, and whose loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.diagnosis import BadParameter
from stabilizer.notices import Notice
from stabilizer.store import GradientStore
from stabilizer.tally import MicroBatchLoss

__all__ = ["NonfiniteReports", "describe_parameters"]

_COOLDOWN = 100
_UNKNOWN = -1.0
_MAX_NAMES = 3
_KIND = "non-finite gradient"
_ADVICE = "look at this batch; GradLocCallback names the tokens behind such a step, NumericsCallback the operation"


def describe_parameters(found: Sequence[BadParameter]) -> str:
    """Name the first ones.

    Args:
        found: In the order of a backward pass.

    Example:
        >>> describe_parameters([BadParameter("layers.2.weight", 3, 1), BadParameter("layers.1.weight", 8, 0)])
        'layers.2.weight (3 NaN, 1 Inf) first in backward order, then layers.1.weight (8 NaN)'
    """
    texts = []
    for bad in found[:_MAX_NAMES]:
        counts = [f"{num} {kind}" for num, kind in ((bad.num_nan, "NaN"), (bad.num_inf, "Inf")) if num]
        texts.append(f"{bad.name} ({', '.join(counts)})")
    if not texts:
        return "its norm alone (on rank 0 all elements are finite)"
    rest = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return texts[0] + (f" first in backward order, then {', '.join(texts[1:])}{rest}" if texts[1:] else "")


class NonfiniteReports:
    """Finds out about a step's bad gradients and tells, at most once in a hundred steps; what is between is counted.

    Args:
        owner: Whose console is told.
    """

    def __init__(self, owner: StabilizerCallback) -> None:
        self._owner = owner
        self._text, self._step = "", -1
        self._told_at: int | None = None
        self._num_untold = 0

    def diagnose(
        self, store: GradientStore, *, losses: Sequence[MicroBatchLoss], is_bad_backward: Tensor | None
    ) -> None:
        """Find out; a collective, on every rank alike.

        Args:
            store: With this step's gradients in place.
            losses: Of this rank's micro-batches.
            is_bad_backward: Whether this rank's own backward passes were not finite, shape (); `None` if not known.
        """
        assert store.current is not None
        self._step = store.current.step
        found = store.nonfinite_parameters()
        own = [_loss_state(losses), _UNKNOWN if is_bad_backward is None else float(is_bad_backward)]
        by_rank = store.gather(torch.tensor(own, dtype=torch.float64)).reshape(-1, 2)
        self._text = f"{describe_parameters(found)}; {_origin(*by_rank.T.tolist())}"

    def about(self, step: int) -> list[str]:
        """What was found at a step, if it was looked at.

        Args:
            step: The optimizer step.
        """
        return [self._text] if step == self._step else []

    def count(self, step: int) -> bool:
        """Count a step, and say whether it is to be told.

        Args:
            step: The optimizer step, the same on every rank: so is the answer.
        """
        self._num_untold += 1
        self._owner.console.count(_KIND, step=step)
        return self._told_at is None or step - self._told_at >= _COOLDOWN

    def tell(self, step: int, *, outcome: str, batch: int = -1) -> None:
        """Warn of what was found.

        Args:
            step: The optimizer step.
            outcome: What is done about it.
            batch: Number of the last batch of the step, -1 if it is not known.
        """
        self._told_at = step
        num, self._num_untold = self._num_untold, 0
        more = f" ({num} such steps since this was said last)" if num > 1 else ""
        where = f"; the last batch of the step is {batch}" if batch >= 0 else ""
        self._owner.console.tell(
            Notice(
                kind=_KIND,
                step=step,
                text=f"step {step}: the gradient is not finite in {self._text}{where}; {outcome}{more}",
                what=f"the gradient is not finite; {outcome}{more}",
                where=self._text + where,
                advice=_ADVICE,
            )
        )

    def tell_late(self, contexts: Sequence[StepContext], *, outcome: str) -> None:
        """Warn when the flags of the layers have reached the host, where it waits for nothing.

        Args:
            contexts: Of the step.
            outcome: What is done about it.
        """
        if not contexts:
            return
        context, names = contexts[0], contexts[0].store.layer_names

        def read(step: int, flags: Tensor) -> None:
            found = [name for name, is_bad in zip(names, flags.tolist(), strict=True) if is_bad]
            if found and self.count(step):
                self._text = f"the layers {_first(found)}, in backward order (parameters, counts and ranks would make "
                self._text += "the host wait, as on_nonfinite='raise' does)"
                self.tell(step, outcome=outcome)

        context.later(context.store.nonfinite, read)


def _first(layers: Sequence[str]) -> str:
    backward = list(layers)[::-1]
    more = f" and {len(backward) - _MAX_NAMES} more" if len(backward) > _MAX_NAMES else ""
    return f"{', '.join(backward[:_MAX_NAMES])}{more}"


def _loss_state(losses: Sequence[MicroBatchLoss]) -> float:
    """1 if a loss of this rank is not finite, 0 if all are."""
    values = [float(piece.loss) for piece in losses]
    return float(not all(math.isfinite(value) for value in values)) if values else _UNKNOWN


def _origin(losses: Sequence[float], backwards: Sequence[float]) -> str:
    """Whose it is, from the states of all ranks."""
    if found := [rank for rank, state in enumerate(losses) if state > 0]:
        return f"the loss is not finite on {_ranks(found)}"
    known = "no loss was seen that could tell the rank" if _UNKNOWN in losses else "every rank's loss is finite"
    if found := [rank for rank, state in enumerate(backwards) if state > 0]:
        return f"{known}; the backward pass is not finite on {_ranks(found)}"
    return known if _UNKNOWN in losses else f"{known}: it was born in a backward pass"


def _ranks(found: Sequence[int]) -> str:
    more = " and more" if len(found) > 8 else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:8]))}{more}"
