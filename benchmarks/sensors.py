#!/usr/bin/env python
"""What local norms cost a training step of the small GPT, as ratios within one run.

python benchmarks/sensors.py           # everything
python benchmarks/sensors.py --check   # exit status 1 if a target is missed
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.timing import Figure, Samples, ratio_figure, threads, until_two_agree  # noqa: E402
from stabilizer.examples.gpt import GPT  # noqa: E402
from stabilizer.examples.recipe import make_loader, make_optimizer, next_byte_loss  # noqa: E402
from stabilizer.parameters import ParameterIndex  # noqa: E402
from stabilizer.sensors import Sensors  # noqa: E402

__all__ = ["ROWS", "main", "one_process"]

TITLE = "What local norms cost a training step"
TARGET = 1.005
_PAIR = ("with", "without")


class Training:
    """The demo's training: one step at a time, in two micro-batches or one.

    Args:
        model: Trained in place.
        batches: One a micro-batch, used again and again.
    """

    def __init__(self, model: nn.Module, batches: list[Tensor]) -> None:
        self.model = model
        self.optimizer = make_optimizer(list(model.parameters()))  # type: ignore[arg-type]
        self.sensors = Sensors(model, ParameterIndex(model))
        self.batches = batches

    def step(self) -> None:
        """Train one step, and take the norms of each micro-batch where sensors are on."""
        for batch in self.batches:
            next_byte_loss(self.model, batch).backward()
            self.sensors.take()
        self.optimizer.step()
        self.optimizer.zero_grad()


def one_process(*, tiny: bool = False) -> list[Figure]:
    """Steps of one process with and without sensors, and the backward pass alone of a model that does next to nothing.

    Args:
        tiny: Try it out.

    Returns:
        The ratio of steps with one and with two micro-batches, and what is added as a share of a step.
    """
    model, batch_size, context = (
        (GPT(context=16, num_layers=1, dim=16, num_heads=2), 2, 16) if tiny else (GPT(), 8, 128)
    )
    loader = iter(make_loader(context=context, batch_size=batch_size, seed=0, rank=0))
    batches = list(itertools.islice(loader, 2))
    figures = []
    for num_micro_batches in (1, 2):
        training = Training(model, batches[:num_micro_batches])
        samples, apart = _steps(training, tiny=tiny)
        what = f"step with sensors / without, micro-batches: {num_micro_batches}"
        how = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M float32 parameters, medians of pairs"
        figures.append(ratio_figure("one process", what, samples, _PAIR, target=TARGET, how=how, apart=apart))
        if num_micro_batches == 1:
            figures.append(_added(copy.deepcopy(model), statistics.median(samples["without"]), tiny=tiny))
    return figures


def _steps(training: Training, *, tiny: bool) -> tuple[Samples, float]:
    """One model for both, so that memory and caches are the same."""
    rounds = 4 if tiny else 24
    for _ in range(2):
        training.step()
    return until_two_agree(lambda: _in_turn(training.sensors, training.step, rounds), [_PAIR], runs=2, tolerance=0.003)


def _in_turn(sensors: Sensors, function: Callable[[], object], rounds: int) -> Samples:
    samples: Samples = {name: [] for name in _PAIR}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in _PAIR if number % 2 else reversed(_PAIR):
                sensors.start() if name == "with" else sensors.close()
                start = time.perf_counter()
                function()
                samples[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
        sensors.close()
    return samples


def _added(model: nn.Module, step_seconds: float, *, tiny: bool) -> Figure:
    """The difference, where nothing else takes time: the noise of a step is larger than what is looked for."""
    parameters = list(model.parameters())
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    sensors = Sensors(model, ParameterIndex(model))

    def backward() -> None:
        # Each parameter's gradient is there already; a leaf's hooks run as they do in a whole backward pass.
        torch.autograd.backward([parameter.view_as(parameter) for parameter in parameters], gradients)
        sensors.take()
        for parameter in parameters:
            parameter.grad = None

    backward()
    samples, apart = until_two_agree(
        lambda: _in_turn(sensors, backward, 5 if tiny else 200), [_PAIR], runs=2 if tiny else 6
    )
    added = statistics.median(samples["with"]) - statistics.median(samples["without"])
    value = 100 * added / step_seconds
    how = f"difference of two bare backward passes, n={len(samples['with'])}, {threads()}"
    details = {"added_seconds": added, "step_seconds": step_seconds, "runs_apart": apart}
    return Figure("one process", "what sensors add, in percent of a step", value, "%", 100 * (TARGET - 1), how, details)


ROWS: dict[str, Callable[..., list[Figure]]] = {"one process": one_process}
main = command_line(ROWS, title=TITLE, name="sensors")


if __name__ == "__main__":
    sys.exit(main())
