"""What clipping is for: a small GPT whose output layer's gradient explodes now and then.

`python -m stabilizer.examples.spikes` trains it five ways with each of three seeds, and prints the losses at the end:
without faults, and with faults and no clip, torch's `clip_grad_norm_`, ZClip's rule and `LayerClipCallback`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from stabilizer import tags
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback, attach
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss

__all__ = ["WAYS", "Faults", "Run", "main", "summarize", "train"]

#: Way to train -> what is in the table.
WAYS = {
    "no_fault": "no faults",
    "no_clip": "no clip",
    "clip_total": "clip_grad_norm_",
    "zclip": "ZClip's rule",
    "layer_clip": "LayerClipCallback",
}
_LAST = 50


@dataclasses.dataclass(frozen=True)
class Faults:
    """Steps at which one layer's gradient is multiplied.

    A spike does not throw Adam's next step far: it fills the layer's second moment, and the layer stands still until
    that has faded. The output layer is the one whose standstill the others make up for least.

    Attributes:
        num: How many steps.
        factor: By what.
        layer: Name of the module.
        first: None is earlier: thresholds need 50 steps to warm up.
    """

    num: int = 20
    factor: float = 10_000.0
    layer: str = "head"
    first: int = 60

    def steps(self, num_steps: int, *, seed: int) -> frozenset[int]:
        """Choose the steps; none of the last 50, over which the loss is taken.

        Args:
            num_steps: Length of the run.
            seed: Of the choice.

        Example:
            >>> sorted(Faults(num=2).steps(120, seed=0))
            [61, 64]
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_steps - _LAST - self.first, generator=generator)
        return frozenset((order[: self.num] + self.first).tolist())


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        way: Of `WAYS`.
        seed: Of weights, data and faults.
        loss: Mean over the last 50 steps, in nats per byte.
        share_clipped: Of the steps; with thresholds by layer the mean over the layers.
    """

    way: str
    seed: int
    loss: float
    share_clipped: float


def train(way: str, *, seed: int, steps: int = 1000, faults: Faults | None = None, dim: int = 96) -> Run:
    """Train once.

    Args:
        way: One of `WAYS`.
        seed: Of weights, data and faults: the same for all ways.
        steps: Number of optimizer steps.
        faults: What goes wrong; default 20 times.
        dim: Width of the model; half of the demo's, which takes three times as long.

    Returns:
        How it ended.
    """
    faults = Faults() if faults is None else faults
    faulty_steps = faults.steps(steps, seed=seed) if way != "no_fault" else frozenset()
    torch.manual_seed(seed)
    model = GPT(context=64, dim=dim)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer, steps=steps)
    batches = iter(make_loader(context=64, batch_size=4, seed=seed, rank=0))
    # With nothing to attach, attach would warn.
    callbacks = _callbacks(way)
    shares = [0.0]
    handle = _attached(callbacks, model, optimizer, shares) if callbacks else None
    losses, num_clipped = [], 0
    for step in range(steps):
        loss = next_byte_loss(model, next(batches))
        loss.backward()
        if step in faulty_steps:
            for parameter in model.get_submodule(faults.layer).parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(faults.factor)
        if way == "clip_total":
            num_clipped += bool(nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if handle is not None:
        handle.close()
    return Run(way, seed, statistics.fmean(losses[-_LAST:]), shares[-1] if callbacks else num_clipped / steps)


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Hold every way against the faultless runs of the same seeds.

    Args:
        runs: Of every way with every seed.

    Returns:
        By way: losses by seed, their mean, how much the mean is above that without faults, and the share of clipped
        steps.

    Example:
        >>> runs = [Run("no_fault", 0, 2.0, 0.0), Run("no_clip", 0, 2.2, 0.0)]
        >>> summarize(runs)["no_clip"]
        {'loss': {'0': 2.2}, 'mean': 2.2, 'above_no_fault': 0.1, 'share_clipped': 0.0}
    """
    best = statistics.fmean(run.loss for run in runs if run.way == "no_fault")
    found = {}
    for way in dict.fromkeys(run.way for run in runs):
        own = sorted((run for run in runs if run.way == way), key=lambda run: run.seed)
        mean = statistics.fmean(run.loss for run in own)
        found[way] = {
            "loss": {str(run.seed): round(run.loss, 5) for run in own},
            "mean": round(mean, 5),
            "above_no_fault": round(mean / best - 1, 5),
            "share_clipped": round(statistics.fmean(run.share_clipped for run in own), 5),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train all ways with all seeds, print a table, and write it if asked to.

    Args:
        arguments: Of the command line.

    Returns:
        What is written: the setting, and the ways as `summarize` gives them.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stabilizer.examples.spikes", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of every way with each")
    parser.add_argument("--num-faults", type=int, default=Faults.num, help="faulty steps of a run")
    parser.add_argument("--factor", type=float, default=Faults.factor, help="what they multiply a gradient by")
    parser.add_argument("--layer", default=Faults.layer, help="whose gradient")
    parser.add_argument("--dim", type=int, default=96, help="width of the model")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, help="JSON file for what the table says")
    options = parser.parse_args(arguments)
    faults = Faults(num=options.num_faults, factor=options.factor, layer=options.layer)
    jobs = [(way, seed, options.steps, faults, options.dim) for seed in options.seeds for way in WAYS]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, initializer=_prepare) as pool:
        runs = pool.starmap(_train, jobs, chunksize=1)
    setting = {"steps": options.steps, "dim": options.dim, "faults": dataclasses.asdict(faults)}
    report = {"setting": {**setting, "torch": torch.__version__}, "ways": summarize(runs)}
    Console().print(_table(report))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _callbacks(way: str) -> list[StabilizerCallback]:
    if way == "zclip":
        return [AdaptiveClipThreshold(rule="zscore")]
    return [LayerClipCallback()] if way == "layer_clip" else []


def _attached(
    callbacks: list[StabilizerCallback], model: nn.Module, optimizer: torch.optim.Optimizer, shares: list[float]
) -> Any:
    def log(values: Mapping[str, float], step: int) -> None:
        rates = (tags.CLIP_TOTAL_RATE, tags.CLIP_LAYER_RATE)
        shares.extend(values[rate] for rate in rates if rate in values)

    return attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log)


def _prepare() -> None:
    # Runs side by side: more threads would wait for each other, and each would print the same table.
    torch.set_num_threads(1)
    os.environ["STABILIZER_PREFLIGHT"] = "0"


def _train(way: str, seed: int, steps: int, faults: Faults, dim: int) -> Run:
    return train(way, seed=seed, steps=steps, faults=faults, dim=dim)


def _table(report: Mapping[str, Any]) -> Table:
    setting, ways = report["setting"], report["ways"]
    faults, seeds = setting["faults"], list(next(iter(ways.values()))["loss"])
    table = Table(
        title=f"Loss at the end of {setting['steps']} steps, of which {faults['num']} have a gradient of "
        f"{faults['layer']} x {faults['factor']:g}"
    )
    for column in ("", *(f"seed {seed}" for seed in seeds), "mean", "extra", "clipped"):
        table.add_column(column, justify="right" if column else "left")
    for way, row in ways.items():
        losses = [f"{row['loss'][seed]:.3f}" for seed in seeds]
        table.add_row(
            WAYS[way], *losses, f"{row['mean']:.3f}", f"{row['above_no_fault']:+.1%}", f"{row['share_clipped']:.1%}"
        )
    return table


if __name__ == "__main__":
    main()
