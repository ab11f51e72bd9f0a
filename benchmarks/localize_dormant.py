"""Rows of what GradLoc costs while all is well: time of the demo's steps, and what ranks exchange."""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import run_fresh
from benchmarks.timing import Figure, ratio_figure, time_in_turn, until_two_agree
from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNormCallback,
    LayerClipCallback,
    StabilizerCallback,
    attach,
)
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, next_byte_loss
from tests.counting import count_collectives

__all__ = ["dormant", "exchanged"]

TARGET = 1.01
#: What GradLoc comes to: callbacks by the name of a training.
_BESIDE: dict[str, Callable[[], list[StabilizerCallback]]] = {
    "nothing": list,
    "GradNorm": lambda: [GradNormCallback()],
    "the clips": lambda: [LayerClipCallback(), AdaptiveClipThreshold()],
}
_HOW = "demo GPT, 2.7 M float32 parameters, steps of several trainings in turn"
#: Steps after which thresholds are known and sensors that tell nothing new rest.
_WARMUP_STEPS = 60


class Training:
    """A training of the demo in a plain loop.

    Args:
        folder: For incidents; there are none.
        beside: Of `_BESIDE`.
        localizes: Whether GradLoc is on.
        tiny: Try it out.
        wrap: Puts the model under a strategy.
    """

    def __init__(
        self,
        folder: str,
        beside: str,
        *,
        localizes: bool,
        tiny: bool,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(0)
        context, batch_size = (16, 2) if tiny else (128, 8)
        self.model = wrap(GPT(context=16, num_layers=1, dim=16, num_heads=2) if tiny else GPT())
        self.optimizer = make_optimizer(list(self.model.parameters()), learning_rate=1e-4)
        loader = iter(make_loader(context=context, batch_size=batch_size, seed=0, rank=0))
        self._batches = list(itertools.islice(loader, 8))
        callbacks = [*_BESIDE[beside](), *([GradLocCallback(dump_dir=folder)] if localizes else [])]
        # A table in the console is none of what is measured.
        with contextlib.redirect_stdout(io.StringIO()):
            self._handle = None if not callbacks else self._attach(callbacks)
        self.callbacks, self._num_steps = callbacks, 0
        self._hooks = [
            hook
            for hooks in (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
            for hook in hooks.values()
        ]

    def _attach(self, callbacks: list[StabilizerCallback]) -> Any:
        return attach(
            None,
            model=self.model,
            optimizer=self.optimizer,
            callbacks=callbacks,
            loss_fn=next_byte_loss,
            log=lambda values, step: None,
        )

    def step(self) -> None:
        """Train one step."""
        batch = self._batches[self._num_steps % len(self._batches)]
        self._num_steps += 1
        if self._handle is not None:
            self._handle.record_batch(batch)
        next_byte_loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep_gradients(self) -> None:
        """Let there be gradients, for `ours` alone; no step comes afterwards."""
        self.model.eval()  # no micro-batch of a step
        next_byte_loss(self.model, self._batches[0]).backward()
        self.model.train()

    def ours(self) -> None:
        """What is ours of a step, and nothing else: the optimizer's hooks without its step."""
        if self._handle is None:
            return
        self._handle.record_batch(self._batches[0])
        self._handle.see_batch(self.model, (self._batches[0],), {})
        for hook in self._hooks:
            hook(self.optimizer, (), {})

    def close(self) -> None:
        """Check that nothing was searched, and take everything away."""
        if self._handle is not None:
            assert not any(one.incidents for one in self.callbacks if isinstance(one, GradLocCallback))
            self._handle.close()


def dormant(*, tiny: bool = False) -> list[Figure]:
    """Steps of the demo with and without GradLoc, and the time of what it adds, in one process.

    Args:
        tiny: Try it out.

    Returns:
        Two ratios of steps, and what is added to each training in percent of a step.
    """
    rounds, runs = (4, 2) if tiny else (48, 4)
    with _trainings(tiny=tiny) as trainings:
        for training in trainings.values():
            for _ in range(12 if tiny else _WARMUP_STEPS):
                training.step()
        named = {_name(*key): training for key, training in trainings.items()}
        pairs = {beside: (_name(beside, True), _name(beside, False)) for beside in ("nothing", "the clips")}
        steps = {name: named[name].step for pair in pairs.values() for name in pair}
        samples, apart = until_two_agree(
            lambda: time_in_turn(steps, rounds=rounds), list(pairs.values()), runs=runs, tolerance=0.003
        )
        figures = [
            ratio_figure(
                "dormant",
                f"step with GradLoc / without, beside {beside}",
                samples,
                pair,
                target=TARGET,
                how=_HOW,
                apart=apart,
            )
            for beside, pair in pairs.items()
        ]
        step_seconds = statistics.median(samples[_name("nothing", False)])
        return figures + _added(named, step_seconds, rounds=10 if tiny else 200)


def _added(trainings: dict[str, Training], step_seconds: float, *, rounds: int) -> list[Figure]:
    """Where nothing else takes time: the noise of a step is larger than what is looked for."""
    for training in trainings.values():
        training.keep_gradients()
    samples = time_in_turn({name: training.ours for name, training in trainings.items()}, rounds=rounds)
    figures = []
    for beside in _BESIDE:
        ours, others = (statistics.median(samples[_name(beside, localizes)]) for localizes in (True, False))
        what = f"what GradLoc adds, in percent of a step, beside {beside}"
        how = f"hooks alone, {1e3 * (ours - others):.2g} ms of {1e3 * step_seconds:.4g}, n={rounds}"
        details = {"seconds": ours, "seconds_without": others, "step_seconds": step_seconds}
        value = 100 * (ours - others) / step_seconds
        figures.append(Figure("dormant", what, value, "%", 100 * (TARGET - 1), how, details))
    return figures


@contextlib.contextmanager
def _trainings(*, tiny: bool) -> Iterator[dict[tuple[str, bool], Training]]:
    """One of each kind, all alike otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            (beside, localizes): Training(folder, beside, localizes=localizes, tiny=tiny)
            for beside in _BESIDE
            for localizes in (False, True)
        }
        yield found
        for training in found.values():
            training.close()


def _name(beside: str, localizes: bool) -> str:
    return f"{beside} and GradLoc" if localizes else beside


def exchanged(*, tiny: bool = False) -> list[Figure]:
    """Collectives and bytes that GradLoc adds to a quiet step of two processes.

    Args:
        tiny: Try it out.

    Returns:
        For each strategy, alone and beside the clips: a number of collectives, and of bytes.
    """
    figures = []
    for strategy, title in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
        counted = run_fresh(_count, strategy, tiny)[0]
        for beside in ("nothing", "the clips"):
            ours, others = counted[_name(beside, True)], counted[_name(beside, False)]
            for unit, number in (("collectives", 0), ("bytes", 1)):
                what = f"{title}: {unit} added to a quiet step, beside {beside}"
                value = float(ours[number] - others[number])
                figures.append(Figure("exchanged", what, value, unit, None, "example GPT, two gloo processes"))
    return figures


def _count(rank: int, strategy: str, tiny: bool) -> dict[str, tuple[int, int]]:
    """Collectives of a step, and their bytes, by training."""

    def wrap(model: nn.Module) -> nn.Module:
        if strategy == "ddp":
            return DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for beside in ("nothing", "the clips"):
            for localizes in (False, True):
                training = Training(folder, beside, localizes=localizes, tiny=tiny, wrap=wrap)
                found[_name(beside, localizes)] = _count_of(training)
                training.close()
    return found


def _count_of(training: Training) -> tuple[int, int]:
    """The least of some steps: now and then ranks have more to tell each other."""
    training.step()
    counts = []
    for _ in range(5):
        with count_collectives() as calls:
            training.step()
        counts.append((len(calls), sum(call.num_bytes for call in calls.calls)))
    return min(counts)
