"""OptimizerHealth in plain loops: the bounds of a step and all figures, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stabilizer.callbacks import attach
from stabilizer.optimizer_health import first_step, largest_step, steps_until_back, whole_way
from tests.health_loops import HealthCallback
from tests.loggers import points_of
from tests.models import loss_of, make_transformer, token_batch
from tests.reference_optimizer import AdamW, adam_steps, rms_of_ratio, worst_sequence

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99), (0.0, 0.999), (0.95, 0.98)]


def layer_of(name: str) -> str:
    """Layer of a parameter of the transformer."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]


# What Adam can do at all.


@pytest.mark.parametrize(("beta1", "beta2"), BETAS)
def test_bounds_of_a_step_are_those_of_the_recurrence(beta1: float, beta2: float) -> None:
    late = 10**6
    alone = adam_steps([1.0] + [0.0] * 3000, beta1=beta1, beta2=beta2, first_step=late)
    assert first_step(beta1, beta2) == pytest.approx(alone[0], rel=1e-12)
    assert whole_way(beta1, beta2) == pytest.approx(alone.sum(), rel=1e-6)
    worst = adam_steps(worst_sequence(beta1, beta2, 400), beta1=beta1, beta2=beta2, first_step=late)
    assert largest_step(beta1, beta2) == pytest.approx(worst[-1], rel=1e-6)
    for seed in range(20):
        random = np.random.default_rng(seed).standard_cauchy(300)
        assert np.abs(adam_steps(random, beta1=beta1, beta2=beta2, first_step=late)).max() <= worst[-1] * (1 + 1e-9)


def test_the_size_of_the_gradient_does_not_matter_after_a_silence() -> None:
    for size in (1e-6, 1.0, 1e6):
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0, eps=1e-30)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        # 60,000 steps of zeros, at once.
        state = optimizer.state[parameter]
        state["step"] += 60000
        state["exp_avg"].zero_()
        state["exp_avg_sq"] *= 0.999**60000
        before = parameter.detach().clone()
        way = 0.0
        for number in range(200):
            parameter.grad = torch.full_like(parameter, size if number == 0 else 0.0)
            optimizer.step()
            moved = float((before - parameter.detach())[0]) / 1e-3
            way = way if number else moved
        assert way == pytest.approx(first_step(0.9, 0.999), rel=1e-6)
        assert moved == pytest.approx(whole_way(0.9, 0.999), rel=1e-6)


@pytest.mark.parametrize(("ratio", "beta2"), [(1000.0, 0.999), (1000.0, 0.95), (11.0, 0.99), (2.0, 0.999), (3.0, 0.9)])
def test_steps_until_a_second_moment_is_back(ratio: float, beta2: float) -> None:
    second, num = ratio, 0
    while second > 2 * (1 + 1e-12):
        second = beta2 * second + (1 - beta2) * 1.0
        num += 1
    assert steps_until_back(ratio, beta2) == num


# Figures.


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused", "amsgrad", "adam"])
def test_figures_of_a_run_are_the_papers(kind: str) -> None:
    model = make_transformer(num_layers=2).double()
    make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    flags = {kind: True} if kind != "adam" else {}
    if kind == "loop":
        flags = {"foreach": False}
    decay = 0.0 if kind == "adam" else 0.1
    optimizer = make(model.parameters(), lr=0.01, weight_decay=decay, betas=(0.9, 0.95), eps=1e-6, **flags)
    oracle = AdamW(dict(model.named_parameters()), rate=0.01, weight_decay=decay, betas=(0.9, 0.95), eps=1e-6)
    callback, rows = HealthCallback(every_n_steps=2), []
    expected: dict[tuple[str, int], float] = {}
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, token_batch(step=step, size=2)).backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            oracle.step(gradients)
            optimizer.step()
            if step % 2:
                continue
            seconds = {name: value / (1 - 0.95 ** (step + 1)) for name, value in oracle.second.items()}
            for layer, value in rms_of_ratio(gradients, seconds, layer_of, eps=1e-6).items():
                expected[f"optimizer/rms_g2_v/{layer}", step] = value
            after = dict(model.named_parameters()) if kind == "amsgrad" else oracle.parameters
            sums: dict[str, list[float]] = {}
            for name in before:
                moved = np.asarray(torch.as_tensor(after[name]).detach()) - before[name].numpy()
                found = sums.setdefault(layer_of(name), [0.0, 0.0])
                found[0] += float((moved**2).sum())
                found[1] += float((before[name].numpy() ** 2).sum())
            for layer, (moved_by, held) in sums.items():
                expected[f"optimizer/update_norm/{layer}", step] = math.sqrt(moved_by)
                expected[f"optimizer/update_ratio/{layer}", step] = math.sqrt(moved_by / held)
    points = points_of(rows)
    for key, value in expected.items():
        assert points[key] == pytest.approx(value, rel=2e-5), key
    steps = {step for tag, step in points if tag.startswith("optimizer/")}
    assert steps == {0, 2, 4}


def test_rows_of_an_embedding_are_counted() -> None:
    model: Any = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callback, rows = HealthCallback(every_n_steps=2), []
    counts, norms = np.zeros(20), np.zeros(20)
    seen = set()
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for step in range(9):
            optimizer.zero_grad()
            tokens = torch.tensor([0, 1 + step % 2, 3 + step % 3, 7 + step])
            model(tokens).square().sum().backward()
            gradient = model[0].weight.grad
            seen |= set(tokens.tolist())
            if step % 2 == 0:
                found = gradient.double().norm(dim=1).numpy()
                counts += found > 0
                norms += found
            before = model[0].weight.detach().double().clone()
            optimizer.step()
            moved = (model[0].weight.detach().double() - before).square().mean(dim=1).sqrt() / 0.01
    points = points_of(rows)
    order = np.argsort(counts, kind="stable")
    for place, (some, norm) in enumerate(
        zip(np.array_split(counts[order], 10), np.array_split(norms[order], 10), strict=True)
    ):
        assert points[f"optimizer/row_count/0/{place}", 8] == pytest.approx(some.mean(), rel=1e-6)
        assert points[f"optimizer/row_norm/0/{place}", 8] == pytest.approx(norm.mean(), rel=1e-5)
    # The second moment knows of rows at the steps between as well.
    assert points["optimizer/rows_never/0", 8] == pytest.approx(1 - len(seen) / 20)
    assert points["optimizer/row_step/0", 8] == pytest.approx(float(moved.max()), rel=1e-4)
