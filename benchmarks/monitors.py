#!/usr/bin/env python
"""What each callback that watches adds to a step of the demo, in which nothing happens.

python benchmarks/monitors.py
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.timing import Figure  # noqa: E402
from stabilizer.callbacks import (  # noqa: E402
    CheckpointGuardCallback,
    DrillCallback,
    EarlyWarningCallback,
    GradNormCallback,
    LayerHealthCallback,
    LossMeanVarCallback,
    NumericsCallback,
    RolloutMismatchCallback,
    StabilizerCallback,
    attach,
)
from stabilizer.examples.gpt import GPT  # noqa: E402
from stabilizer.examples.recipe import make_loader, make_optimizer, next_byte_loss  # noqa: E402

__all__ = ["ROWS", "main", "monitors"]

TITLE = "What the callbacks that watch add to a quiet step"
#: Steps before anything is timed, and steps of one round: a whole number of every interval.
_WARMUP_STEPS, _ROUND = 200, 100

Suite = Callable[[], list[StabilizerCallback]]


def _norms() -> list[StabilizerCallback]:
    return [GradNormCallback()]


def _beside() -> list[StabilizerCallback]:
    """What early warning reads."""
    return [GradNormCallback(), LossMeanVarCallback()]


def _suites(folder: str) -> dict[str, tuple[Suite, Suite]]:
    """Name -> callbacks with it, and the same without."""
    ladder: Any = ["alarm", "skip", "lower_lr", "stop"]
    return {
        "LayerHealthCallback": (lambda: [*_norms(), LayerHealthCallback()], _norms),
        "EarlyWarningCallback": (lambda: [*_beside(), EarlyWarningCallback()], _beside),
        "NumericsCallback": (lambda: [*_norms(), NumericsCallback(dump_dir=folder)], _norms),
        "CheckpointGuardCallback": (lambda: [*_norms(), CheckpointGuardCallback()], _norms),
        "CheckpointGuardCallback with a ladder": (lambda: [*_norms(), CheckpointGuardCallback(ladder=ladder)], _norms),
        "RolloutMismatchCallback": (lambda: [*_norms(), RolloutMismatchCallback()], _norms),
        "DrillCallback without faults": (lambda: [*_norms(), DrillCallback()], _norms),
    }


class Training:
    """The demo's model in a plain loop of two micro-batches a step; what is ours of a step can be run alone.

    Args:
        callbacks: Of the training.
        tiny: Try it out.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback], *, tiny: bool) -> None:
        torch.manual_seed(0)
        context, batch_size = (16, 2) if tiny else (128, 8)
        self.model = GPT(context=16, num_layers=4, dim=16, num_heads=2) if tiny else GPT()
        self._optimizer = make_optimizer(list(self.model.parameters()), learning_rate=1e-4)
        self._batches = list(
            itertools.islice(iter(make_loader(context=context, batch_size=batch_size, seed=0, rank=0)), 2)
        )
        self._logp = -torch.rand(batch_size, context)
        self._observes = any(callback.observations is not None for callback in callbacks)
        # A table in the console is none of what is measured.
        with contextlib.redirect_stdout(io.StringIO()):
            self._handle = attach(
                None,
                model=self.model,
                optimizer=self._optimizer,
                callbacks=callbacks,
                loss_fn=next_byte_loss,
                log=lambda values, step: None,
            )
        self._hooks = [
            hook
            for hooks in (self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks)
            for hook in hooks.values()
        ]

    def step(self) -> float:
        """Train one step.

        Returns:
            Seconds of the processor.
        """
        start = time.process_time()
        for batch in self._batches:
            self._handle.record_batch(batch)
            loss = next_byte_loss(self.model, batch) / len(self._batches)
            loss.backward()
            self._handle.record_loss(loss.detach() * len(self._batches))
        self._observe()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - start

    def ours(self) -> float:
        """What the callbacks do at a step, and nothing else: the optimizer's hooks without its step.

        Returns:
            Seconds of the processor.
        """
        start = time.process_time()
        for batch in self._batches:
            self._handle.record_batch(batch)
            self._handle.see_batch(self.model, (batch,), {})
            self._handle.record_loss(self._logp[0, 0])
        self._observe()
        for hook in self._hooks:
            hook(self._optimizer, (), {})
        return time.process_time() - start

    def keep_gradients(self) -> None:
        """Let there be gradients, for `ours` alone; no step comes afterwards."""
        self.model.eval()  # no micro-batch of a step
        next_byte_loss(self.model, self._batches[0]).backward()
        self.model.train()

    def close(self) -> None:
        """Take everything away."""
        self._handle.close()

    def _observe(self) -> None:
        if self._observes:
            self._handle.observe(
                logp_train=self._logp,
                logp_rollout=self._logp,
                mask=torch.ones_like(self._logp),
                entropy=1.0,
                kl_ref=0.1,
                reward=self._logp[:, 0],
            )


def monitors(*, tiny: bool = False) -> list[Figure]:
    """Time of what a callback adds to a step, over a whole number of its intervals.

    Args:
        tiny: Try it out.

    Returns:
        For each of them, beside `GradNormCallback`: percent of a step of the demo.
    """
    with tempfile.TemporaryDirectory() as folder:
        suites = _suites(folder)
        base = _time(_norms, tiny=tiny)
        figures = []
        for name, pair in suites.items():
            added, pairs = _added(pair, tiny=tiny)
            details = {"added_seconds": pairs, "step_seconds": base}
            what = f"what {name} adds to a step, in percent of it"
            how = f"hooks alone, {1e3 * added:.2g} ms of {1e3 * base:.4g} ms of the processor, two micro-batches a step"
            figures.append(Figure("monitors", what, 100 * added / base, "%", None, how, details))
    return figures


def _time(suite: Suite, *, tiny: bool) -> float:
    """Seconds of a whole step: the median."""
    training = Training(suite(), tiny=tiny)
    seconds = [training.step() for _ in range(4 if tiny else 12)]
    training.close()
    return statistics.median(seconds[2:])


def _added(pair: tuple[Suite, Suite], *, tiny: bool) -> tuple[float, list[float]]:
    """Seconds that the first suite takes more a step than the second: the median over rounds, and all of these."""
    trainings = [Training(suite(), tiny=tiny) for suite in pair]
    for training in trainings:
        training.keep_gradients()
        for _ in range(2 if tiny else _WARMUP_STEPS):
            training.ours()
    rounds = []
    for _ in range(2 if tiny else 5):
        mine, others = (_mean(training, 2 if tiny else _ROUND) for training in trainings)
        rounds.append(mine - others)
    for training in trainings:
        training.close()
    return statistics.median(rounds), rounds


def _mean(training: Training, num_steps: int) -> float:
    return sum(training.ours() for _ in range(num_steps)) / num_steps


ROWS: dict[str, Callable[..., list[Figure]]] = {"monitors": monitors}
main = command_line(ROWS, title=TITLE, name="monitors")


if __name__ == "__main__":
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    sys.exit(main())
