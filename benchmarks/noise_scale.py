#!/usr/bin/env python
"""What the noise scale costs a step of a 124 M parameter model, beside one `_foreach_norm` of its gradients.

python benchmarks/noise_scale.py           # everything
python benchmarks/noise_scale.py --check   # exit status 1 if a target is missed
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.one_process import gpt2  # noqa: E402
from benchmarks.timing import Figure, Samples, threads, time_in_turn  # noqa: E402
from stabilizer.callbacks import GradNoiseScaleCallback, GradNormCallback, StabilizerCallback, attach  # noqa: E402

__all__ = ["ROWS", "Bare", "main", "one_process"]

TITLE = "What the noise scale costs a step"
#: Of one `_foreach_norm`: on, and at the steps between.
TARGETS = {"on": 1.2, "between": 0.05}
_NEVER = 10**9


class Bare(nn.Module):
    """Steps in which nothing takes time but what callbacks do: the gradients are there already.

    Args:
        model: Whose parameters and names are taken; the parameters' memory is shared, and so is that of gradients.
        callbacks: At work.
    """

    def __init__(self, model: nn.Module, callbacks: list[StabilizerCallback]) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        for own, given in zip(self.model.parameters(), model.parameters(), strict=True):
            own.data, own.grad = given.data, given.grad
        self.own = list(self.model.parameters())
        optimizer = torch.optim.SGD(self.own, lr=0.1)
        self.handle = None
        if callbacks:
            self.handle = attach(
                None, model=self, optimizer=optimizer, callbacks=callbacks, log=lambda values, step: None
            )

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """What a backward pass begins at."""
        return [parameter.view_as(parameter) for parameter in self.own]

    def step(self, num_micro_batches: int = 1) -> None:
        """A step; its last forward, backward and norms as they come in training, the optimizer left out."""
        gradients = [parameter.grad for parameter in self.own]
        for _ in range(num_micro_batches):
            # Accumulates nothing, and runs the hooks of leaves all the same.
            torch.autograd.grad(self(torch.zeros(1, 1)), self.own, gradients)
            if self.handle is not None:
                self.handle.record_loss(1.0, weight=1.0)
        if self.handle is not None:
            self.handle.run(0)
            self.handle.finish(0)


def one_process(*, tiny: bool = False) -> list[Figure]:
    """One micro-batch a step, as each rank of a data-parallel run has it; and two.

    Args:
        tiny: Try it out.

    Returns:
        What is added, in times of one `_foreach_norm`, two figures with a target.
    """
    model = gpt2(tiny=tiny)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    quiet = {"heatmap_every_n_steps": None}
    steps = {
        "nothing": Bare(model, []),
        "norms": Bare(model, [GradNormCallback(**quiet)]),  # type: ignore[arg-type]
        "on": Bare(model, [GradNormCallback(**quiet), GradNoiseScaleCallback()]),  # type: ignore[arg-type]
        "alone": Bare(model, [GradNoiseScaleCallback()]),
        "between": Bare(model, [GradNormCallback(**quiet), GradNoiseScaleCallback(every_n_steps=_NEVER)]),  # type: ignore[arg-type]
    }
    functions: dict[str, Callable[[], object]] = {name: bare.step for name, bare in steps.items()}
    functions["two micro-batches"] = lambda: steps["on"].step(2)
    functions["foreach_norm"] = lambda: torch._foreach_norm(gradients)
    for bare in steps.values():
        bare.step(2)  # sensors that see one micro-batch a step and no more would rest
    _time(functions, rounds=2)
    samples = _time(functions, rounds=4 if tiny else 30)
    for bare in steps.values():
        if bare.handle is not None:
            bare.handle.close()
    how = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M float32 parameters"
    return [
        _added(samples, "on", "norms", "GradNoiseScaleCallback beside GradNormCallback, one micro-batch", how),
        _added(samples, "between", "norms", "the same at the steps between, every_n_steps", how),
        _added(samples, "two micro-batches", "norms", "the same with two micro-batches", how),
        _added(samples, "alone", "nothing", "GradNoiseScaleCallback alone, the step's own norms included", how),
    ]


def _time(functions: dict[str, Callable[[], object]], *, rounds: int) -> Samples:
    """All functions in every round, in an order by chance: there are too many of them for all orders."""
    samples: Samples = {name: [] for name in functions}
    for _ in range(rounds):
        order = random.sample(sorted(functions), len(functions))
        found = time_in_turn({name: functions[name] for name in order}, rounds=1)
        for name, times in found.items():
            samples[name] += times
    return samples


def _added(samples: Samples, name: str, without: str, what: str, how: str) -> Figure:
    """The median of differences within a round, of which the norm takes one."""
    differences = [one - other for one, other in zip(samples[name], samples[without], strict=True)]
    added, norm = statistics.median(differences), statistics.median(samples["foreach_norm"])
    smallest = {name: min(values) for name, values in samples.items()}
    details = {
        "median_seconds": {name: statistics.median(values) for name, values in samples.items()},
        "smallest_seconds": smallest,
        "ratio_of_smallest": (smallest[name] - smallest[without]) / smallest["foreach_norm"],
    }
    return Figure(
        "one process",
        f"what is added by {what} / torch._foreach_norm",
        added / norm,
        "times",
        TARGETS.get(name),
        f"{how}, medians of n={len(differences)}, {threads()}",
        details,
    )


ROWS: dict[str, Callable[..., list[Figure]]] = {"one process": one_process}
main = command_line(ROWS, title=TITLE, name="noise_scale")


if __name__ == "__main__":
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    sys.exit(main())
