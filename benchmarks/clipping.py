#!/usr/bin/env python
"""What clipping by layer and by the total costs beside `clip_grad_norm_`, as ratios within one run.

python benchmarks/clipping.py           # everything
python benchmarks/clipping.py --check   # exit status 1 if a target is missed
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.one_process import Silent, gpt2  # noqa: E402
from benchmarks.processes import run_fresh  # noqa: E402
from benchmarks.timing import Figure, Samples, agreement, ratio_figure, until_two_agree  # noqa: E402
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback  # noqa: E402
from stabilizer.callbacks.suite import Suite  # noqa: E402

__all__ = ["ROWS", "ClipTimer", "main", "one_process", "two_processes"]

TITLE = "What clipping by layer and by the total costs"
_QUIET, _CLIPPED = ("quiet", "quiet_torch"), ("clipped", "clipped_torch")
#: Steps between two spikes: more spikes than 14 % would be taken for the new level.
_STEPS_BETWEEN = 8
_FACTOR = 10.0
_WARMUP_STEPS = 50


class ClipTimer:
    """Gradients that can be quiet or spike in all layers, and a suite whose thresholds know the quiet ones.

    Args:
        model: With parameters on the CPU; DTensors too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = list(model.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.gradients = [_local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for gradient in self.gradients:
            gradient.normal_()
        self._before = [gradient.clone() for gradient in self.gradients]
        self.callbacks = [LayerClipCallback(), AdaptiveClipThreshold()]
        optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.suite = Suite(self.callbacks, model=model, optimizer=optimizer, sink=Silent())
        for _ in range(_WARMUP_STEPS + 1):
            self.clip()
            self.calm()  # the total has a low limit as long as its threshold is not known
        self.clip_as_torch(1e9)  # the first call with DTensors is slow

    def clip(self) -> None:
        """All of ours in one step: statistics, thresholds, clips, counts and logs; the optimizer does not move."""
        self.suite.run()
        self.suite.before_step()
        self.suite.finish()

    def clip_as_torch(self, max_norm: float) -> None:
        """What most loops do.

        Args:
            max_norm: Limit of the total norm.
        """
        clip_grad_norm_(self.parameters, max_norm)

    def spike(self) -> None:
        """Let every layer's gradient be ten times as large."""
        self.calm()
        torch._foreach_mul_(self.gradients, _FACTOR)

    def calm(self) -> None:
        """Let the gradients be what they were at first."""
        torch._foreach_copy_(self.gradients, self._before)

    def time(self, *, rounds: int) -> Samples:
        """Time ours and torch's in turn: eight times with quiet gradients, once with a spike of all layers.

        Args:
            rounds: How often.

        Returns:
            Seconds of every call.
        """
        samples: Samples = {name: [] for name in (*_QUIET, *_CLIPPED)}
        with _no_collection():
            for number in range(rounds):
                self.calm()
                for quiet in range(_STEPS_BETWEEN):
                    calls = [("quiet", self.clip), ("quiet_torch", lambda: self.clip_as_torch(1e9))]
                    for name, call in _in_turn(calls, quiet):
                        samples[name].append(_seconds(call))
                self._check(factor=1.0)
                calls = [("clipped", self.clip), ("clipped_torch", lambda: self.clip_as_torch(1.0))]
                for name, call in _in_turn(calls, number):
                    self.spike()
                    samples[name].append(_seconds(call))
                    if name == "clipped":
                        self._check(factor=2.0)
        return samples

    def _check(self, *, factor: float) -> None:
        """What was timed is what was meant: all gradients untouched, or all down at their thresholds."""
        ratios = torch.stack(
            [now.norm() / before.norm() for now, before in zip(self.gradients, self._before, strict=True)]
        )
        torch.testing.assert_close(ratios, torch.full_like(ratios, factor), rtol=0.02, atol=0)


def one_process(*, tiny: bool = False) -> list[Figure]:
    """Both callbacks beside `clip_grad_norm_`, in one process.

    Args:
        tiny: Try it out.

    Returns:
        Two ratios with targets: nothing to clip, and everything clipped.
    """
    timer = ClipTimer(gpt2(tiny=tiny))
    timer.time(rounds=1)  # first calls allocate
    rounds, runs = (1, 2) if tiny else (12, 8)
    samples, apart = until_two_agree(lambda: timer.time(rounds=rounds), [_QUIET, _CLIPPED], runs=runs)
    how = f"{sum(p.numel() for p in timer.parameters) / 1e6:.0f} M float32 parameters"
    return _figures("one_process", "", samples, how=how, apart=apart, num_threads=None)


def two_processes(*, tiny: bool = False) -> list[Figure]:
    """Both callbacks beside `clip_grad_norm_` of DTensors, under FSDP2 in two processes.

    Args:
        tiny: Try it out.

    Returns:
        Two ratios with targets: nothing to clip, and everything clipped.
    """
    samples = run_fresh(_sharded, tiny)[0]
    # Two ranks cannot each decide to go on, so the halves of one run stand for two runs.
    halves = [{name: values[half::2] for name, values in samples.items()} for half in (0, 1)]
    apart = agreement(halves[0], halves[1], [_QUIET, _CLIPPED])
    how = "GPT-2 small, two gloo processes, without the first call"
    return _figures("two_processes", "FSDP2: ", samples, how=how, apart=apart, num_threads=1)


ROWS: dict[str, Callable[..., list[Figure]]] = {"one_process": one_process, "two_processes": two_processes}
main = command_line(ROWS, title=TITLE, name="clipping")


def _sharded(rank: int, tiny: bool) -> Samples:
    model = gpt2(tiny=tiny)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    timer = ClipTimer(model)
    timer.time(rounds=1)
    return timer.time(rounds=2 if tiny else 24)


def _figures(
    row: str, where: str, samples: Samples, *, how: str, apart: float, num_threads: int | None
) -> list[Figure]:
    ours = f"{where}LayerClip and AdaptiveClip, whole step"
    return [
        ratio_figure(
            row, f"{ours}, {what}", samples, pair, target=target, how=how, apart=apart, num_threads=num_threads
        )
        for what, pair, target in (
            ("nothing clipped / clip_grad_norm_", _QUIET, 0.8),
            ("everything clipped / clip_grad_norm_", _CLIPPED, 1.1),
        )
    ]


def _in_turn(calls: list[tuple[str, Callable[[], None]]], number: int) -> Iterator[tuple[str, Callable[[], None]]]:
    yield from calls if number % 2 else reversed(calls)


def _seconds(call: Callable[[], None]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    sys.exit(main())
