"""What is saved is whole or not there, and what cannot be saved is told, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from stabilizer.callbacks import StabilizerCallback
from stabilizer.callbacks.state_files import has_states, load_states, save_states
from tests.accelerate_loops import attached, make_accelerator, prepared
from tests.launcher import run_distributed


class NotPlain(StabilizerCallback):
    """Has a state that JSON cannot hold."""

    def extra_state(self) -> dict[str, Any]:
        """A set."""
        return {"seen": {1, 2}}


def saved(rank: int, world_size: int, folder: str) -> str:
    """What saving says."""
    accelerator = make_accelerator("ddp")
    model, optimizer = prepared(accelerator)
    with attached(accelerator, model, optimizer, NotPlain()):
        with pytest.raises((TypeError, ValueError)) as caught:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    return str(caught.value)


def test_a_state_that_cannot_be_written_is_an_error_everywhere(tmp_path: Path) -> None:
    for message in run_distributed(saved, str(tmp_path), timeout=30):
        assert "set" in message


def test_a_second_save_that_breaks_off_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it breaks off at: the numbers of one file never meet the tensors of the other."""
    first = {"callback": {"step": 1, "tensor": torch.tensor(1.0)}}
    second = {"callback": {"step": 2, "tensor": torch.tensor(2.0)}}
    num_broken, calls = 0, ("json.dumps", "Path.write_text", "Path.replace", "save_file")
    for call in calls:
        folder = tmp_path / call
        folder.mkdir()
        save_states(first, folder)
        with monkeypatch.context() as patched:
            _break(patched, call)
            try:
                save_states(second, folder)
            except KeyboardInterrupt:
                num_broken += 1
        if has_states(folder):
            assert str(load_states(folder)) in (str(first), str(second))
        save_states(second, folder)
        assert str(load_states(folder)) == str(second), "the next save is whole again"
    assert num_broken >= 2, "nothing has broken off: the test looks at other calls than those that are made"


def _break(patched: pytest.MonkeyPatch, call: str) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    owner: Any = {"json.dumps": json, "save_file": safetensors.torch}.get(call, Path)
    patched.setattr(owner, call.rpartition(".")[2], stop)


@pytest.mark.parametrize("states", [{"a": {1: 2}}, {"a": {"b": [{None: 1}]}}, {"a": {(1, 2): torch.zeros(())}}])
def test_keys_that_are_no_text_are_an_error(states: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="key"):
        save_states(states, tmp_path)
    assert not has_states(tmp_path)


def test_names_with_a_slash_do_not_collide(tmp_path: Path) -> None:
    states = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "c": [torch.tensor(3)], "c/0": torch.tensor(4)}
    save_states(states, tmp_path)
    assert str(load_states(tmp_path)) == str(states)
