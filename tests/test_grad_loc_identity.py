"""GradLoc leaves no trace: a run with it, dormant or after several searches, is the run without it, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.names import clean_name
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, batches, grad_loc, run
from tests.models import VOCABULARY
from tests.stateful import differences, fingerprint, rng_fingerprint

#: The last one on all ranks but the first alone, where there are several.
FAULTS = (Fault(12, ((0, 0, 1, 3),)), Fault(15, ((0, 1, 0, 5), (0, 1, 1, 0))), Fault(18, ((0, 1, 1, 2),)))
SPREAD_FAULTS = (*FAULTS[:2], Fault(18, ((1, 1, 1, 2),)))
PLAN = Plan(steps=22, faults=FAULTS, micro_batches=2, rows=2, length=6)
#: What half precision can hold, after one that it cannot.
SCALED_FAULTS = tuple(Fault(fault.step, fault.bad, 300.0) for fault in FAULTS)
SCALED_PLAN = Plan(steps=22, faults=(Fault(4, ((0, 0, 0, 0),), 1e9), *SCALED_FAULTS), micro_batches=2, rows=2, length=6)
HOW = ("dormant", "triggered")


class Part(nn.Module):
    """A layer with dropout, a norm with running means, and a memory; recomputed in backward if it is told so."""

    def __init__(self, dim: int, recomputes: str | None) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Dropout(0.2)
        self.recomputes = recomputes
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, dim) to the same."""
        if self.recomputes is None:
            return self._run(x)
        output: Tensor = checkpoint(self._run, x, use_reentrant=self.recomputes == "reentrant")
        return output

    def _run(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().sum())
        hidden = self.norm(self.linear(x).flatten(0, 1)).view(x.shape)
        output: Tensor = x + self.dropout(torch.tanh(hidden))
        return output


class Lively(nn.Module):
    """Tokens to a loss; every forward draws random numbers of all kinds and changes all that it holds."""

    level: Tensor

    def __init__(self, recomputes: str | None = None, dim: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Part(dim, recomputes) for _ in range(2))
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        self.mean = MeanMetric()
        # Differs between ranks, unless the wrapper makes it the same, and is in the loss.
        self.register_buffer("level", torch.ones(()))
        self.losses: list[float] = []
        self.counts: Counter[str] = Counter()
        self.nested: dict[str, Any] = {"tokens": {0}, "sums": [torch.zeros(2)]}
        self.array = np.zeros(2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch, which is taken apart."""
        targets, weights = batch.pop("targets"), batch.pop("weights")
        x = self.embed_tokens(batch.pop("tokens")) * (1 + 0.5 * random.random() + 0.5 * float(np.random.rand()))
        for layer in self.layers:
            x = layer(x)
        losses = F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).mean() * self.level.clone()
        self._remember(loss.detach(), targets)
        return loss

    def _remember(self, loss: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            self.level.mul_(0.5).add_(0.5 + 0.02 * float(targets.sum() % 40))
            self.nested["sums"][0].add_(loss)
        self.mean.update(loss)
        self.losses.append(float(loss))
        self.counts["forwards"] += 1
        self.nested["tokens"].add(int(targets[0, 0]))
        self.array += float(loss)


def dictionaries(plan: Plan, rank: int) -> Iterator[list[Any]]:
    """The micro-batches of every step, each as a dictionary."""
    for rows in batches(plan, rank):
        yield [dict(zip(("tokens", "targets", "weights"), row, strict=True)) for row in rows]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(dict(batch))
    return loss


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything that a run leaves, as plain values."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    own = {name: one for name, one in modules.items() if isinstance(one, Lively | Part)}
    memories = {name: {key: value for key, value in vars(one).items() if key[0] != "_"} for name, one in own.items()}
    metric: Any = next(one for one in own.values() if isinstance(one, Lively)).mean
    states = [[(key, value) for key, value in state.items()] for state in optimizer.state.values()]
    found = {
        "parameters": list(model.named_parameters()),
        "optimizer": states,
        "buffers": list(model.named_buffers()),
        "memories": memories,
        "metric": [metric.mean_value, metric.weight, metric._update_count],
        "modes": [(name, module.training) for name, module in modules.items()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in own.values()],
        "gradients": [parameter.grad for parameter in model.parameters()],
    }
    return fingerprint(found), rng_fingerprint()


def train(plan: Plan, callbacks: list[Any], *, rank: int = 0, recomputes: str | None = None) -> Any:
    """Train a Lively, and give back its traces."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(*args: Any, **options: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(*args, **options))
        return made[0]

    model = run(
        plan,
        callbacks,
        rank=rank,
        make_model=functools.partial(Lively, recomputes),
        make_batches=dictionaries,
        loss_fn=loss_of,
        make_optimizer=make_optimizer,
    )
    return traces(model, made[0])


def make_callback(how: str, folder: Path | str) -> GradLocCallback:
    """One that searches every fault, or never."""
    rule = {"name": "robust_log", "warmup_steps": 8}
    return grad_loc(folder, rule=rule, warmup_steps=10 if how == "triggered" else 10**6, cooldown_steps=0)


def summary(callback: GradLocCallback) -> list[tuple[Any, ...]]:
    """What each search has found."""
    return [
        (one.step, one.error, one.reproducible, sorted((t.rank, t.micro_batch, t.row, t.position) for t in one.tokens))
        for one in callback.incidents
    ]


def expected(how: str, faults: Sequence[Fault]) -> list[tuple[Any, ...]]:
    """The summary of a run in which all is found."""
    return [(fault.step, None, True, sorted(fault.bad)) for fault in faults] if how == "triggered" else []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("recomputes", [None, "reentrant", "not reentrant"])
@pytest.mark.covers(feature="token localisation", host="plain", strategy="single")
def test_in_one_process(recomputes: str | None, how: str, tmp_path: Path) -> None:
    without = train(PLAN, [], recomputes=recomputes)
    callback = make_callback(how, tmp_path)
    found = train(PLAN, [callback], recomputes=recomputes)
    assert summary(callback) == expected(how, FAULTS)
    assert differences(found, without) == []


def _spread(rank: int, world_size: int, plan: Plan, how: str, recomputes: str | None, folder: str) -> Any:
    without = train(plan, [], rank=rank, recomputes=recomputes)
    callback = make_callback(how, folder)
    found = train(plan, [callback], rank=rank, recomputes=recomputes)
    return differences(found, without), summary(callback)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("strategy", "recomputes", "syncs"),
    [
        ("ddp", None, False),
        ("ddp", "not reentrant", True),
        ("fsdp1", None, False),
        ("fsdp1", "not reentrant", True),
        ("fsdp2", None, False),
        ("fsdp2", "not reentrant", True),
    ],
)
def test_in_two_processes(strategy: str, recomputes: str | None, syncs: bool, how: str, tmp_path: Path) -> None:
    plan = Plan(strategy, steps=22, faults=SPREAD_FAULTS, micro_batches=2, rows=2, length=6, syncs=syncs)
    for differing, told in run_distributed(_spread, plan, how, recomputes, str(tmp_path)):
        assert told == expected(how, SPREAD_FAULTS)
        assert differing == []


def _train_scaled(callback: GradLocCallback | None, *, fused: bool) -> tuple[Any, list[float]]:
    """Half precision, with a scaler whose scale grows, falls after an overflow, and grows again."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = Lively()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=4)
    scales = []

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(model, batch) / PLAN.micro_batches

    handle = None
    if callback is not None:
        handle = attach(
            None, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=loss_fn, log=lambda values, step: None
        )
    for rows in dictionaries(SCALED_PLAN, 0):
        for batch in rows:
            if handle is not None:
                handle.record_batch(batch)
            scaler.scale(loss_fn(model, batch)).backward()
        if handle is not None:
            handle.measure(scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return traces(model, optimizer), scales


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler(fused: bool, how: str, tmp_path: Path) -> None:
    without, scales = _train_scaled(None, fused=fused)
    assert sorted(scales) != scales
    assert len(set(scales)) > 2, "the scale hardly moved: the test says less than it should"
    callback = make_callback(how, tmp_path)
    found, others = _train_scaled(callback, fused=fused)
    assert others == scales
    assert differences(found, without) == []
    # The scaler does not even call an optimizer without a fused step when it overflows.
    steps = [fault if fused else dataclasses.replace(fault, step=fault.step - 1) for fault in SCALED_FAULTS]
    assert summary(callback) == expected(how, steps)
