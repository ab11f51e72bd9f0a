"""Values that reach the host late: copied while the device works on, read when they have arrived."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stabilizer.background import SHARED, Background

__all__ = ["HostCopy", "LateLog", "Sink", "answers_soon"]

# Seconds for pictures and texts at the end of a run, and after an exception, which a person waits to see: a logger that
# hangs shall not hang the run.
_PATIENCE, _PATIENCE_AFTER_EXCEPTION = 60.0, 5.0


class Sink(Protocol):
    """Where a host keeps its metrics. Every rank has one; only the one that logs has `is_logging`."""

    is_logging: bool

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a matplotlib figure under a step."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text under a step."""

    def folder(self) -> str | None:
        """Where the loggers keep their files; `None` where they have none."""

    def show(self, values: dict[str, float]) -> None:
        """Show numbers on the progress bar."""

    def arguments(self, values: Mapping[str, bool | float | str]) -> Callable[[bool], None]:
        """Show arguments beside those of the run, from now until the result is called; see `WriterSink.arguments`."""

    def charts(self, layout: dict[str, dict[str, list[Any]]]) -> None:
        """Arrange charts: page -> title -> kind and tags, as TensorBoard takes it. Called before any number."""


class HostCopy:
    """A copy on its way to the host.

    Args:
        tensor: On any device; a later change of it does not reach the copy.
        is_own: Whether nobody else has the tensor: on a CPU it is its own copy then.
    """

    def __init__(self, tensor: Tensor, *, is_own: bool = False) -> None:
        if tensor.device.type == "cpu":
            self._copy, self._event = tensor if is_own else tensor.clone(), None
        else:
            # The destination of a copy that does not block is pinned memory, which torch keeps for the next one.
            module = torch.get_device_module(tensor.device)
            self._copy = tensor.to("cpu", non_blocking=True)
            self._event = module.Event()
            self._event.record(module.current_stream(tensor.device))

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """The values; waits for them if it must."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def answers_soon(device: torch.device, *, seconds: float = 5.0) -> bool:
    """Whether a device gets through its queue within some time: after a failed collective it may never.

    Args:
        device: Of any kind; a CPU has no queue.
        seconds: How long to wait.
    """
    if device.type == "cpu":
        return True
    module = torch.get_device_module(device.type)
    event = module.Event()
    event.record(module.current_stream(device))
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@dataclasses.dataclass
class _Part:
    """Some of a row's values, and who takes them: the loggers under these tags, a function, or both."""

    size: int
    tags: Sequence[str]
    then: Callable[[int, Tensor], None] | None
    show: bool
    owner: int
    finite_only: bool


@dataclasses.dataclass
class _Row:
    step: int
    parts: list[_Part]
    values: HostCopy


class LateLog:
    """Collects what callbacks log at a step, copies it to the host in one piece, and writes it at a later step.

    Args:
        sink: The host's loggers.
        background: Draws pictures and writes texts; default the process's.

    Attributes:
        failures: Exceptions of functions that took values late, and whose they were; the reader empties it.
        failures_aside: Exceptions of what was done aside, whose it was and what; likewise.

    Example:
        >>> class Print:
        ...     is_logging = True
        ...     def scalars(self, values, step):
        ...         print(step, values)
        >>> late = LateLog(Print())
        >>> late.add(torch.tensor(2.0), tags=["loss"])
        >>> late.close_step(0)
        >>> late.drain(before=0)  # not yet: it belongs to this step
        >>> late.drain(before=1)
        0 {'loss': 2.0}
    """

    def __init__(self, sink: Sink, background: Background | None = None) -> None:
        self.sink = sink
        self.failures: deque[tuple[int, Exception]] = deque()
        self.failures_aside: deque[tuple[int, str, Exception]] = deque()
        self._background = SHARED if background is None else background
        self._is_on = sink.is_logging
        self._parts: list[_Part] = []
        self._values: list[Tensor] = []
        self._rows: deque[_Row] = deque()

    def add(
        self,
        values: Tensor | float,
        *,
        tags: Sequence[str] = (),
        then: Callable[[int, Tensor], None] | None = None,
        show: bool = False,
        owner: int = -1,
        finite_only: bool = False,
    ) -> None:
        """Take values of the current step.

        Args:
            values: Numbers, on any device.
            tags: One name a number, to log them; empty for values that only `then` reads.
            then: Called late, where the loggers are, with the step and the values (flat, float32, on the CPU).
            show: Show the numbers on the progress bar too.
            owner: Number of the callback that `then` belongs to.
            finite_only: Leave out numbers that are not finite: there is nothing to draw.

        Raises:
            ValueError: If there are more or fewer tags than numbers.
        """
        if not self._is_on:
            return
        tensor = torch.as_tensor(values).detach().reshape(-1).to(torch.float32)
        if tags and tensor.numel() != len(tags):
            raise ValueError(f"{len(tags)} tags for {tensor.numel()} values: {list(tags)[:3]}")
        self._parts.append(_Part(tensor.numel(), tags, then, show, owner, finite_only))
        self._values.append(tensor)

    def aside(self, what: str, function: Callable[[], None], *, owner: int = -1, is_large: bool = False) -> None:
        """Have something done that the step does not wait for, in the order of the calls, where the loggers are.

        Args:
            what: In a few words, for a person.
            function: Starts no collective and touches no device.
            owner: Number of the callback that it belongs to.
            is_large: Whether it holds much memory, or takes long.
        """
        if self._is_on:
            self._background.add(
                what, function, failed=lambda error: self.failures_aside.append((owner, what, error)), is_large=is_large
            )

    def forget(self) -> None:
        """Drop what was taken for a step that did not happen."""
        self._parts, self._values = [], []

    def stop(self) -> None:
        """Write nothing any more."""
        self._is_on = False
        self._rows.clear()
        self._parts, self._values = [], []

    def close_step(self, step: int) -> None:
        """Start the copy of all that was taken for a step.

        Args:
            step: The step that the values belong to.
        """
        if not self._values:
            return
        devices = [value.device for value in self._values]
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        packed = torch.cat([value.to(device, non_blocking=True) for value in self._values])
        self._rows.append(_Row(step, self._parts, HostCopy(packed, is_own=True)))
        self._parts, self._values = [], []

    def drain(self, *, before: int | None = None, wait: bool = False, after_exception: bool = False) -> None:
        """Write what has arrived.

        Args:
            before: Only rows of earlier steps than this; default all.
            wait: Wait for copies that are still on their way, and for what is done aside.
            after_exception: Whether the run breaks off: what is done aside is not waited for that long then.
        """
        while self._rows and (before is None or self._rows[0].step < before):
            if not wait and not self._rows[0].values.is_ready:
                return
            # At the end of a run the progress bar takes nothing any more.
            self._write(self._rows.popleft(), show=not wait)
        if wait:
            self._background.drain(seconds=_PATIENCE_AFTER_EXCEPTION if after_exception else _PATIENCE)

    def _write(self, row: _Row, *, show: bool) -> None:
        pieces = row.values.read().split([part.size for part in row.parts])
        scalars: dict[str, float] = {}
        for part, piece in zip(row.parts, pieces, strict=True):
            named = dict(zip(part.tags, piece.tolist(), strict=True)) if part.tags else {}
            if part.finite_only:
                named = {tag: value for tag, value in named.items() if math.isfinite(value)}
            scalars.update(named)
            if show and part.show:
                self.sink.show(named)
        if scalars:
            self.sink.scalars(scalars, row.step)
        for part, piece in zip(row.parts, pieces, strict=True):
            if part.then is None:
                continue
            try:
                part.then(row.step, piece)
            except Exception as error:
                # The fault of one callback; the rows of the others go on.
                self.failures.append((part.owner, error))
