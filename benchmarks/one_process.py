"""Rows of one process: the statistics of a step beside torch's own norms, and the import beside torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Figure, Samples, ratio_figure, time_in_turn, until_two_agree
from stabilizer import GradientStore, ParameterIndex
from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.suite import Suite
from stabilizer.examples.gpt import GPT

__all__ = ["Silent", "gpt2", "import_time", "statistics_of_a_step"]

ROOT = Path(__file__).resolve().parent.parent

IMPORT = """
import time
start = time.perf_counter()
import {name}
print(time.perf_counter() - start)
"""


class Silent:
    """Loggers that write nothing, so that only our own work is timed."""

    is_logging = True

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Drop the numbers."""

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Drop the picture."""

    def show(self, values: dict[str, float]) -> None:
        """Drop the numbers."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Drop the text."""

    def arguments(self, values: Any) -> Any:
        """Drop the arguments."""

    def charts(self, layout: dict[str, Any]) -> None:
        """Drop the charts."""


def gpt2(*, tiny: bool) -> nn.Module:
    """A GPT with the shapes of GPT-2 small (124 M parameters, input and output embedding tied).

    Args:
        tiny: A few thousand parameters instead, to try the benchmarks out.

    Returns:
        The model, float32, on the CPU.
    """
    sizes = {"vocab_size": 50257, "context": 1024, "num_layers": 12, "dim": 768, "num_heads": 12}
    if tiny:
        sizes = {"vocab_size": 64, "context": 16, "num_layers": 2, "dim": 16, "num_heads": 2}
    model = GPT(**sizes)
    model.head.weight = model.token_embedding.weight
    return model


def statistics_of_a_step(*, tiny: bool = False) -> list[Figure]:
    """All statistics of one step, and the whole callback, beside `_foreach_norm` and `clip_grad_norm_`.

    Args:
        tiny: Try it out.

    Returns:
        Four ratios, two of them with a target.
    """
    model = gpt2(tiny=tiny)
    parameters: list[Tensor] = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    store = GradientStore(ParameterIndex(model))
    view = store.view()
    suite = Suite([GradNormCallback()], model=model, optimizer=torch.optim.SGD(parameters, lr=0.1), sink=Silent())

    def statistics() -> tuple[Tensor, ...]:
        store.measure(step=0 if store.current is None else store.current.step + 1)
        return view.norms, view.total_norm, view.nonfinite

    def callback() -> None:
        suite.run()
        suite.finish()

    functions = {
        "statistics": statistics,
        "callback": callback,
        "foreach_norm": lambda: torch._foreach_norm(gradients),
        "clip_grad_norm": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
    }
    ours, theirs = ("statistics", "callback"), ("foreach_norm", "clip_grad_norm")
    pairs = [(one, other) for one in ours for other in theirs]
    time_in_turn(functions, rounds=2)  # first calls allocate
    samples, apart = until_two_agree(
        lambda: time_in_turn(functions, rounds=3 if tiny else 24), pairs, runs=2 if tiny else 8
    )
    names = {
        "statistics": "all statistics of a step",
        "callback": "GradNormCallback, whole",
        "foreach_norm": "torch._foreach_norm",
        "clip_grad_norm": "clip_grad_norm_ (nothing to clip)",
    }
    targets = {("statistics", "foreach_norm"): 1.15, ("statistics", "clip_grad_norm"): 0.75}
    how = f"{sum(p.numel() for p in parameters) / 1e6:.0f} M float32 parameters"
    return [
        ratio_figure(
            "statistics",
            f"{names[pair[0]]} / {names[pair[1]]}",
            samples,
            pair,
            target=targets.get(pair),
            how=how,
            apart=apart,
        )
        for pair in pairs
    ]


def import_time(*, tiny: bool = False) -> list[Figure]:
    """`import stabilizer` beside `import torch`, each in fresh interpreters.

    Args:
        tiny: Try it out.

    Returns:
        One ratio.
    """
    names, pair = ("torch", "stabilizer"), ("stabilizer", "torch")
    if not tiny:
        _imports(names, rounds=1)  # compiles, and brings the files into the machine's cache
    samples, apart = until_two_agree(lambda: _imports(names, rounds=1 if tiny else 7), [pair], runs=2 if tiny else 5)
    how = "fresh interpreters in turn"
    what = "import stabilizer / import torch"
    return [ratio_figure("import", what, samples, pair, target=1.3, how=how, apart=apart)]


def _imports(names: tuple[str, ...], *, rounds: int) -> Samples:
    samples: Samples = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            samples[name].append(_import_seconds(name))
    return samples


def _import_seconds(name: str) -> float:
    # An installed package has its byte code beside it; a developer's setting must not make ours compile each time.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORT.format(name=name)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout)
