"""What is said of losses that are not finite: the step, the batch and the rank, and not again for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from stabilizer.errors import warn

__all__ = ["NonfiniteLosses"]


class NonfiniteLosses:
    """Warns, and folds what happens within the cooldown into the next warning.

    Args:
        cooldown_steps: Steps between two warnings.
    """

    def __init__(self, *, cooldown_steps: int) -> None:
        self._cooldown_steps = cooldown_steps
        self._told_at: int | None = None
        self._num_untold = 0

    def reader(self, steps: Sequence[int], batches: Sequence[int]) -> Callable[[int, Tensor], None]:
        """What reads counts when they have reached the host.

        Args:
            steps: Steps that the counts belong to.
            batches: Number of each step's last batch; -1 where it is not known.

        Returns:
            Takes a step and the counts: one for each of these steps, then those by rank, if any.
        """

        def read(_: int, counts: Tensor) -> None:
            numbers = counts.tolist()
            self._see(steps, batches, numbers[: len(steps)], numbers[len(steps) :])

        return read

    def _see(self, steps: Sequence[int], batches: Sequence[int], counts: list[float], by_rank: list[float]) -> None:
        found = [number for number, num in enumerate(counts) if num]
        if not found:
            return
        self._num_untold += int(sum(counts))
        step, batch = steps[found[0]], batches[found[0]]
        if self._told_at is not None and step - self._told_at < self._cooldown_steps:
            return
        self._told_at = step
        where = f"step {step}" + (f" (batch {batch})" if batch >= 0 else "")
        ranks = [rank for rank, num in enumerate(by_rank) if num]
        who = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" if ranks else ""
        num, self._num_untold = self._num_untold, 0
        warn(
            f"{where}: the loss is not finite{who} ({num} micro-batch{'es' if num > 1 else ''} since this was said "
            "last); such a step enters no window. Look at this batch, and at the gradient norms of the step before"
        )
