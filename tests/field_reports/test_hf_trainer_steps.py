"""Field reports on transformers' Trainer: what is skipped, clipped and saved with our callbacks in it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradNormCallback,
    LayerClipCallback,
    LossMeanVarCallback,
    StabilizerTrainerCallback,
)
from tests import reference as oracle
from tests.accelerate_loops import Recorder
from tests.clip_loops import fixed
from tests.counting import count_collectives
from tests.field_reports.clip_tools import layer_clip
from tests.field_reports.helpers import TOLERANCE, covers
from tests.field_reports.trainer_tools import Run
from tests.launcher import run_distributed
from tests.states import same
from tests.trainer_runs import make_llama, make_trainer, reference

LIMIT = 0.5


def _infinite(rank: int, at: int) -> Any:
    """Puts an infinity into what rank 1 has of a gradient, when everything is reduced."""

    def before(trainer: Trainer) -> None:
        original, calls = trainer.accelerator.backward, iter(range(99))

        def backward(loss: Tensor, **kwargs: Any) -> None:
            original(loss, **kwargs)
            if next(calls) == at and rank == 1:
                gradient = trainer.model.lm_head.weight.grad
                getattr(gradient, "_local_tensor", gradient).view(-1)[0] = math.inf

        trainer.accelerator.backward = backward

    return before


def infinite_shard(rank: int, world_size: int, folder: Path, strategy: str) -> Any:
    guard = AdaptiveClipThreshold()
    run = Run(folder, guard, strategy=strategy, before=_infinite(rank, at=1), max_steps=4)
    return guard.num_skipped(), len(run.seen.gradients), run.weights(), run.messages


@covers("ddp", "transformers")
@covers("fsdp2", "transformers")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_B051_what_one_rank_of_the_trainer_alone_sees_is_decided_by_all(strategy: str, tmp_path: Path) -> None:
    (skipped, steps, weights, messages), (others, as_many, again, _) = run_distributed(
        infinite_shard, tmp_path, strategy
    )
    assert skipped == others == 1
    assert steps == as_many
    assert all(map(torch.equal, weights, again))
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)
    if strategy == "fsdp2":
        [message] = messages
        assert message.startswith("step 1: the gradient is not finite in lm_head.weight (1 Inf")
    else:
        # Every rank of DDP should hold the same gradient: that they do not is told as well.
        assert any("gradients differ between ranks at step 1" in message for message in messages)


def collectives(rank: int, world_size: int, folder: Path) -> Any:
    """Collectives of a run without and with callbacks, norms that the optimizer got, bytes of a rank's gradients."""
    found = []
    for callbacks in ([], [AdaptiveClipThreshold(strict=True), layer_clip(1e3)]):
        limit = LIMIT if callbacks else 0.0
        with count_collectives() as calls:
            run = Run(folder, *callbacks, strategy="fsdp2", max_grad_norm=limit, learning_rate=0.0)
        num_bytes = sum(call.num_bytes for call in calls.calls)
        found.append(
            ({name: num for name, num in calls.names.items() if "gather" in name or "scatter" in name}, num_bytes)
        )
    own = sum(4 * parameter.to_local().numel() for parameter in run.trainer.model.parameters())
    return *found, run.seen.totals(), own


@covers("fsdp2", "transformers")
@pytest.mark.filterwarnings("ignore:StabilizerTrainerCallback:stabilizer.StabilizerWarning")
def test_B060_the_trainer_s_clip_gathers_no_gradient_and_does_clip(tmp_path: Path) -> None:
    for (few, before), (many, after), totals, own in run_distributed(collectives, tmp_path):
        # Those of the wrapper, and of the test that looks at whole gradients.
        assert few == many
        assert after - before < 3 * own / 50
        # Measured again, in float64, on what the optimizer was given.
        assert totals == pytest.approx([LIMIT] * 3, rel=TOLERANCE)


class _Bad(nn.Module):
    """Gives NaN at one forward.

    Args:
        inner: Whose output it is.
        at: Which forward.
    """

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.at, self.num = inner, at, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the inner one gives."""
        output = self.inner(*args, **kwargs)
        self.num += 1
        return output * torch.nan if self.num == self.at else output


def invalid_micro_batch(rank: int, world_size: int, folder: Path) -> Any:
    """Three steps of three micro-batches; the fifth is invalid on rank 1."""
    recorder, guard, model = Recorder(strict=True), LayerClipCallback(), make_llama()
    model.model.layers[1].mlp = _Bad(model.model.layers[1].mlp, at=5 if rank == 1 else -1)
    run = Run(folder, guard, recorder, strategy="ddp", model=model, gradient_accumulation_steps=3)
    state = run.trainer.state
    return recorder.positions, state.global_step, guard.num_skipped(), run.messages, run.weights()


@covers("ddp", "transformers")
def test_B092_the_trainer_s_windows_of_micro_batches_stay_together(tmp_path: Path) -> None:
    (positions, step, skipped, messages, weights), (others, other_step, other_skipped, silent, again) = run_distributed(
        invalid_micro_batch, tmp_path
    )
    assert positions == others
    assert [position.num_micro_batches for position in positions] == [3, 3, 3]
    assert (step, skipped) == (other_step, other_skipped) == (3, 1)
    [message] = messages
    assert message.startswith("step 1: the gradient is not finite in ")
    assert "the loss is not finite on rank 1" in message
    assert silent == []
    assert all(map(torch.equal, weights, again))
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)


@covers("single", "transformers")
def test_B097_the_trainer_s_parameter_groups_have_one_limit_or_each_its_own(tmp_path: Path) -> None:
    raw = reference(num_steps=1, accumulation=1, num_ranks=1)[0]
    options: dict[str, Any] = {"max_steps": 1, "max_grad_norm": LIMIT, "weight_decay": 0.1}
    run = Run(tmp_path, GradNormCallback(), **options)
    # With and without weight decay: transformers makes two groups itself.
    assert [bool(group["params"]) for group in run.trainer.optimizer.param_groups] == [True, True]
    [received] = run.seen.gradients
    assert run.seen.totals() == pytest.approx([LIMIT], rel=TOLERANCE)
    for name, gradient in received.items():
        assert float(gradient.norm()) == pytest.approx(raw["norms"][name] * LIMIT / raw["total"], rel=1e-4), name

    limits = {"norms": 0.01, "weights": 0.25}
    by_kind = {r"norm": "norms", r".*": "weights"}
    rules = {kind: fixed(limit) for kind, limit in limits.items()}
    run = Run(tmp_path, layer_clip(9.0, rules=rules, granularity=by_kind), **{**options, "max_grad_norm": 0.0})
    [received] = run.seen.gradients
    kinds = oracle.layer_norms(received, lambda name: "norms" if "norm" in name else "weights")
    assert kinds == pytest.approx(limits, rel=TOLERANCE)


def _noted(written: list[dict[str, tuple[Tensor, int]]]) -> Any:
    def before(trainer: Trainer) -> None:
        original = trainer.accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            original(loss, **kwargs)
            named = {name: p.grad for name, p in trainer.model.named_parameters()}
            written.append({name: (g.clone(), g._version) for name, g in named.items() if g is not None})

        trainer.accelerator.backward = backward

    return before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_B124_under_the_trainer_s_limit_nothing_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    written: list[dict[str, tuple[Tensor, int]]] = []
    model = make_llama().to(dtype)
    run = Run(tmp_path, layer_clip(100.0), model=model, max_grad_norm=100.0, before=_noted(written))
    assert len(written) == len(run.seen.gradients) == 3
    for given, received, versions in zip(written, run.seen.gradients, run.seen.versions, strict=True):
        for name, (gradient, version) in given.items():
            assert torch.equal(gradient.view(torch.uint8), received[name].view(torch.uint8))
            assert received[name].dtype == dtype
            assert versions[name] == version, "a gradient was written, be it by a product with 1"
    for tag, value in {"total_coefficient": 1, "total_rate": 0}.items():
        assert set(run.series(f"max_grad_norm/clip/{tag}").values()) == {value}
    assert set(run.series("clip/layer_rate").values()) == {0}
    assert all(0 < total < 100 for total in run.series("max_grad_norm/grad_norm/total").values())


def _windows(name: str) -> list[LossMeanVarCallback]:
    # Without alarms: what these have seen grows up to their own window, and no further.
    options: dict[str, Any] = {"every_n_steps": 1, "warmup_steps": 0, "on_alarm": []}
    return [LossMeanVarCallback(windows=[window], name=f"{name}_{window}", **options) for window in (2, 3)]


def _twice(folder: Path, *names: str, num_steps: int, resume: Any = None) -> list[LossMeanVarCallback]:
    """Two callbacks of the same class in one trainer, as in the report."""
    made = [_windows(name) for name in names]
    trainer = make_trainer(
        "single",
        folder,
        callbacks=[StabilizerTrainerCallback(windows, log=lambda *row: None) for windows in made],
        max_steps=num_steps,
        save_strategy="steps",
        save_steps=1,
        max_grad_norm=0.0,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [callback for windows in made for callback in windows]


def test_B116_the_trainer_s_checkpoints_hold_one_copy_of_each_state(tmp_path: Path) -> None:
    whole = _twice(tmp_path, "a", "b", num_steps=8)
    sizes = set()
    for step in range(4, 9):
        folder = tmp_path / f"checkpoint-{step}"
        files = sorted(path for path in folder.iterdir() if "stabilizer" in path.name)
        assert len(files) == 4, "a description and the tensors, for each of the two"
        sizes.add(tuple(path.stat().st_size for path in files))
        for file, name in (("stabilizer.json", "a"), ("stabilizer_1.json", "b")):
            states = json.loads((folder / file).read_text())
            assert sorted(states) == [f"LossMeanVarCallback[{name}_2]", f"LossMeanVarCallback[{name}_3]"]
            assert all(state["steps"] == {"0": step} for state in states.values())
        assert "Stabilizer" not in (folder / "trainer_state.json").read_text()
    assert len(sizes) == 1, "states grow"
    # The windows hold the last steps of the checkpoint and the one step after it.
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = _twice(tmp_path, "a", "b", num_steps=8, resume=True)
    assert all(same(again.state_dict(), once.state_dict()) for again, once in zip(resumed, whole, strict=True))
    # Under the same names one would get the other's.
    with pytest.raises(ValueError, match=r"has 'LossMeanVarCallback\[a_2\]', under which values and states would"):
        _twice(tmp_path, "a", "a", num_steps=8)


def _limits(folder: Path, **options: Any) -> Run:
    clip = AdaptiveClipThreshold(rule={"name": "robust_log", "warmup_steps": 3}, warmup_cap=None)
    return Run(folder, clip, save_strategy="steps", save_steps=4, max_grad_norm=0.0, **options)


def test_B134_the_trainer_resumes_limits_without_being_asked(tmp_path: Path) -> None:
    straight = _limits(tmp_path / "straight", max_steps=8)
    _limits(tmp_path / "parts", max_steps=4)
    resumed = _limits(tmp_path / "parts", max_steps=8, resume=True)
    assert resumed.trainer.args.restore_callback_states_from_checkpoint is False
    for tag in ("clip/total_threshold", "clip/total_rate", "grad_norm/total"):
        expected = {step: value for step, value in straight.series(tag).items() if step > 4}
        assert expected.keys() == {5, 6, 7, 8}
        assert resumed.series(tag) == expected
    # Without its states it is told that the limits start anew, and they are others.
    for path in (tmp_path / "parts" / "checkpoint-4").glob("stabilizer*"):
        path.unlink()
    cold = _limits(tmp_path / "parts", max_steps=8, resume=str(tmp_path / "parts" / "checkpoint-4"))
    assert any("they start anew" in message for message in cold.messages)
    assert cold.series("clip/total_threshold") != resumed.series("clip/total_threshold")
