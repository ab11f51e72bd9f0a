"""Rows of two gloo processes: the first step with many DTensors, and steps with and without the callbacks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.one_process import Silent
from benchmarks.processes import run_fresh
from benchmarks.timing import Figure, Samples, agreement, ratio_figure
from stabilizer import GradientStore, ParameterIndex
from stabilizer.callbacks import GradNormCallback, recommended
from stabilizer.callbacks.agreement import Agreement
from stabilizer.callbacks.suite import Suite
from stabilizer.examples.gpt import GPT
from stabilizer.tally import LossTally
from tests.counting import count_collectives

__all__ = ["first_step", "steps"]


def first_step(*, tiny: bool = False) -> list[Figure]:
    """The first measurement of 2,000 sharded parameters beside the first `clip_grad_norm_` of them.

    Args:
        tiny: Try it out.

    Returns:
        Two ratios, one of them with a target.
    """
    num_parameters = 40 if tiny else 2000
    # Everything that is computed once is computed in a process of its own.
    samples: Samples = {"store": [], "callback": [], "clip_grad_norm": []}
    for _ in range(1 if tiny else 3):
        for what, seconds in samples.items():
            seconds.append(max(run_fresh(_first_seconds, what, num_parameters)))
    how = f"{num_parameters} DTensors, two fresh gloo processes"
    other = "first clip_grad_norm_"
    # All happens in the workers, which have one thread.
    return [
        ratio_figure(
            "first_step",
            f"index, store and first measurement / {other}",
            samples,
            ("store", "clip_grad_norm"),
            target=0.1,
            how=how,
            num_threads=1,
        ),
        ratio_figure(
            "first_step",
            f"GradNormCallback, first step / {other}",
            samples,
            ("callback", "clip_grad_norm"),
            target=None,
            how=how,
            num_threads=1,
        ),
    ]


def _first_seconds(rank: int, what: str, num_parameters: int) -> float:
    # Blocks of ten linear layers, each a weight and a bias.
    blocks = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(10))) for _ in range(num_parameters // 20)]
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters: list[Tensor] = list(model.parameters())
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        local = torch.ones_like(parameter.to_local())
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
    dist.barrier()
    start = time.perf_counter()
    total = _FIRST[what](model, parameters)
    seconds = time.perf_counter() - start
    # What was timed is what was meant: the norm of all elements of all ranks.
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    torch.testing.assert_close(float(norm), (num_parameters / 2 * (64 + 8)) ** 0.5)
    return seconds


def _first_store(model: nn.Module, parameters: list[Tensor]) -> Tensor:
    store = GradientStore(ParameterIndex(model))
    store.measure(step=0)
    return store.view().total_norm


def _first_callback(model: nn.Module, parameters: list[Tensor]) -> Tensor:
    callback = GradNormCallback()
    suite = Suite([callback], model=model, optimizer=torch.optim.SGD(parameters, lr=0.1), sink=Silent())
    suite.run()
    total = callback.norm_history().totals[-1]
    suite.finish()
    return total


def _first_clip(model: nn.Module, parameters: list[Tensor]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, 1e9)


_FIRST: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]] = {
    "store": _first_store,
    "callback": _first_callback,
    "clip_grad_norm": _first_clip,
}


def steps(*, tiny: bool = False) -> list[Figure]:
    """Training steps of the example GPT with the default suite beside steps without, and their collectives.

    Args:
        tiny: Try it out.

    Returns:
        For each strategy a ratio and a count, without targets.
    """
    figures = []
    for strategy, title in (("fsdp2", "FSDP2"), ("ddp", "DDP")):
        samples, added = run_fresh(_train, strategy, tiny)[0]
        how = "example GPT, two gloo processes"
        what = f"{title} step with the default suite / without"
        pair = ("with", "without")
        # Two ranks cannot each decide to go on, so the halves of one run stand for two runs.
        halves = [{name: values[half::2] for name, values in samples.items()} for half in (0, 1)]
        apart = agreement(halves[0], halves[1], [pair])
        figures += [
            ratio_figure("steps", what, samples, pair, target=None, how=how, num_threads=1, apart=apart),
            Figure("steps", f"{title}: collectives added to a quiet step", added, "collectives", None, how),
        ]
    return figures


def _train(rank: int, strategy: str, tiny: bool) -> tuple[Samples, float]:
    torch.manual_seed(0)
    size = {"num_layers": 2, "dim": 16, "num_heads": 2} if tiny else {}
    model: nn.Module = GPT(context=64, **size)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    suite = Suite(recommended(), model=model, optimizer=optimizer, sink=Silent())
    tally = LossTally(["auto"])
    generator = torch.Generator().manual_seed(rank)

    def step(measured: bool) -> None:
        tokens = torch.randint(256, (2, 65), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if measured:
            tally.begin(tokens)
            tally.add(loss)
            suite.run(losses=tally.take(0))
        optimizer.step()
        if measured:
            suite.finish()
        optimizer.zero_grad()

    samples: Samples = {"with": [], "without": []}
    rounds = 2 if tiny else 60
    for number in range(-3, rounds):
        for name in ("with", "without") if number % 2 else ("without", "with"):
            dist.barrier()
            start = time.perf_counter()
            step(name == "with")
            if number >= 0:
                samples[name].append(time.perf_counter() - start)
    return samples, _collectives(suite, step)


def _collectives(suite: Suite, step: Callable[[bool], None]) -> float:
    """Collectives that the callback adds to a step at which the ranks have nothing else to tell each other."""
    added = []
    for _ in range(3):
        while Agreement.is_due(suite.step):
            step(True)
        counts = []
        for measured in (True, False):
            with count_collectives() as calls:
                step(measured)
            counts.append(len(calls))
        added.append(counts[0] - counts[1])
    return float(statistics.median(added))
