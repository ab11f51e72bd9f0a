"""Alarms on several ranks, what they cost, and what they ask of GradLocCallback: the same step everywhere."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import LossMeanVarCallback, attach
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.callbacks.loss_watch import LossWatch
from stabilizer.detectors import LossDetector
from stabilizer.errors import StabilizerWarning, TrainingStoppedError
from stabilizer.losses import StepLoss
from stabilizer.tally import LossTally
from tests.counting import Calls, HostReadError, count_collectives, fake_cuda
from tests.fake_suites import fake_suite
from tests.launcher import run_distributed
from tests.loss_alarm_loops import BURST, Writer, healthy, play, watcher, with_spikes
from tests.tiny_loops import OneLayer

SPIKES = {80: 9.0, 81: 9.0, 95: math.nan}


def own_losses(rank: int) -> list[float]:
    """What a rank sees: noise of its own, and rank 1 alone the spikes."""
    return with_spikes(healthy(110, seed=rank), SPIKES if rank == 1 else {})


def train(
    rank: int, callbacks: list[LossMeanVarCallback], *, folder: Path, values: list[float] | None = None
) -> dict[str, Any]:
    """A DDP loop; what this rank has seen, step by step.

    Args:
        rank: This one.
        callbacks: Ours.
        folder: Of the logger.
        values: This rank's losses; default `own_losses`.
    """
    model = DistributedDataParallel(OneLayer())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    saves: list[tuple[int, str]] = []
    writer = Writer(folder)
    seen: dict[str, Any] = {"weights": [], "saves": saves, "error": None, "calls": Calls(), "writer": writer}
    now = [-1]
    with (
        warnings.catch_warnings(),
        attach(
            None,
            model=model,
            optimizer=optimizer,
            callbacks=callbacks,
            log=writer,
            save_fn=lambda name: saves.append((now[0], name)),
        ) as handle,
    ):
        warnings.simplefilter("ignore", StabilizerWarning)
        try:
            for step, value in enumerate(values or own_losses(rank)):
                now[0] = step
                with count_collectives() as calls:
                    loss = model(torch.full((2, 1), value if math.isfinite(value) else 2.0)).mean()
                    handle.record_loss(loss if math.isfinite(value) else value)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen["weights"].append(model.module.weight.item())
                seen["calls"] = calls if step == 70 else seen["calls"]
        except TrainingStoppedError as error:
            seen["error"] = (now[0], str(error))
    return seen


def _acts(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    events: list[tuple[LossAlarm, bool]] = []
    callback = watcher(
        "record",
        lambda alarm: events.append((alarm, True)),
        {"name": "save_checkpoint", "max_saves": 5},
        {"name": "lower_lr", "factor": 0.1, "num_steps": 7},
        cooldown_steps=10,
        strict=True,
    )
    seen = train(rank, [callback], folder=folder)
    return {
        **seen,
        "calls": None,
        "writer": None,
        "events": [alarm for alarm, _ in events],
        "state": callback.state_dict(),
    }


def test_ranks_act_on_the_same_alarms_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_distributed(_acts, tmp_path, world_size=2)
    # One rank alone has the spike: the mean over ranks is (9 + 2) / 2.
    assert [(alarm.kind, alarm.step) for alarm in first["events"]] == [("jump", 80), ("nonfinite", 95)]
    assert first["events"][0].value == pytest.approx(5.5, abs=0.2)
    assert list(map(repr, first["events"])) == list(map(repr, second["events"]))
    assert {alarm.rank for alarm in first["events"]} == {1}
    expected = [(80, "alarm_step_80_jump"), (95, "alarm_step_95_nonfinite")]
    assert first["saves"] == second["saves"] == expected
    assert first["weights"] == second["weights"]
    moves = [before - after for before, after in zip(first["weights"], first["weights"][1:], strict=False)]
    # A gradient of 2 and a rate of 1e-6, or a tenth of it; a float32 near 1 has steps of 6e-8.
    lowered = [number + 1 for number, move in enumerate(moves) if move < 1e-6]
    assert lowered == [*range(81, 88), *range(96, 103)]
    [path] = tmp_path.rglob("*.jsonl")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [(line["step"], line["rank"]) for line in lines] == [(80, 1), (95, 1)]


def _stops(rank: int, world_size: int, folder: Path) -> Any:
    seen = train(rank, [watcher("log", "stop")], folder=folder)
    return seen["error"], len(seen["weights"])


def test_all_ranks_stop_at_the_same_step_and_say_why(tmp_path: Path) -> None:
    first, second = run_distributed(_stops, tmp_path, world_size=2)
    assert first == second
    (step, message), num = first
    assert (step, num) == (80, 80)
    for part in ("LossMeanVarCallback: step 80", "the loss jumped to 5.5", "sigmas", "the median 1.9", "the limit is"):
        assert part in message
    assert "The last losses: " in message
    assert len(message.split("The last losses: ")[1].split(", ")) == 10


def _fails(rank: int, world_size: int, folder: Path) -> Any:
    def fails_here(alarm: LossAlarm) -> None:
        if rank == 0:
            raise OSError("no network on rank 0")

    callback = watcher(fails_here, "save_checkpoint", {"name": "lower_lr", "num_steps": 7})
    seen = train(rank, [callback], folder=folder)
    return seen["saves"], seen["weights"], callback.has_failed


def test_a_function_that_fails_on_one_rank_keeps_ranks_together(tmp_path: Path) -> None:
    first, second = run_distributed(_fails, tmp_path, world_size=2)
    assert first == second
    assert [step for step, _ in first[0]] == [80, 95]
    assert not first[2]


def _log_only(rank: int, world_size: int, folder: Path) -> Any:
    results = []
    for actions in ([], ["log"], ["log", "record"], ["log", "lower_lr"]):
        callback = LossMeanVarCallback(on_alarm=actions, windows=(20, 60), warmup_steps=50)
        seen = train(rank, [callback], folder=folder)
        results.append((seen["weights"], len(seen["calls"].sizes), [alarm.step for alarm in callback.alarms]))
    return results


def test_a_log_changes_nothing_and_exchanges_nothing(tmp_path: Path) -> None:
    for (off, num_off, _), (log, num_log, alarms), (_, num_record, _), (_, num_lower, _) in run_distributed(
        _log_only, tmp_path, world_size=2
    ):
        assert alarms == [80, 95]
        assert log == off
        assert num_log == num_record == num_off
        # Those that act agree first: the count can tell the difference.
        assert num_lower == num_off + 1


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("actions", "first_wait"), [(["log", "record"], None), (["stop"], 2), ([print], 2)], ids=["tells", "stops", "calls"]
)
def test_the_host_waits_for_no_loss_that_is_less_than_two_steps_old(actions: list[Any], first_wait: int | None) -> None:
    callback = LossMeanVarCallback(on_alarm=actions, warmup_steps=50, windows=(20, 60), strict=True)
    with fake_cuda():
        suite = fake_suite([callback])
        for step in range(1, 70):
            tally = LossTally(["auto"])
            tally.begin({"labels": torch.zeros(2, 3, dtype=torch.int64, device="cuda")})
            tally.add(torch.ones((), device="cuda"))
            suite.run(losses=tally.take(0))
            if step == first_wait:
                with pytest.raises(HostReadError):
                    suite.finish()
                return
            suite.finish()
    assert first_wait is None


class _Step:
    """A context as far as `LossWatch` looks at it."""

    optimizer_index = 0

    def __init__(self, step: int) -> None:
        from stabilizer.callbacks.context import Position

        self.step, self.position = step, Position(step)


def test_losses_on_their_way_are_in_the_state_and_are_looked_at_in_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an accelerator, whose copies arrive late."""
    from stabilizer.late import HostCopy

    def make() -> LossWatch:
        return LossWatch(cooldown_steps=20, acts=False, window=60, short_window=20, warmup_steps=50)

    def feed(watch: LossWatch, values: list[float], first: int) -> list[tuple[int, int]]:
        found = []
        for step, value in enumerate(values, first):
            loss = StepLoss(torch.tensor([value * 3, 3.0, float(not math.isfinite(value)), 1.0], dtype=torch.float64))
            found += [(step, alarm.step) for alarm in watch.take(_Step(step), loss, knows_rank=False)]  # type: ignore[arg-type]
        return found

    whole, first = make(), make()
    expected = [step for _, step in feed(whole, BURST, 0)]
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "is_ready", property(lambda self: False))
        assert feed(first, BURST[:82], 0) == []
        state = json.loads(json.dumps(first.state_dict()))
        assert [row[0] for row in state["pending"]] == list(range(82))
    second = make()
    second.load_state_dict(state)
    assert [step for _, step in feed(second, BURST[82:], 82)] == expected == [80, 110]
    assert second.state_dict() == whole.state_dict()
    # The first one goes on as well, and what is left at the end of a run is told then.
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "is_ready", property(lambda self: False))
        assert feed(first, BURST[82:], 82) == []
    assert [alarm.step for alarm in first.settle()] == [80, 110]
    assert first.state_dict() == whole.state_dict()


def test_alarms_of_the_last_steps_are_told_when_a_run_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from stabilizer.late import HostCopy

    seen: list[LossAlarm] = []
    callback, writer = watcher("record", seen.append, "stop"), Writer(tmp_path)
    # Copies that have not come, and nobody who waits for them.
    monkeypatch.setattr(LossWatch, "_look", lambda self, *, before, waits=False: _look_at_end(self, waits=waits))
    monkeypatch.setattr(HostCopy, "is_ready", property(lambda self: True))
    play(with_spikes(healthy(81), {80: 9.0}), callback, log=writer)
    assert [alarm.step for alarm in seen] == [80]
    assert len((tmp_path / "loss_alarms.jsonl").read_text().splitlines()) == 1


def _look_at_end(watch: Any, *, waits: bool) -> list[LossAlarm]:
    arrived = watch._incoming.arrived(waits=True) if waits else ()
    return [alarm for one in arrived for alarm in watch._judge(one)]


def test_warm_up_is_at_least_what_the_detectors_need() -> None:
    callback = LossMeanVarCallback(windows=(3, 5), warmup_steps=0, on_alarm=["record"])
    play(with_spikes(healthy(45), {40: 9.0}), callback)
    assert callback.alarms == ()
    with pytest.raises(ValueError, match="warmup_steps=0"):
        LossDetector(warmup_steps=0)
