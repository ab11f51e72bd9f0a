"""The trainer's own clip is taken over: the same weights, raw norms, and nothing left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradNormCallback,
    LayerClipCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    StepContext,
)
from tests.trainer_runs import make_trainer

LIMIT = 0.5


def _weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def _difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def _trained(folder: Path, *callbacks: StabilizerCallback, limit: float = LIMIT, **options: Any) -> Any:
    given = [StabilizerTrainerCallback(list(callbacks), **options)] if callbacks else []
    trainer = make_trainer("single", folder, callbacks=given, max_grad_norm=limit)
    trainer.train()
    return trainer


class _Limits(StabilizerCallback):
    """Keeps what the trainer's arguments and a clip say during the run."""

    def __init__(self, clip: AdaptiveClipThreshold | None = None) -> None:
        super().__init__()
        self.clip, self.seen = clip, set[tuple[float, float | None]]()
        self.raw: list[float] = []

    def on_gradients(self, context: StepContext) -> None:
        trainer = self.driver._trainer
        self.seen.add((trainer.args.max_grad_norm, None if self.clip is None else self.clip.max_threshold))
        self.raw.append(float(context.store.total_norm))


@pytest.mark.covers(feature="total clip", strategy="single", host="transformers")
def test_without_a_clip_of_ours_a_fixed_one_gives_the_same_weights(tmp_path: Path) -> None:
    own = _trained(tmp_path / "own")
    limits = _Limits()
    taken = _trained(tmp_path / "taken", limits)
    assert _difference(_weights(own), _weights(taken)) < 1e-6
    assert limits.seen == {(0.0, None)}
    assert min(limits.raw) > 2 * LIMIT  # raw, and the run would be another one without the clip
    unclipped = _trained(tmp_path / "unclipped", GradNormCallback(), limit=0.0)
    assert _difference(_weights(own), _weights(unclipped)) > 1e-2
    assert taken.args.max_grad_norm == LIMIT


def test_a_clip_of_ours_takes_the_limit_for_the_run(tmp_path: Path) -> None:
    clip = AdaptiveClipThreshold(warmup_cap=None)
    limits = _Limits(clip)
    own, taken = _trained(tmp_path / "own"), _trained(tmp_path / "taken", limits, clip)
    assert limits.seen == {(0.0, LIMIT)}
    assert (clip.max_threshold, taken.args.max_grad_norm) == (None, LIMIT)
    assert _difference(_weights(own), _weights(taken)) < 1e-6


def test_a_limit_of_ones_own_stands(tmp_path: Path) -> None:
    clip = AdaptiveClipThreshold(warmup_cap=None, max_threshold=0.1)
    _trained(tmp_path, clip)
    assert clip.max_threshold == 0.1


@pytest.mark.parametrize(
    "callback",
    [
        AdaptiveClipThreshold(mode="observe"),
        AdaptiveClipThreshold(on_spike="skip_step", warmup_cap=None),
        LayerClipCallback(),
        GradNormCallback(),
    ],
    ids=["observes", "skips", "layers", "norms"],
)
def test_what_cannot_take_the_limit_gets_a_fixed_clip_beside_it(tmp_path: Path, callback: StabilizerCallback) -> None:
    own, taken = _trained(tmp_path / "own"), _trained(tmp_path / "taken", callback)
    assert _difference(_weights(own), _weights(taken)) < 1e-6
    assert getattr(callback, "max_threshold", None) is None


def test_it_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("STABILIZER_PREFLIGHT", raising=False)
    _trained(tmp_path, AdaptiveClipThreshold(name="spoken"), limit=0.625)
    said = " ".join(line.replace("│", " ").strip() for line in capsys.readouterr().out.splitlines())
    assert "max_grad_norm=0.625 of TrainingArguments is taken over as max_threshold of" in " ".join(said.split())


def test_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    callback = StabilizerTrainerCallback([GradNormCallback()], take_over_clipping=False)
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0\) clips before .*: set max_grad_norm=0 and"):
        make_trainer("single", tmp_path, callbacks=[callback])
    trainer = make_trainer("single", tmp_path, callbacks=[callback], max_grad_norm=0.0)
    trainer.train()
    # Somebody who sets it later is told when training starts.
    trainer.args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="set max_grad_norm=0"):
        trainer.train()


@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_a_trainer_that_does_not_clip_is_left_alone(tmp_path: Path, limit: float) -> None:
    clip = AdaptiveClipThreshold(warmup_cap=None)
    limits = _Limits(clip)
    trainer = _trained(tmp_path, limits, clip, limit=limit)
    assert limits.seen == {(limit, None)}
    assert trainer.args.max_grad_norm == limit


def test_everything_is_put_back_after_an_exception(tmp_path: Path) -> None:
    class Stops(StabilizerCallback):
        def on_gradients(self, context: StepContext) -> None:
            if context.step == 1:
                raise KeyboardInterrupt

    clip, stops = AdaptiveClipThreshold(), Stops()
    trainer = make_trainer("single", tmp_path, callbacks=[StabilizerTrainerCallback([clip, stops])])
    before = {name: set(vars(owner)) for name, owner in _owners(trainer).items()}
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (clip.max_threshold, trainer.args.max_grad_norm, clip.driver) == (None, 1.0, None)
    left = {name: set(vars(owner)) - before[name] for name, owner in _owners(trainer).items()}
    assert not {name for names in left.values() for name in names if callable(getattr(trainer, name, None))}
    assert "gather" not in left["accelerator"]
    # And again, without what has stopped it.
    Stops.on_gradients = StabilizerCallback.on_gradients  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == 3


def _owners(trainer: Any) -> dict[str, Any]:
    return {"trainer": trainer, "accelerator": trainer.accelerator, "handler": trainer.callback_handler}


def test_added_after_the_trainer_was_made(tmp_path: Path) -> None:
    norms = GradNormCallback()
    trainer = make_trainer("single", tmp_path)
    trainer.add_callback(StabilizerTrainerCallback([norms]))
    trainer.train()
    assert len(norms.norm_history().totals) == 3
    assert torch.isfinite(norms.norm_history().totals).all()
