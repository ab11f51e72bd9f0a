"""When GradLocCallback searches, and when it leaves a step alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer import token_gate
from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback, LayerClipCallback
from tests.clip_loops import HandLoop
from tests.environments import ROOT
from tests.localize_loops import Fault, Plan, grad_loc, run
from tests.models import VOCABULARY, initialise_, make_transformer

pytestmark = [pytest.mark.covers(strategy="single", host="plain", feature="token localisation")]

make_model = functools.partial(make_transformer, num_layers=2)
BAD = ((0, 2, 1, 7),)


def steps_of(callback: GradLocCallback) -> list[int]:
    return [incident.step for incident in callback.incidents]


def train(folder: Path, plan: Plan, *others: Any, **options: Any) -> GradLocCallback:
    callback = grad_loc(folder, **options)
    run(plan, [callback, *others], make_model=make_model)
    return callback


class Bigram(nn.Module):
    """The loss of the next token, a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        initialise_(self)

    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = self.lm_head(self.embed(input_ids)).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100)
        return (losses * weights.flatten()).sum() / (labels != -100).sum()


@pytest.mark.parametrize("ratio", [3.0, 1.2])
def test_numbers_of_tokens_that_change(ratio: float, tmp_path: Path) -> None:
    """From 16 to 128 of 128 tokens have a label, most steps many: no search but where a token is bad."""
    faulty = {420: 16, 450: 128, 480: 40}

    def batches(plan: Plan, rank: int) -> Iterator[list[Any]]:
        for step in range(plan.steps):
            generator = torch.Generator().manual_seed(step)
            ids, labels = (torch.randint(VOCABULARY, (4, 32), generator=generator) for _ in range(2))
            drawn = 16 + int(torch.randint(113, (), generator=generator))
            num = faulty.get(step, drawn if step % 3 == 0 else 128)
            labels.flatten()[num:] = -100
            weights = torch.ones(4, 32)
            weights[0, 9] = 500.0 if step in faulty else 1.0
            yield [{"input_ids": ids, "labels": labels, "weights": weights}]

    callback = grad_loc(tmp_path, cooldown_steps=0, trigger_ratio=ratio, tap=None)
    run(
        Plan(steps=500, micro_batches=1),
        [callback],
        make_model=Bigram,
        make_batches=batches,
        loss_fn=lambda model, batch: model(**batch),
        tells_loss=True,
    )
    assert steps_of(callback) == sorted(faulty)
    for incident in callback.incidents:
        assert [(one.row, one.position) for one in incident.tokens] == [(0, 9)]
        assert incident.num_passes <= 3


def test_warm_up(tmp_path: Path) -> None:
    """A norm means nothing yet; what is not finite is searched from the first step on."""
    faults = (Fault(3, BAD), Fault(5, BAD, math.nan), Fault(24, BAD), Fault(25, BAD), Fault(30, BAD))
    found = train(tmp_path, Plan(steps=31, faults=faults), warmup_steps=25, cooldown_steps=0, on_found="skip_step")
    assert steps_of(found) == [5, 25, 30]
    assert [incident.type for incident in found.incidents] == ["N", "D", "D"]


def test_cooldown(tmp_path: Path) -> None:
    faults = tuple(Fault(step, BAD) for step in (22, 23, 27, 28, 30))
    found = train(tmp_path, Plan(steps=32, faults=faults), cooldown_steps=5)
    assert steps_of(found) == [22, 28]


def test_trigger_ratio(tmp_path: Path) -> None:
    plan = Plan(steps=25, faults=(Fault(22, BAD),))
    (incident,) = train(tmp_path, plan).incidents
    excess = incident.observed_norm / incident.threshold
    assert steps_of(train(tmp_path, plan, trigger_ratio=0.97 * excess)) == [22]
    # Layers are farther out than the total: none of them may start it either.
    assert steps_of(train(tmp_path, plan, trigger_ratio=3 * excess)) == []


def test_every_n_steps_and_max_incidents(tmp_path: Path) -> None:
    faults = tuple(Fault(step, BAD) for step in (22, 24, 25, 28))
    plan = Plan(steps=30, faults=faults)
    assert steps_of(train(tmp_path / "a", plan, cooldown_steps=0, every_n_steps=4)) == [24, 28]
    with pytest.warns(UserWarning, match="max_incidents"):
        assert steps_of(train(tmp_path / "b", plan, cooldown_steps=0, max_incidents=2)) == [22, 24]


def test_thresholds_of_the_clips_beside(tmp_path: Path) -> None:
    plan = Plan(steps=25, faults=(Fault(22, BAD),))
    clip = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 7.0})
    (incident,) = train(tmp_path / "total", plan, clip, rule=None).incidents
    assert (incident.step, incident.threshold) == (22, 7.0)
    assert incident.threshold_of == "total (AdaptiveClipThreshold)"
    # Its own rule, if it has been given one.
    (incident,) = train(tmp_path / "own", plan, clip).incidents
    assert incident.threshold_of == "total (robust_log)"
    assert incident.threshold != 7.0
    # So high that no total is over it: then the layer that is farthest over its own.
    high = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 1e5})
    layers = LayerClipCallback(rule={"name": "fixed", "threshold": 3.0})
    (incident,) = train(tmp_path / "layer", plan, high, layers, rule=None).incidents
    assert incident.threshold == 3.0
    name = incident.threshold_of.removesuffix(" (LayerClipCallback)")
    norms = {layer.name: layer.norm for layer in incident.layers}
    assert norms[name] == max(norms.values()) == pytest.approx(incident.observed_norm)
    assert [(one.micro_batch, one.row, one.position) for one in incident.tokens] == [(2, 1, 7)]
    # A layer's coefficient of a clip that looks at other layers tells nothing of these.
    other = LayerClipCallback(rule={"name": "fixed", "threshold": 1e5}, granularity="module")
    plan = Plan(steps=56, faults=(Fault(55, BAD),))
    (incident,) = train(tmp_path / "other", plan, high, other, rule=None).incidents
    assert incident.threshold_of.endswith(" (robust_log)")


class Sided(nn.Module):
    """A layer beside the head whose gradient is small, for one token excepted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.side = nn.Linear(16, VOCABULARY, bias=False)
        initialise_(self)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        side = self.side(hidden.detach())
        # The same values whatever the weights: only the gradient differs.
        share = 0.01 * weights.unsqueeze(-1) * side
        return token_gate(self.head(hidden) + share - share.detach())


def test_a_spike_of_one_layer(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, targets, weights = batch
        return F.cross_entropy(model(tokens, weights).flatten(0, 1), targets.flatten())

    callback = grad_loc(tmp_path, tap=None)
    run(Plan(steps=25, faults=(Fault(22, BAD, 1000.0),)), [callback], make_model=Sided, loss_fn=loss_fn)
    (incident,) = callback.incidents
    assert incident.threshold_of == "side (robust_log)"
    norms = {layer.name: layer for layer in incident.layers}
    assert incident.observed_norm == pytest.approx(norms["side"].norm)
    # The total would not have shown it.
    total = math.sqrt(sum(layer.norm**2 for layer in incident.layers))
    usual = math.sqrt(sum((layer.baseline or 0.0) ** 2 for layer in incident.layers))
    assert total < 3 * usual
    assert incident.type == "B"
    assert [(one.micro_batch, one.row, one.position) for one in incident.tokens] == [(2, 1, 7)]
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < 2 * (norms["side"].baseline or 0.0)


class Counted(GradLocCallback):
    """Tells when it would search."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[int] = []

    def localize(self, context: Any, steps: Any) -> bool:
        """Take note; no cooldown follows."""
        self.steps.append(context.step)
        return False


def _norms() -> Tensor:
    """Layers of a recorded healthy run, in steps x layers."""
    return torch.from_numpy(np.load(ROOT / "tests" / "data" / "healthy_run.npz")["norms"])[:, :-1]


@pytest.mark.parametrize("beside", ["nothing", "clips"])
def test_a_healthy_run_is_left_alone(beside: str) -> None:
    norms = _norms()
    assert norms.shape[0] >= 2000
    names = [f"layer_{number}" for number in range(norms.shape[1])]
    callback = Counted(strict=True)
    clips = [] if beside == "nothing" else [AdaptiveClipThreshold(mode="observe"), LayerClipCallback(mode="observe")]
    with HandLoop(callback, *clips, **dict.fromkeys(names, 2)) as loop:
        for row in norms.tolist():
            loop.step(**dict(zip(names, row, strict=True)))
        assert callback.steps == []
        # And not because it sees nothing.
        loop.step(**dict(zip(names, (30 * norms[-1]).tolist(), strict=True)))
        assert callback.steps == [len(norms)]
        one = dict(zip(names, norms[-2].tolist(), strict=True))
        loop.step(**{**one, names[3]: 30 * one[names[3]]})
        assert callback.steps == [len(norms), len(norms) + 1]
