"""Callbacks in real Accelerate loops: what reaches the trackers, under every strategy, equals a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from tests.accelerate_loops import STRATEGIES, make_accelerator, prepared, train
from tests.event_files import read_run
from tests.launcher import run_distributed
from tests.models import Batch, token_batch
from tests.reference_run import reference_run

TOLERANCE = 1e-5
NUM_STEPS = 3


def _batches(rank: int, *, accumulation: int) -> list[Batch]:
    return [token_batch(rank, step=step, micro_batch=m) for step in range(NUM_STEPS) for m in range(accumulation)]


def _loop(
    rank: int, world_size: int, folder: str, *, strategy: str, accumulation: int, max_norm: float | None
) -> dict[str, Any]:
    accelerator = make_accelerator(
        strategy, gradient_accumulation_steps=accumulation, log_with="tensorboard", project_dir=folder
    )
    accelerator.init_trackers("run")
    model, optimizer = prepared(accelerator)
    norms = GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)
    losses = LossMeanVarCallback(windows=(2, 3), every_n_steps=1, warmup_steps=0)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[losses, norms]):
        train(accelerator, model, optimizer, _batches(rank, accumulation=accumulation), max_norm=max_norm)
    history = norms.norm_history()
    accelerator.end_training()
    return {
        "steps": history.steps,
        "norms": dict(zip(history.layer_names, history.norms.T.tolist(), strict=True)),
        "totals": history.totals.tolist(),
        "loss": losses.statistics(),
    }


def _what_is_measured(rank: int, world_size: int, strategy: str) -> tuple[str, str]:
    accelerator = make_accelerator(strategy)
    model, optimizer = prepared(accelerator)
    kinds = []
    for given in (model, accelerator.unwrap_model(model)):
        with attach(
            accelerator, model=given, optimizer=optimizer, callbacks=[GradNormCallback()], log=lambda *row: None
        ) as handle:
            kinds.append(type(handle._model).__name__)
    return kinds[0], kinds[1]


@pytest.mark.parametrize(("strategy", "outer"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPTinyTransformer")])
def test_the_wrapped_model_is_what_is_looked_at(strategy: str, outer: str) -> None:
    for given, _ in run_distributed(_what_is_measured, strategy, world_size=2):
        assert given == outer


def _cases() -> list[Any]:
    features = ["gradient norms", "loss windows"]
    return [
        pytest.param(
            strategy,
            accumulation,
            max_norm,
            marks=pytest.mark.covers(feature=features, strategy=strategy, host="accelerate"),
            id=f"{strategy}-{accumulation}-{max_norm}",
        )
        for strategy in STRATEGIES
        for accumulation, max_norm in ((1, None), (2, 0.5))
    ]


@pytest.mark.norms
@pytest.mark.parametrize(("strategy", "accumulation", "max_norm"), _cases())
def test_every_strategy_logs_the_reference_s_numbers(
    strategy: str, accumulation: int, max_norm: float | None, tmp_path: Path
) -> None:
    ranks = 1 if strategy == "single" else 2
    results = run_distributed(
        _loop,
        str(tmp_path),
        strategy=strategy,
        accumulation=accumulation,
        max_norm=max_norm,
        world_size=ranks,
        timeout=100,
    )
    per_rank = [_batches(rank, accumulation=accumulation) for rank in range(ranks)]
    steps = [
        [batches[step * accumulation + m] for m in range(accumulation) for batches in per_rank]
        for step in range(NUM_STEPS)
    ]
    expected = reference_run(steps, max_norm=max_norm)
    scalars = read_run(tmp_path / "run").scalars
    for result in results:
        assert result == results[0], "ranks disagree"
        assert result["steps"] == [0, 1, 2]
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        for layer, values in result["norms"].items():
            assert values == pytest.approx([layers[layer] for layers in expected.layers], rel=TOLERANCE)
            assert scalars[f"grad_norm/layer/{layer}"] == pytest.approx(dict(enumerate(values)), rel=1e-6)
    assert scalars["grad_norm/total"] == pytest.approx(dict(enumerate(expected.totals)), rel=TOLERANCE)
    after = dict(enumerate(min(total, max_norm) for total in expected.totals)) if max_norm else {}
    assert scalars.get("grad_norm/total_after", {}) == pytest.approx(after, rel=TOLERANCE)
    means = [sum(losses) / len(losses) for losses in expected.losses]
    assert results[0]["loss"]["mean_3"] == pytest.approx(sum(means) / 3, rel=TOLERANCE)
    assert scalars["loss/mean_2"][2] == pytest.approx((means[1] + means[2]) / 2, rel=TOLERANCE)
    for name, extreme in (("min", min), ("max", max)):
        points = {step: extreme(losses) for step, losses in enumerate(expected.losses)}
        assert scalars[f"loss/{name}"] == pytest.approx(points, rel=TOLERANCE)
    owners = {step: float(losses.index(max(losses)) % ranks) for step, losses in enumerate(expected.losses)}
    assert scalars["loss/max_rank"] == owners
