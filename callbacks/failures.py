"""What happens when our own code fails: told once, agreed on by all ranks, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from stabilizer.callbacks.agreement import Agreement
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.errors import logger
from stabilizer.late import LateLog
from stabilizer.reduction import rank

__all__ = ["Failures"]


class Failures:
    """Takes exceptions of callbacks and of the suite.

    Args:
        callbacks: In the order of their numbers.
        agreement: Tells the other ranks.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback], agreement: Agreement) -> None:
        self._callbacks, self._agreement = callbacks, agreement
        self._has_reported = False
        self._unsettled: set[int] = set()
        self._told: set[str] = set()

    @property
    def may_search(self) -> bool:
        """Whether no callback that localises is off on this rank and perhaps not on the others."""
        return not any(self._callbacks[number].localizes for number in self._unsettled)

    @property
    def is_undecided(self) -> bool:
        """Whether a callback that acts is off on this rank and perhaps not on the others: then nobody shall act."""
        return any(self._callbacks[number].acts or self._callbacks[number].lowers_lr for number in self._unsettled)

    def settle(self) -> None:
        """All ranks know who is off."""
        self._unsettled = {number for number in self._unsettled if not self._agreement.is_known(number)}

    def of_callback(self, number: int, what: str, error: Exception, *, step: int) -> None:
        """Turn a callback off, unless it is strict.

        Args:
            number: Of the callback.
            what: What it was doing.
            error: What it raised.
            step: The optimizer step.

        Raises:
            Exception: The error, if the callback is strict.
        """
        callback = self._callbacks[number]
        if callback.strict:
            raise error
        if not callback.has_failed:
            self.report(f"{type(callback).__name__}.{what}", error, step=step)
        callback.has_failed = True
        self._agreement.fail(number)
        if callback.acts or callback.localizes or callback.lowers_lr:
            self._unsettled.add(number)

    def of_measuring(self, error: Exception, *, step: int) -> None:
        """Turn everything off when the ranks have agreed, unless a callback is strict.

        Args:
            error: What local statistics failed with.
            step: The optimizer step.

        Raises:
            Exception: The error, if a callback is strict.
        """
        if any(callback.strict for callback in self._callbacks):
            raise error
        if not self._has_reported:
            self._has_reported = True
            self.report("measuring gradients", error, step=step)
        self._agreement.measuring_failed()

    def write(
        self,
        late: LateLog,
        *,
        step: int,
        before: int | None = None,
        wait: bool = False,
        after_exception: bool = False,
    ) -> None:
        """Write what has reached the host; a logger that fails is told of once, and gets nothing more.

        Args:
            late: Has it.
            step: The optimizer step.
            before: Only rows of earlier steps.
            wait: Whether to wait for what is on its way.
            after_exception: Whether the run breaks off.
        """
        try:
            late.drain(before=before, wait=wait, after_exception=after_exception)
        except Exception as error:
            if any(callback.strict for callback in self._callbacks):
                raise
            self.report("writing to the loggers", error, step=step)
            late.stop()
        while late.failures:
            number, failure = late.failures.popleft()
            self.of_callback(number, "later", failure, step=step)
        while late.failures_aside:
            number, what, failure = late.failures_aside.popleft()
            self._of_picture(number, what, failure)

    def _of_picture(self, number: int, what: str, error: Exception) -> None:
        """A picture or a text is left out; its callback goes on, unless it is strict."""
        if 0 <= number < len(self._callbacks) and self._callbacks[number].strict:
            raise error
        if what not in self._told:
            self._told.add(what)
            logger.error("%s failed and is left out; training goes on (told once)", what, exc_info=error)

    @staticmethod
    def report(what: str, error: Exception, *, step: int) -> None:
        """Log a failure with its traceback.

        Args:
            what: What failed.
            error: How.
            step: The optimizer step.
        """
        logger.error(
            "%s failed at step %d on rank %d; it is off from now on, training goes on (strict=True would end the run)",
            what,
            step,
            rank(),
            exc_info=error,
        )
