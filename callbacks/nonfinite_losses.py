"""What is said of losses that are not finite: the step, the batch and the rank, and not again for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from stabilizer.callbacks.console import RunConsole
from stabilizer.notices import Notice

__all__ = ["NonfiniteLosses"]

_KIND = "non-finite loss"
_ADVICE = "Look at this batch (are all of its labels ignored?), and at the gradient norms of the step before"


class NonfiniteLosses:
    """Warns, and folds what happens within the cooldown into the next warning.

    Args:
        cooldown_steps: Steps between two warnings.
    """

    def __init__(self, *, cooldown_steps: int) -> None:
        self._cooldown_steps = cooldown_steps
        self._told_at: int | None = None
        self._num_untold = 0

    def reader(
        self, steps: Sequence[int], batches: Sequence[int], *, console: RunConsole
    ) -> Callable[[int, Tensor], None]:
        """What reads counts when they have reached the host.

        Args:
            steps: Steps that the counts belong to.
            batches: Number of each step's last batch; -1 where it is not known.
            console: Of the run.

        Returns:
            Takes a step and numbers: a count for each of these steps, the weights of their losses, and counts by rank,
            if any.
        """

        def read(_: int, values: Tensor) -> None:
            numbers, num = values.tolist(), len(steps)
            notice = self._see(
                steps, batches, numbers[:num], weights=numbers[num : 2 * num], by_rank=numbers[2 * num :]
            )
            if notice is not None:
                console.tell(notice)
            for step, num_bad in zip(steps, numbers[:num], strict=True):
                if num_bad:
                    console.count(_KIND, step=step)

        return read

    def _see(
        self,
        steps: Sequence[int],
        batches: Sequence[int],
        counts: Sequence[float],
        *,
        weights: Sequence[float],
        by_rank: Sequence[float],
    ) -> Notice | None:
        found = [number for number, num in enumerate(counts) if num]
        if not found:
            return None
        self._num_untold += int(sum(counts))
        step, batch = steps[found[0]], batches[found[0]]
        if self._told_at is not None and step - self._told_at < self._cooldown_steps:
            return None
        self._told_at = step
        where = f"step {step}" + (f" (batch {batch})" if batch >= 0 else "")
        ranks = [rank for rank, num in enumerate(by_rank) if num]
        who = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" if ranks else ""
        why = "" if weights[found[0]] else ": there is no valid target in the batch, all labels are ignored"
        num, self._num_untold = self._num_untold, 0
        what = (
            f"the loss is not finite{who}{why} ({num} micro-batch{'es' if num > 1 else ''} since this was said last); "
            "such a step enters no window"
        )
        return Notice(
            kind=_KIND,
            step=step,
            text=f"{where}: {what}. {_ADVICE}",
            what=what,
            where=f"batch {batch}" if batch >= 0 else "",
            advice=_ADVICE,
        )
