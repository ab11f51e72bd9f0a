"""Field reports, area loss-spike: what is seen of a loss, by whom, and what is done."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LossMeanVarCallback, attach
from stabilizer.callbacks.loss_alarms import LossAlarm
from tests.launcher import run_distributed
from tests.lightning_models import make_trainer
from tests.loss_alarm_loops import Writer, healthy, play, summary, watcher, with_spikes
from tests.states import same
from tests.test_loss_alarms_ranks import train
from tests.test_loss_mean_var import _scripted
from tests.tiny_loops import told

NAN = math.nan


def _two_levels(rank: int, world_size: int, folder: Path) -> Any:
    values = with_spikes([1.0 + 2 * rank] * 70, {60: 50.0} if rank else {})
    callback = watcher("record", every_n_steps=5)
    seen = train(rank, [callback], folder=folder, values=values)
    return callback.statistics(), callback.alarms, seen["writer"].scalars


def test_B008_the_loss_is_that_of_all_ranks_and_a_spike_of_one_is_seen(tmp_path: Path) -> None:
    (first, alarms, scalars), (second, other_alarms, _) = run_distributed(_two_levels, tmp_path, world_size=2)
    assert first == second
    assert alarms == other_alarms
    [alarm] = alarms
    assert (alarm.kind, alarm.step, alarm.rank) == ("jump", 60, 1)
    assert alarm.value == pytest.approx(25.5, abs=0.1)
    # The weight moves by a millionth a step.
    expected = {"mean_20": 2.0, "min": 1.0, "max": 3.0, "max_rank": 1.0}
    assert {name: scalars[f"loss/{name}", 55] for name in expected} == pytest.approx(expected, abs=1e-3)
    assert scalars["loss/max", 60] == pytest.approx(50.0, abs=0.1)


def test_B012_a_nan_is_told_and_counted_at_its_step_and_is_in_no_mean() -> None:
    callback, writer = watcher("log", every_n_steps=1), Writer()
    with told() as messages:
        play(with_spikes([2.0] * 12, {5: NAN}), callback, log=writer)
    assert summary(callback) == [("nonfinite", 5, 1)]
    assert [message for message in messages if message.startswith("step 5 (batch 5): the loss is not finite")]
    assert writer.scalars["alarm/nonfinite", 5] == 1.0
    assert [writer.scalars["loss/nonfinite", step] for step in (4, 5, 11)] == [0.0, 1.0, 1.0]
    assert {value for (tag, _), value in writer.scalars.items() if tag == "loss/mean_20"} == {2.0}


class Tokens(nn.Module):
    """Tells tokens from one another; takes labels as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of labels that are not -100."""
        return F.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())


def _ignored(rank: int, world_size: int, bad_rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Tokens()
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, guard, writer = watcher("log", "record", every_n_steps=1, name="a"), AdaptiveClipThreshold(), Writer()
    callbacks = [losses, guard, GradNormCallback()]
    gradients = []
    with (
        told() as messages,
        pytest.MonkeyPatch.context() as patch,
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=writer) as handle,
    ):
        patch.setattr("stabilizer.callbacks.alarm_actions.AlarmActions._record", lambda *args: None)
        for step in range(8):
            tokens = torch.arange(12).reshape(2, 6).remainder(7)
            labels = torch.full_like(tokens, -100) if (step, rank) == (4, bad_rank) else tokens
            loss = model(input_ids=tokens, labels=labels)
            handle.record_loss(loss)
            loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            optimizer.step()
            optimizer.zero_grad()
    state = losses.state_dict()["extra"]["windows"]["0"]
    return {
        "alarms": [(alarm.kind, alarm.step, alarm.rank) for alarm in losses.alarms],
        "texts": [alarm.text for alarm in losses.alarms],
        "messages": messages,
        "gradients": gradients,
        "num_in_window": int(state["num_finite"]),
        "scalars": writer.scalars,
    }


def test_B023_a_batch_without_valid_labels_is_told_as_such() -> None:
    found = _ignored(0, 1, 0)
    assert found["gradients"][4] == 0.0
    assert found["alarms"] == [("nonfinite", 4, 0)]
    assert "there is no valid target in the batch, all labels are ignored" in found["texts"][0]
    [message] = [message for message in found["messages"] if "loss is not finite" in message]
    assert "there is no valid target in the batch" in message
    _check_guard(found)


def test_B023_one_rank_without_valid_labels_poisons_nothing() -> None:
    """Which rank it was is said; that its labels are all ignored, as a question."""
    for rank, found in enumerate(run_distributed(_ignored, 1, world_size=2)):
        assert found["gradients"][4] > 0
        assert found["alarms"] == [("nonfinite", 4, 1)]
        assert "on rank 1" in found["texts"][0]
        assert "are all of its labels ignored?" in found["texts"][0]
        if rank == 0:
            _check_guard(found)


def _check_guard(found: dict[str, Any]) -> None:
    assert found["num_in_window"] == 7
    assert not [message for message in found["messages"] if "gradient is not finite" in message]
    assert {found["scalars"]["grad_norm/nonfinite", step] for step in range(8)} == {0.0}
    assert {value for (tag, _), value in found["scalars"].items() if tag == "skip/count"} <= {0.0}


def test_B072_one_alarm_an_event_and_no_old_window_after_a_rollback() -> None:
    burst = {80 + number: 9.0 + 0.1 * number for number in range(5)}
    callback = watcher(cooldown_steps=20)
    play(healthy(80), callback)
    saved = callback.state_dict()
    before = callback.statistics()
    play(with_spikes(healthy(110), burst)[80:], callback)
    assert summary(callback) == [("jump", 80, 1)]
    assert callback.statistics() != before
    callback.load_state_dict(saved)
    assert callback.statistics() == before
    assert same(callback.state_dict(), saved)
    # It goes on as if nothing had been: a spike is an alarm at once.
    play([9.0, 2.0], callback)
    assert summary(callback) == [("jump", 80, 1), ("jump", 80, 1)]


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_B086_what_is_not_finite_always_alarms_and_what_falls_never_does(value: float) -> None:
    seen: list[LossAlarm] = []
    callback = LossMeanVarCallback(on_alarm=[seen.append])
    # A deep fall, slow and at once, after the warm-up.
    falling = [1.0 + 9.0 * 0.99**step for step in range(200)] + healthy(60, level=0.05, sigma=0.001)
    play([value, *falling[:50], value, *falling[50:]], callback)
    assert [(alarm.kind, alarm.step) for alarm in seen] == [("nonfinite", 0)]
    assert callback.statistics()["num_nonfinite"] == 2
    # There is no switch whose meaning could be mistaken.
    assert not {"mode", "finite_only"} & set(inspect.signature(LossMeanVarCallback).parameters)


def test_B093_a_huge_first_loss_neither_alarms_nor_hides_a_spike() -> None:
    callback = LossMeanVarCallback(on_alarm=[print])
    play([1e6, *healthy(100), 8.0], callback)
    assert summary(callback) == [("jump", 101, 1)]
    assert callback.alarms[0].median == pytest.approx(2.0, abs=0.05)


def _second_epoch(rank: int, world_size: int, folder: Path) -> None:
    callback = LossMeanVarCallback(on_alarm=["record"])

    def loss(index: int, rank: int) -> float:
        is_bad = module.trainer.current_epoch == 1 and index == 7 and rank == 1
        return NAN if is_bad else 1.0 + index

    module = _scripted(losses=loss, num_batches=10)
    make_trainer("ddp", devices=world_size, max_steps=20, callbacks=[callback], default_root_dir=folder).fit(module)


def test_B098_the_bad_batch_is_written_down_once(tmp_path: Path) -> None:
    run_distributed(_second_epoch, tmp_path, world_size=2)
    [path] = tmp_path.rglob("*.jsonl")
    [line] = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    found = {key: line[key] for key in ("kind", "epoch", "batch_index", "step", "rank", "value")}
    expected = {"kind": "nonfinite", "epoch": 1, "batch_index": 7, "step": 17, "rank": 1, "value": "nan"}
    assert found == expected


def _report_or_stop(rank: int, world_size: int, folder: Path, actions: list[str]) -> Any:
    values = with_spikes(healthy(60, seed=rank), {50: 30.0} if rank else {})
    callback = LossMeanVarCallback(on_alarm=actions, windows=(20, 60), warmup_steps=50)
    seen = train(rank, [callback], folder=folder, values=values)
    return seen["weights"], seen["error"], [(alarm.kind, alarm.step) for alarm in callback.alarms]


def test_B101_reports_alone_change_nothing_and_a_stop_says_why(tmp_path: Path) -> None:
    off, logged, stopped = (
        run_distributed(_report_or_stop, tmp_path, actions, world_size=2) for actions in ([], ["log"], ["log", "stop"])
    )
    for rank in range(2):
        assert logged[rank][:2] == (off[rank][0], None)
        assert logged[rank][2] == stopped[rank][2] == [("jump", 50)]
        step, message = stopped[rank][1]
        assert step == 50
        assert "step 50: the loss jumped to 16" in message.replace(" (batch 50)", "")
        assert "sigmas" in message
        assert "above the median" in message
        assert "the limit is" in message
        last = [float(value) for value in message.split("The last losses: ")[1].split(", ")]
        assert len(last) == 10
        assert last[-1] == pytest.approx(16.0, abs=0.2)
        assert stopped[rank][0] == off[rank][0][:50]
