"""Ranks that search together: after everything that one of them may fail at, they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from stabilizer.reduction import Reducer, rank

__all__ = ["Agreed", "Lockstep", "OtherRankFailedError"]

_Result = TypeVar("_Result")


class OtherRankFailedError(RuntimeError):
    """Another rank has failed: this one breaks off too, before it would wait for that rank in a collective."""


class Agreed(NamedTuple):
    """What holds for any rank.

    Attributes:
        has_failed: Some rank's attempt has raised.
        wants_more: Some rank needs another pass.
        is_unproved: Some rank has not shown that what it has found explains its part.
        is_late: Some rank's time is over.
    """

    has_failed: bool
    wants_more: bool
    is_unproved: bool
    is_late: bool


class Lockstep:
    """Keeps ranks in step: each has the same passes, whatever it finds in them.

    The first failure, of whichever rank, is the end: every rank hears of it at the same `agree` or `meet`, and none of
    them waits for another from then on.

    Args:
        reducer: Reaches the other ranks.

    Attributes:
        error: What this rank has failed with, as text: an exception would keep alive what its frames hold.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.error: str | None = None
        self._reducer = reducer
        # On the host where the ranks can talk there: a device that computes is then not waited for.
        self._host = Reducer(torch.device("cpu")) if reducer.world_size > 1 else reducer
        self._is_over = False

    def attempt(self, function: Callable[[], _Result]) -> _Result | None:
        """Do something that may fail; the others learn of it at the next `agree`.

        Args:
            function: What to do.

        Returns:
            What it gave; `None` if it has failed.
        """
        try:
            return function()
        except Exception as error:
            # What comes after the end is only its consequence.
            if not self._is_over:
                self.error = self.error or f"{type(error).__name__}: {error}"
            return None

    def agree(self, *, wants_more: bool = False, is_unproved: bool = False, is_late: bool = False) -> Agreed:
        """Tell the other ranks, and hear them: a collective of four numbers, and a wait.

        Args:
            wants_more: Whether this rank needs another pass.
            is_unproved: Whether it has not shown yet that what it has found explains its part.
            is_late: Whether its time is over.
        """
        if self._is_over:
            return Agreed(has_failed=True, wants_more=False, is_unproved=True, is_late=False)
        own = [self.error is not None, wants_more, is_unproved, is_late]
        numbers = torch.tensor([float(flag) for flag in own])
        agreed = Agreed(*(number > 0 for number in self._host.sum(numbers).tolist()))
        self._is_over = agreed.has_failed
        return agreed

    def meet(self) -> None:
        """Before a collective that others may wait in: go on only if all ranks have come here.

        A rank that fails does not come, but to the `agree` after its attempt, which is the same collective.

        Raises:
            OtherRankFailedError: If some rank has failed.
        """
        if self.agree().has_failed:
            raise OtherRankFailedError("another rank has failed: see its error")

    def errors(self) -> list[str]:
        """What ranks have failed with, with their numbers: a collective."""
        own = None if self.error is None else f"rank {rank()}: {self.error}"
        return [text for text in self._reducer.objects(own) if text is not None]
