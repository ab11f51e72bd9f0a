"""`attach(None, ...)`: plain loops, in one process, under DDP and under FSDP2 made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import Recorder
from tests.launcher import run_distributed
from tests.models import loss_of, make_transformer, token_batch
from tests.reference_run import LEARNING_RATE, reference_run
from tests.spread import CASES, backward, spread

NUM_STEPS = 3


def _loop(rank: int, world_size: int, *, strategy: str, max_norm: float | None, name: str = "sgd") -> dict[str, Any]:
    model, data_rank = spread(strategy, rank)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if name != "sgd":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows: list[Any] = []
    norms = GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)
    losses = LossMeanVarCallback(windows=(2, 3), every_n_steps=1)
    with attach(
        None, model=model, optimizer=optimizer, callbacks=[norms, losses], log=lambda *row: rows.append(row)
    ) as handle:
        for step in range(NUM_STEPS):
            loss = loss_of(model, token_batch(data_rank, step=step))
            loss.backward()
            handle.record_loss({"loss": loss}, weight=3)
            if max_norm is not None:
                handle.measure()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    history = norms.norm_history()
    return {
        "norms": dict(zip(history.layer_names, history.norms.T.tolist(), strict=True)),
        "totals": history.totals.tolist(),
        "loss": losses.statistics()["mean_3"],
        "rows": rows,
    }


@pytest.mark.norms
@pytest.mark.parametrize(
    ("strategy", "max_norm"),
    [
        pytest.param(
            strategy,
            max_norm,
            marks=pytest.mark.covers(feature=["gradient norms", "loss windows"], strategy=strategy, host="plain"),
            id=f"{strategy}-{max_norm}",
        )
        for strategy in ("single", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2_tp")
        for max_norm in (None, 0.5)
        if max_norm is None or strategy in ("single", "ddp", "fsdp2")
    ],
)
def test_every_strategy_logs_the_reference_s_numbers(strategy: str, max_norm: float | None) -> None:
    case = CASES[strategy]
    results = run_distributed(_loop, strategy=strategy, max_norm=max_norm, world_size=case.world_size)
    steps = [[token_batch(rank, step=step) for rank in range(case.num_data_ranks)] for step in range(NUM_STEPS)]
    expected = reference_run(steps, max_norm=max_norm)
    for rank, result in enumerate(results):
        assert result["totals"] == pytest.approx(expected.totals, rel=1e-5)
        for layer, values in result["norms"].items():
            assert values == pytest.approx([layers[layer] for layers in expected.layers], rel=1e-5)
        means = [sum(losses) / len(losses) for losses in expected.losses]
        assert result["loss"] == pytest.approx(sum(means) / NUM_STEPS, rel=1e-5)
        assert bool(result["rows"]) == (rank == 0), "rank 0 alone writes"
    logged = {step: values["grad_norm/total"] for values, step in results[0]["rows"] if "grad_norm/total" in values}
    assert logged == pytest.approx(dict(enumerate(expected.totals)), rel=1e-5)


def _saved_before_the_first_step(rank: int, world_size: int) -> list[float]:
    model, data_rank = spread("fsdp2", rank)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder()
    with attach(None, model=model, optimizer=optimizer, callbacks=[recorder], log=lambda *row: None) as handle:
        get_optimizer_state_dict(model, optimizer)  # torch steps the optimizer for it, on zeros
        assert recorder.totals == []
        assert recorder.next_step() == 0
        backward(model, "fsdp2", data_rank)
        handle.record_loss(torch.zeros(()))
        optimizer.step()
    assert recorder.next_step() == 1
    return recorder.totals


def test_torch_s_own_step_for_a_checkpoint_is_none() -> None:
    [[total], _] = run_distributed(_saved_before_the_first_step, world_size=2)
    assert total > 0


def _bare(*callbacks: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = make_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, attach(None, model=model, optimizer=optimizer, callbacks=list(callbacks), **options)


def _steps(model: Any, optimizer: Any, num: int) -> None:
    for step in range(num):
        loss_of(model, token_batch(step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_clip_without_word_of_it_is_seen_as_the_gradient() -> None:
    recorder = Recorder()
    model, optimizer, handle = _bare(recorder, log=lambda *row: None)
    with handle:
        loss_of(model, token_batch()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        handle.record_loss(0.0)
        optimizer.step()
    assert recorder.totals == pytest.approx([0.125], rel=1e-4)


def test_leaving_removes_the_hooks() -> None:
    recorder = Recorder()
    model, optimizer, handle = _bare(recorder, log=lambda *row: None)
    with handle:
        handle.record_loss(torch.ones(1))
        _steps(model, optimizer, 1)
    _steps(model, optimizer, 1)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert recorder.next_step() == 1


def test_a_fused_optimizer_under_a_scaler() -> None:
    """The scale is still in the gradients when the step begins."""
    totals = []
    for scale in (1.0, 2.0**10):
        model = make_transformer()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        norms = GradNormCallback(heatmap_every_n_steps=None)
        with attach(None, model=model, optimizer=optimizer, callbacks=[norms], log=lambda *row: None):
            scaler.scale(loss_of(model, token_batch())).backward()
            scaler.step(optimizer)
            scaler.update()
        totals.append(norms.norm_history().totals.tolist())
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_values_go_to_a_summary_writer(tmp_path: Any) -> None:
    from tests.event_files import read_run

    writer = SummaryWriter(tmp_path)
    model, optimizer, handle = _bare(GradNormCallback(), log=writer)
    with handle:
        _steps(model, optimizer, 3)
    writer.close()
    run = read_run(tmp_path)
    assert set(run.scalars["grad_norm/total"]) == {0, 1, 2}
    assert run.pictures == {"grad_norm/heatmap": [2]}
    assert run.layouts == 1


def test_without_a_place_to_log_to_it_says_so_once() -> None:
    norms = GradNormCallback()
    model, optimizer, handle = _bare(norms)
    with pytest.warns(StabilizerWarning, match="nothing is logged") as warnings, handle:
        _steps(model, optimizer, 3)
    assert len(warnings) == 1
    assert len(norms.norm_history().steps) == 3


def test_a_loss_that_never_comes_is_told_once() -> None:
    model, optimizer, handle = _bare(LossMeanVarCallback(), log=lambda *row: None)
    with pytest.warns(StabilizerWarning, match=r"no loss was seen in 3 steps.*record_loss") as warnings, handle:
        _steps(model, optimizer, 7)
    assert len(warnings) == 1


@pytest.mark.parametrize("loss", [None, torch.zeros(3), {"logits": torch.zeros(1)}, "2.5"])
def test_a_loss_that_is_none_is_refused(loss: Any) -> None:
    _, _, handle = _bare(LossMeanVarCallback(), log=lambda *row: None)
    with handle, pytest.raises(ValueError, match=r"loss: .*expected a tensor of one element"):
        handle.record_loss(loss)


def test_the_table_says_what_a_plain_loop_cannot(capsys: Any) -> None:
    _, _, handle = _bare(GradNormCallback(), LossMeanVarCallback(), log=lambda *row: None)
    handle.close()
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "! GradNormCallback limited in 1 way -> no total_after" in table
    assert "! LossMeanVarCallback limited in 1 way -> sees only what handle.record_loss(loss) is given" in table


def test_states_go_round_by_hand(tmp_path: Any) -> None:
    callbacks = [GradNormCallback(), LossMeanVarCallback(windows=(2, 3))]
    model, optimizer, handle = _bare(*callbacks, log=lambda *row: None)
    with handle:
        for _ in range(2):
            handle.record_loss(torch.ones(()))
            _steps(model, optimizer, 1)
        torch.save(handle.state_dict(), tmp_path / "state.pt")
    others = [GradNormCallback(), LossMeanVarCallback(windows=(2, 3))]
    _, _, again = _bare(*others, log=lambda *row: None)
    with again:
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [callback.next_step() for callback in others] == [2, 2]
    assert str([callback.state_dict() for callback in others]) == str([callback.state_dict() for callback in callbacks])
