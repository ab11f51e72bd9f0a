"""What callbacks have put off until a step is over for all of them."""

from __future__ import annotations

from collections.abc import Callable

from stabilizer.callbacks.failures import Failures
from stabilizer.errors import TrainingStoppedError

__all__ = ["Deferred"]


class Deferred:
    """Functions in the order in which they came; one may save a checkpoint, which asks for the states of all.

    Args:
        failures: Takes what goes wrong.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._functions: list[tuple[int, Callable[[], None]]] = []

    def add(self, number: int, function: Callable[[], None]) -> None:
        """Put something off.

        Args:
            number: Of the callback in its suite.
            function: What to call.
        """
        self._functions.append((number, function))

    def clear(self) -> None:
        """The step did not happen."""
        self._functions = []

    def call(self, *, step: int) -> None:
        """The step is over.

        Args:
            step: Its number.

        Raises:
            TrainingStoppedError: If that is what one of them wants; the others are called first.
        """
        functions, self._functions = self._functions, []
        stop: TrainingStoppedError | None = None
        for number, function in functions:
            try:
                function()
            except TrainingStoppedError as error:
                stop = stop or error
            except Exception as error:
                self._failures.of_callback(number, "an action", error, step=step)
        if stop is not None:
            raise stop
