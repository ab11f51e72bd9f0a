"""RunMemory: whether a run that begins is another one than the last, for a callback whose notes belong to a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from stabilizer.callbacks.run_host import RunHost

__all__ = ["RunMemory"]


class RunMemory:
    """Remembers which run a callback was in, and whether it was given a state since."""

    def __init__(self) -> None:
        self._is_loaded = False
        self._engine: Callable[[], Any] | None = None

    def note_state(self) -> None:
        """A state was loaded: what comes next goes on from there."""
        self._is_loaded = True

    def is_another(self, host: RunHost) -> bool:
        """Whether nothing of the past belongs to the run that begins; to be asked once.

        Args:
            host: Of the run.
        """
        engine = host.engine
        if host.kind == "lightning":
            goes_on = engine.global_step > 0
        else:
            goes_on = engine is not None and self._engine is not None and engine is self._engine()
            self._engine = None if engine is None else weakref.ref(engine)
        return not (goes_on or self._is_loaded)

    def end(self) -> None:
        """The run is over."""
        self._is_loaded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}
