"""UpdateClipCallback in plain loops: against float64, after all kinds of optimizers, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import UpdateClipCallback, attach
from tests.clip_loops import HandLoop
from tests.health_loops import OPTIMIZERS, TwinLoop
from tests.models import loss_of, make_transformer, token_batch
from tests.reference_optimizer import AdamW, clipped, update_rms

#: Where some steps are over the limit and some are not.
LIMITS = {"learning_rate": {"muon": 0.25}, "parameter": {"sgd": 0.05, "muon": 0.005}}
SIZES: dict[str, Any] = {"a": 7, "b": 12, "c": 5}


def _rates(optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> dict[str, float]:
    found = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: found[id(parameter)] for name, parameter in named.items()}


@pytest.mark.parametrize("relative_to", ["learning_rate", "parameter"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_that_of_the_optimizer_clipped(name: str, relative_to: Any) -> None:
    limit = LIMITS[relative_to].get(name, {"learning_rate": 0.35, "parameter": 0.006}[relative_to])
    callback = UpdateClipCallback(max_rms=limit, relative_to=relative_to, mode="act", every_n_steps=1)
    num_clipped = num_kept = 0
    with TwinLoop(callback, make=OPTIMIZERS[name], **SIZES) as loop:
        for step in range(14):
            # Random gradients, which the moments of AdamW average, and a spike.
            factors = {"a": 0.1, "b": 30.0 if step == 9 else 0.1, "c": 0.1}
            before, free, now = loop.twin_step(**{key: f * torch.randn(1, SIZES[key]) for key, f in factors.items()})
            rates = _rates(loop.optimizer, {key: loop.weight(key) for key in SIZES})
            given = None if relative_to == "parameter" else rates
            rms = update_rms(before, free, lambda key: key, rates=given)
            expected = clipped(before, free, lambda key: key, max_rms=limit, rates=given)
            for key in SIZES:
                if rms[key] <= limit * (1 - 1e-5):
                    num_kept += 1
                    assert torch.equal(now[key], free[key]), (step, key)
                elif rms[key] > limit * (1 + 1e-5):
                    num_clipped += 1
                    # Roundings of a parameter that is about 1.
                    assert now[key].double().numpy() == pytest.approx(expected[key], rel=2e-7, abs=1e-7), (step, key)
                    assert not torch.equal(now[key], free[key])
    assert num_clipped >= 3
    assert num_kept >= 3


def test_a_whole_run_in_float64_is_the_papers() -> None:
    model = make_transformer(num_layers=2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    oracle = AdamW(dict(model.named_parameters()), rate=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    layer_of = lambda name: ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]  # noqa: E731
    rows: list[Any] = []
    callback = UpdateClipCallback(max_rms=0.5, mode="act", every_n_steps=1)
    expected_rows: list[dict[str, float]] = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for step in range(8):
            optimizer.zero_grad()
            factor = 100.0 if step == 5 else 1.0
            (factor * loss_of(model, token_batch(step=step, size=2))).backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            before = {name: value.copy() for name, value in oracle.parameters.items()}
            oracle.step(gradients)
            rates = dict.fromkeys(before, 0.01)
            expected_rows.append(update_rms(before, oracle.parameters, layer_of, rates=rates))
            oracle.parameters = clipped(before, oracle.parameters, layer_of, max_rms=0.5, rates=rates)
            optimizer.step()
    assert max(max(row.values()) for row in expected_rows) > 1
    assert min(min(row.values()) for row in expected_rows) < 0.5
    for name, parameter in model.named_parameters():
        # Norms are float32: a coefficient is right to 1e-7, and a step is 1 % of a parameter.
        np.testing.assert_allclose(parameter.detach().numpy(), oracle.parameters[name], rtol=1e-7, atol=1e-8)
    logged = {(tag, step): value for values, step in rows for tag, value in values.items()}
    for step, row in enumerate(expected_rows):
        for layer, rms in row.items():
            assert logged[f"update_clip/rms/{layer}", step] == pytest.approx(rms, rel=1e-5)
            assert logged[f"update_clip/coefficient/{layer}", step] == pytest.approx(min(1, 0.5 / rms), rel=1e-5)


def test_the_share_of_clipped_steps_is_logged() -> None:
    callback = UpdateClipCallback(max_rms=1.0, mode="act", every_n_steps=2)
    with HandLoop(callback, learning_rate=0.1, a=4, b=4) as loop:
        # The RMS of 4 elements is half of their norm.
        for norm in (1.0, 3.0, 5.0, 1.0, 1.0):
            loop.step(a=norm, b=0.1)
    assert loop.values("update_clip/rms/a") == pytest.approx({0: 0.5, 2: 2.5, 4: 0.5})
    assert loop.values("update_clip/coefficient/a") == pytest.approx({0: 1.0, 2: 0.4, 4: 1.0})
    assert loop.values("update_clip/rate") == pytest.approx({0: 0.0, 2: 2 / 6, 4: 2 / 10})
