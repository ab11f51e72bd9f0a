"""Checkpoints: what a callback leaves in them, and that a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import GradNormCallback
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer


def _callbacks() -> list[GradNormCallback]:
    return [GradNormCallback(), GradNormCallback(name="inf", norm_type="inf", granularity="module", history=3)]


# Lightning, about a folder that the second run finds; torch, about what saves and loads FSDP1's shards.
_NOT_OURS = (
    "Checkpoint directory .* exists and is not empty",
    "._get_pg_default_device. will be deprecated",
    "Multiple backends are registered with this ProcessGroup",
    ".load_state_dict. is deprecated and will be removed",
    "Please use DTensor instead",
    "TypedStorage is deprecated",
)


def interrupted(rank: int, world_size: int, strategy: str, folder: str) -> list[Any]:
    """Two epochs of three steps at once, and one after the other; what the callbacks of both runs remember."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    for message in _NOT_OURS:
        warnings.filterwarnings("ignore", message)
    histories = []
    for stops in ((2,), (1, 2)):
        path = None
        for stop in stops:
            saver = ModelCheckpoint(f"{folder}/{len(stops)}", save_on_train_epoch_end=True, save_top_k=-1)
            callbacks = [*_callbacks(), saver]
            trainer = make_trainer(
                strategy,
                devices=world_size,
                max_steps=-1,
                max_epochs=stop,
                callbacks=callbacks,
                enable_checkpointing=True,
            )
            length = 9 * (1 if strategy == "tp" else world_size)
            module = make_module("transformer", optimizer="adamw", tensor_style="tp", length=length)
            trainer.fit(module, ckpt_path=path)
            path = saver.best_model_path
        states = [callback.state_dict() for callback in callbacks[:2]]
        histories.append([state["extra"]["history"]["0"] for state in states])
    return histories


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(feature="checkpoint and resume", strategy=name, host="lightning"))
        for name in ("single", "ddp", "fsdp1", "fsdp2", "tp")
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    world_size = 1 if strategy == "single" else 2
    for uninterrupted, resumed in run_distributed(interrupted, strategy, str(tmp_path), world_size=world_size):
        for expected, found in zip(uninterrupted, resumed, strict=True):
            assert found["steps"] == expected["steps"]
            assert found["layer_names"] == expected["layer_names"]
            assert torch.equal(found["norms"], expected["norms"])
        assert uninterrupted[0]["steps"] == list(range(6))
        assert uninterrupted[1]["steps"] == [3, 4, 5]


def _plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain_types(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, list):
        return all(map(_plain_types, value))
    if type(value) is torch.Tensor:
        return value.device.type == "cpu"
    return value is None or type(value) in (str, int, float, bool)


def test_state_is_plain_and_constant_in_size(tmp_path: Path) -> None:
    callback = GradNormCallback(history=4, granularity={r"layers\.(\d+)": r"block.\1"}, layers=[0], exclude=[".*head"])
    sizes = []
    for number in range(3):
        make_trainer(max_steps=6, callbacks=[callback]).fit(make_module("transformer"))
        state = callback.state_dict()
        assert _plain_types(state)
        torch.save(state, tmp_path / f"{number}.pt")
        assert torch.load(tmp_path / f"{number}.pt", weights_only=True).keys() == state.keys()
        sizes.append((tmp_path / f"{number}.pt").stat().st_size)
    assert sizes[1] == sizes[2]
    assert callback.next_step() == 18


def test_loading_changes_neither_its_argument_nor_shares_memory() -> None:
    callback = GradNormCallback()
    make_trainer(callbacks=[callback]).fit(make_module("transformer"))
    state = callback.state_dict()
    original = copy.deepcopy(state)
    other = GradNormCallback()
    other.load_state_dict(state)
    make_trainer(callbacks=[other], max_steps=5).fit(make_module("transformer"))
    assert torch.equal(state["extra"]["history"]["0"]["norms"], original["extra"]["history"]["0"]["norms"])
    assert state["steps"] == original["steps"] == {"0": 3}
    assert other.norm_history().steps == list(range(8))


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 1, "steps": None}])
def test_a_state_that_cannot_be_read_is_one_clear_error(change: dict[str, Any]) -> None:
    state = {**GradNormCallback().state_dict(), **change}
    if state["steps"] is None:
        del state["steps"]
    with pytest.raises(ValueError, match=f"cannot load a state of version {state['version']}"):
        GradNormCallback().load_state_dict(state)


def test_other_arguments_than_the_checkpoint_s_are_said() -> None:
    state = GradNormCallback(every_n_steps=2).state_dict()
    with pytest.warns(StabilizerWarning, match=r"arguments differ .*every_n_steps: 2 -> 1"):
        GradNormCallback().load_state_dict(state)


def test_state_keys_depend_on_the_name_alone() -> None:
    assert GradNormCallback(every_n_steps=7).state_key == GradNormCallback().state_key == "GradNormCallback"
    assert GradNormCallback(name="vision").state_key == "GradNormCallback[vision]"


def test_two_callbacks_without_names_are_refused_by_lightning() -> None:
    with pytest.raises(RuntimeError, match="state_key"):
        make_trainer(callbacks=[GradNormCallback(), GradNormCallback()])


class Pickles(GradNormCallback):
    """Pickles itself in the middle of a fit."""

    copies: list[Any]

    def on_step_end(self, context: Any) -> None:
        """Copy in both ways."""
        super().on_step_end(context)
        self.copies = [pickle.loads(pickle.dumps(self)), copy.deepcopy(self)]


def test_callbacks_can_be_pickled_before_during_and_after_a_fit() -> None:
    callback = pickle.loads(pickle.dumps(Pickles()))
    make_trainer(callbacks=[callback]).fit(make_module("transformer"))
    for other in (*callback.copies, pickle.loads(pickle.dumps(callback))):
        assert other.norm_history().steps == [0, 1, 2]
        assert torch.equal(other.norm_history().norms, callback.norm_history().norms)
