"""Field reports, area state-resume: histories and decisions of clips, before and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.event_files import read_run
from tests.field_reports.helpers import covers, fit, our_warnings
from tests.lightning_models import BATCH_SIZE, make_module
from tests.models import token_batch
from tests.states import same

#: So low that healthy norms are clipped, as soon as there are two of them.
LOW = {"name": "quantile", "q": 0.1, "warmup_steps": 2}


def _two_of_a_class() -> list[AdaptiveClipThreshold]:
    quick = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}
    return [
        AdaptiveClipThreshold(rule=LOW, warmup_cap=None, name="low", strict=True),
        AdaptiveClipThreshold(rule=quick, warmup_cap=None, name="quick", mode="observe", strict=True),
    ]


@covers("single")
def test_B009_each_of_two_clips_gets_its_own_history_back(tmp_path: Path) -> None:
    path, saved, loaded, whole = tmp_path / "step6.ckpt", *(_two_of_a_class() for _ in range(3))
    options: dict[str, Any] = {"length": 6 * BATCH_SIZE}
    trainer = fit(make_module("mlp", **options), tmp_path, version="first", callbacks=saved, max_steps=6)
    trainer.save_checkpoint(path)
    states = torch.load(path, weights_only=True)["callbacks"]
    assert sorted(states) == ["AdaptiveClipThreshold[low]", "AdaptiveClipThreshold[quick]"]
    again = {"callbacks": loaded, "max_steps": 12, "ckpt_path": path}
    fit(make_module("mlp", **options), tmp_path, version="second", **again)
    fit(make_module("mlp", **options), tmp_path, version="whole", callbacks=whole, max_steps=12)
    for one, other in zip(loaded, whole, strict=True):
        assert same(one.state_dict(), other.state_dict())
    runs = {name: read_run(tmp_path / name).scalars for name in ("second", "whole")}
    tags = [tag for tag in runs["second"] if "clip/" in tag or "skip/" in tag]
    assert {"low/clip/total_threshold", "quick/clip/total_coefficient", "low/skip/count"} <= set(tags)
    for tag in tags:
        later = {step: value for step, value in runs["whole"][tag].items() if step >= 6}
        assert runs["second"][tag] == later, tag
    assert min(runs["second"]["low/clip/total_coefficient"].values()) < 1, "nothing was clipped"
    # Options that have changed leave the history, and are said.
    other = AdaptiveClipThreshold(rule=LOW, name="low", every_n_steps=7)
    with our_warnings() as messages:
        other.load_state_dict(states[other.state_key])
    assert len(messages) == 1
    assert "every_n_steps: 1 -> 7" in messages[0]


def _accelerate(
    steps: range, callbacks: list[Any], *, save: Path | None = None, load: Path | None = None
) -> tuple[dict[int, dict[str, float]], list[torch.Tensor]]:
    """What is logged by step, and the weights at the end."""
    accelerator, rows = make_accelerator(), {}
    model, optimizer = prepared(accelerator, optimizer="adamw")
    log = lambda values, step: rows.setdefault(step, {}).update(values)  # noqa: E731
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=log):
        if load is not None:
            accelerator.load_state(str(load))
        train(accelerator, model, optimizer, [token_batch(step=step) for step in steps])
        if save is not None:
            accelerator.save_state(str(save))
    return rows, [p.detach().clone() for p in model.parameters()]


@covers("single", "accelerate")
@pytest.mark.parametrize("rule", [LOW, {"name": "robust_log", "warmup_steps": 3, "min_ratio": 1.01, "k": 0.1}])
def test_B116_limits_and_decisions_go_on_after_accelerate_has_loaded_its_state(rule: Any, tmp_path: Path) -> None:
    def clips() -> list[Any]:
        return [
            LayerClipCallback(rule=rule, every_n_steps=1, strict=True),
            AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True),
        ]

    _accelerate(range(5), clips(), save=tmp_path / "five")
    resumed, whole = clips(), clips()
    rows, weights = _accelerate(range(5, 9), resumed, load=tmp_path / "five")
    expected, others = _accelerate(range(9), whole)
    assert list(rows) == [5, 6, 7, 8]
    for step, values in rows.items():
        assert {tag: value for tag, value in values.items() if tag in expected[step]} == values
        assert values == {tag: value for tag, value in expected[step].items() if tag in values}
    assert min(value for values in rows.values() for tag, value in values.items() if "coefficient" in tag) < 1
    assert any(tag.startswith("clip/layer_threshold/") for tag in rows[5]), "the history has begun anew"
    for one, other in zip(resumed, whole, strict=True):
        assert same(one.state_dict(), other.state_dict())
    assert all(map(torch.equal, weights, others))
