"""States of callbacks in `accelerator.save_state` and `load_state`: nothing unpickled, resumed runs the same."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from stabilizer.callbacks.state_files import load_states, save_states
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.launcher import run_distributed
from tests.models import token_batch


def _callbacks() -> tuple[GradNormCallback, LossMeanVarCallback, LossMeanVarCallback]:
    return (
        GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None, granularity={r"\.attn\.": "attention"}),
        LossMeanVarCallback(windows=(2, 3), every_n_steps=4, warmup_steps=0),
        LossMeanVarCallback(windows=(2, 5), every_n_steps=1, warmup_steps=0, name="long"),
    )


def _run(
    rank: int, *, strategy: str, steps: range, load: str | None = None, save: str | None = None
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Part of a run: logged rows, and the states at its end."""
    accelerator = make_accelerator(strategy)
    model, optimizer = prepared(accelerator, optimizer="adamw")
    rows: list[Any] = []
    callbacks = _callbacks()
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: rows.append(row)):
        if load is not None:
            accelerator.load_state(load)
        train(accelerator, model, optimizer, [token_batch(rank, step=step) for step in steps])
        if save is not None:
            accelerator.save_state(save)
    return rows, [callback.state_dict() for callback in callbacks]


def _interrupted(rank: int, world_size: int, folder: str, *, strategy: str) -> dict[str, Any]:
    whole = _run(rank, strategy=strategy, steps=range(7))
    first = _run(rank, strategy=strategy, steps=range(3), save=folder)
    second = _run(rank, strategy=strategy, steps=range(3, 7), load=folder)
    return {"whole": whole, "resumed": (first[0] + second[0], second[1])}


def _flat(rows: list[Any]) -> dict[tuple[str, int], float]:
    return {(tag, step): value for values, step in rows for tag, value in values.items()}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(feature="checkpoint and resume", strategy=name, host="accelerate"))
        for name in ("single", "ddp", "fsdp2")
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    results = run_distributed(
        _interrupted, str(tmp_path), strategy=strategy, world_size=1 if strategy == "single" else 2, timeout=100
    )
    for result in results:
        assert str(result["whole"][1]) == str(result["resumed"][1])
        assert str(result["whole"][1]) == str(results[0]["whole"][1])
    whole, resumed = _flat(results[0]["whole"][0]), _flat(results[0]["resumed"][0])
    # The first half ends with an additional row of what its last steps had added; extremes begin anew.
    common = {key: value for key, value in whole.items() if key[0] not in ("loss/min", "loss/max", "loss/max_rank")}
    assert common == {key: resumed[key] for key in common}
    assert ("grad_norm/total", 6) in common
    assert ("long/loss/slope_5", 6) in common
    assert not list(tmp_path.glob("custom_checkpoint*")), "Accelerate unpickles those"


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(0, strategy="single", steps=range(2), save=str(tmp_path))
    assert set(json.loads((tmp_path / "stabilizer.json").read_text())) == {
        "GradNormCallback",
        "LossMeanVarCallback",
        "LossMeanVarCallback[long]",
    }

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    states = load_states(tmp_path)
    for callback in _callbacks():
        callback.load_state_dict(states[callback.state_key])
        assert callback.next_step() == 2


def test_states_go_through_files_unchanged(tmp_path: Path) -> None:
    base = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    states = {
        "a": {"plain": [1, 2.5, None, True, "x", {"nested": []}], "views": [base[:, 1], base.T], "empty": base[:0]},
        "b": {"number": base.sum(), "flags": base > 2, "half": base.to(torch.bfloat16), "nan": float("nan")},
    }
    save_states(states, tmp_path)
    assert str(load_states(tmp_path)) == str(states)
    save_states({"a": {}}, tmp_path)
    assert load_states(tmp_path) == {"a": {}}, "a second save replaces the first"


def test_a_folder_without_states_is_told(tmp_path: Path) -> None:
    accelerator = make_accelerator()
    prepared(accelerator, optimizer="adamw")
    accelerator.save_state(str(tmp_path))
    with pytest.warns(StabilizerWarning, match="has no states of stabilizer's callbacks: they start anew"):
        _run(0, strategy="single", steps=range(1), load=str(tmp_path))


def test_a_callback_that_was_not_there_starts_anew(tmp_path: Path) -> None:
    _run(0, strategy="single", steps=range(1), save=str(tmp_path))
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, optimizer="adamw")
    callbacks = [GradNormCallback(name="new")]
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None):
        with pytest.warns(StabilizerWarning, match=r"no state of GradNormCallback\[new\], which start anew"):
            accelerator.load_state(str(tmp_path))
        train(accelerator, model, optimizer, [token_batch()])
    assert callbacks[0].next_step() == 1


def test_two_handles_on_one_accelerator_keep_their_states_apart(tmp_path: Path) -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "log": lambda *row: None}
    callbacks = [GradNormCallback(), GradNormCallback(history=5, name="second")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(attach(accelerator, callbacks=callbacks[:1], **options))
        train(accelerator, model, optimizer, [token_batch()])
        stack.enter_context(attach(accelerator, callbacks=callbacks[1:], **options))
        train(accelerator, model, optimizer, [token_batch()])
        accelerator.save_state(str(tmp_path))
        train(accelerator, model, optimizer, [token_batch()])
        accelerator.load_state(str(tmp_path))
        assert [callback.next_step() for callback in callbacks] == [2, 1]


def _missing_on_one_rank(rank: int, world_size: int, folder: str) -> None:
    accelerator = make_accelerator("ddp")
    model, optimizer = prepared(accelerator)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=_callbacks(), log=lambda *row: None):
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        import stabilizer.callbacks.accelerate as host

        original, host.has_states = host.has_states, lambda path, name: rank == 0
        try:
            with pytest.raises(FileNotFoundError, match="on 1 ranks and not on 1 others: use a folder that all nodes"):
                accelerator.load_state(folder)
        finally:
            host.has_states = original


def test_a_folder_that_one_node_lacks_is_an_error_everywhere(tmp_path: Path) -> None:
    run_distributed(_missing_on_one_rank, str(tmp_path), world_size=2, timeout=60)


def test_going_back_within_a_run(tmp_path: Path) -> None:
    """A loop that returns to an earlier checkpoint goes on from its step, with its windows."""
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, optimizer="adamw")
    norms, losses, _ = _callbacks()
    batches = [token_batch(step=step) for step in range(6)]
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[norms, losses], log=lambda *row: None):
        train(accelerator, model, optimizer, batches[:2])
        accelerator.save_state(str(tmp_path))
        saved = str([norms.state_dict(), losses.state_dict()])
        train(accelerator, model, optimizer, batches[2:5])
        first = norms.norm_history().totals[2:]
        accelerator.load_state(str(tmp_path))
        assert str([norms.state_dict(), losses.state_dict()]) == saved
        train(accelerator, model, optimizer, batches[2:5])
    assert norms.norm_history().steps == [0, 1, 2, 3, 4]
    assert torch.equal(norms.norm_history().totals[2:], first)
