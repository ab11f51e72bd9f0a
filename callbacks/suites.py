"""All suites of a run: one for each optimizer, made when its first step comes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.console import RunConsole
from stabilizer.callbacks.loss_meter import weights_of
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.run_facts import RunFacts
from stabilizer.callbacks.run_summary import show_summary
from stabilizer.callbacks.suite import Suite
from stabilizer.errors import logger
from stabilizer.late import Sink
from stabilizer.tally import LossTally

__all__ = ["Suites"]


class Suites:
    """What a host drives.

    Args:
        callbacks: All of ours.
        sink: The host's loggers.

    Attributes:
        tally: Takes the losses of this rank.
        known_names: Names of parameters that `layers=` may mean whatever an optimizer trains.
        facts: What is known of the run.
        replays: The micro-batches of the step at hand.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback], *, sink: Sink) -> None:
        self.callbacks = list(callbacks)
        self.sink = sink
        self.replays = Replays(callbacks)
        observations = [callback.observations for callback in callbacks if callback.observations is not None]
        for observed in observations:
            observed.discard()
            observed.is_paused = functools.partial(getattr, self.replays, "is_running")
        self.tally = LossTally(
            weights_of(callbacks),
            keeps_losses=any(callback.names_nonfinite for callback in callbacks),
            followers=observations,
        )
        self.known_names: tuple[str, ...] = ()
        self.facts = RunFacts(callbacks)
        self._console = RunConsole()
        for callback in self.callbacks:
            callback.console = self._console
        self._suites: dict[int, Suite] = {}

    def __iter__(self) -> Iterator[tuple[int, Suite]]:
        """Positions of optimizers that have made a step, and their suites."""
        return iter(self._suites.items())

    def get(
        self,
        number: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Mapping[str, Any] | None = None,
    ) -> Suite:
        """The suite of an optimizer.

        Args:
            number: Position of the optimizer.
            model: As it trains, wrapped.
            optimizer: Some hosts make it anew within a run.
            groups: See `ParameterIndex`.
        """
        if number not in self._suites:
            self._suites[number] = Suite(
                self.callbacks,
                model=model,
                optimizer=optimizer,
                sink=self.sink,
                optimizer_index=number,
                groups=groups,
                known_names=self.known_names,
                facts=self.facts,
                replays=self.replays,
            )
        self._suites[number].optimizer = optimizer
        return self._suites[number]

    def existing(self, number: int) -> Suite | None:
        """The suite of an optimizer that has made a step.

        Args:
            number: Position of the optimizer.
        """
        return self._suites.get(number)

    def abandon(self, number: int) -> bool:
        """Forget the open step of an optimizer.

        Args:
            number: Its position.

        Returns:
            Whether there was one.
        """
        is_open = number in self._suites and self._suites[number].is_open
        if is_open:
            self._suites[number].abandon()
        return is_open

    def close(self, *, is_end: bool = True, after_exception: bool = False) -> None:
        """Write everything and let go of the model; what comes next gets new suites.

        Args:
            is_end: Whether the run ends; else it goes on from a checkpoint.
            after_exception: Whether the run breaks off: its exception is the one to show, not one of ours.
        """
        self.tally.close()
        self.facts.let_go()
        suites, self._suites = self._suites, {}  # a suite holds the model
        for suite in suites.values():
            try:
                suite.close(is_end=is_end, after_exception=after_exception)
            except Exception:
                if not after_exception:
                    raise
                logger.exception("closing after an exception failed as well")
        if is_end:
            show_summary(self._console, folder=self.sink.folder, after_exception=after_exception)
