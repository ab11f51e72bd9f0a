"""What a person reads when a run has ended: one block, on rank 0, of what has happened."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradNormCallback,
    LayerClipCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    attach,
)
from stabilizer.callbacks.console import RunConsole
from stabilizer.callbacks.notices import BAD_CHECKPOINT, GOOD_CHECKPOINT, ROLLBACK
from stabilizer.errors import TrainingStoppedError
from stabilizer.notices import Notice
from tests.launcher import run_distributed
from tests.lightning_models import make_loader, make_module, make_trainer
from tests.localize_loops import Fault, Plan, grad_loc, run
from tests.loss_alarm_loops import BURST, healthy, play, watcher, with_spikes
from tests.tiny_loops import HOSTS, Loop, no_log, unit

NAN = float("nan")
TITLE = "Stabilizer summary: "

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")


def summary(text: str) -> dict[str, str]:
    """Rows of the one summary in a program's output, by name; a row without a name belongs to the one before."""
    assert text.count(TITLE) == 1, text
    lines = text[text.index(TITLE) :].splitlines()
    found = {"": lines[0].removeprefix(TITLE)}
    name = ""
    for line in lines[1:]:
        if not line.startswith("  "):
            break
        own, value = line[2:16].strip(), line[16:]
        name = own or name
        found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


class Raises(StabilizerCallback):
    """Ends the run at its third step."""

    may_stop = True

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def on_step_end(self, context: Any) -> None:
        if context.step == 2:
            context.defer(self.end)

    def end(self) -> None:
        raise self.error


# In every host.


@pytest.mark.parametrize("host", HOSTS)
def test_a_loop_says_what_was_skipped(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Loop(host, LayerClipCallback(), GradNormCallback()) as loop:
        for step in range(12):
            loop.step(NAN if step % 2 else 1.0)
        assert TITLE not in capsys.readouterr().out
    found = summary(capsys.readouterr().out)
    assert found[""] == "the run is over"
    assert found["steps"] == "12 (0 to 11)"
    assert found["skipped"] == "6: steps 1, 3, 5, 7, 9, ..."
    assert found["alarms"] == "non-finite gradient: 6, steps 1 to 11", "those within the cooldown count"
    assert found.keys() == {"", "steps", "skipped", "alarms"}


def test_a_healthy_run_says_little(capsys: pytest.CaptureFixture[str]) -> None:
    with Loop("plain", LayerClipCallback(), LossMeanVarCallback(), AdaptiveClipThreshold(warmup_cap=None)) as loop:
        for _ in range(5):
            loop.step(1.0)
    assert summary(capsys.readouterr().out) == {"": "the run is over", "steps": "5 (0 to 4)", "alarms": "none"}


def test_overflows_of_a_scaler_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    fused: dict[str, Any] = {"optimizer": lambda parameters: [torch.optim.SGD(parameters, lr=0.0, fused=True)]}
    with Loop("plain", LayerClipCallback(), scaler=True, **fused) as loop:
        assert loop.scaler is not None
        for step in range(8):
            loop.backward(3e38 if step == 2 else 1.0)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.optimizer.zero_grad()
    found = summary(capsys.readouterr().out)
    assert found["overflows"] == "1, left out by the gradient scaler itself"
    assert "skipped" not in found


def test_the_layers_that_were_clipped_most(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = {"name": "fixed", "threshold": 2.0}
    layers = LayerClipCallback(rule=rule, granularity="parameter")
    total = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 1e9}, warmup_cap=None)
    with attach(None, model=model, optimizer=optimizer, callbacks=[layers, total], log=no_log):
        for step in range(20):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 9.0 if step < 3 * number else 1.0)
            optimizer.step()
    clipped = " ".join(summary(capsys.readouterr().out)["clipped"].split())
    worst = "5.weight 75.0%, 4.weight 60.0%, 3.weight 45.0%, 3 others at most 30.0%"
    assert clipped == f"{worst} of the last 20 steps (LayerClipCallback)"


def test_a_lightning_trainer_says_where_the_logs_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my runs"
    logger = TensorBoardLogger(folder, name="", version="")
    trainer = make_trainer(callbacks=[GradNormCallback(heatmap_every_n_steps=None)], logger=logger)
    trainer.fit(make_module("mlp"))
    found = summary(capsys.readouterr().out)
    assert found["steps"] == "3 (0 to 2)"
    assert shlex.split(found["TensorBoard"]) == ["tensorboard", "--logdir", logger.log_dir]
    trainer.validate(make_module("mlp"), make_loader("mlp", length=6))
    assert TITLE not in capsys.readouterr().out, "there was no training"


def _train(host: str, callback: StabilizerCallback) -> None:
    if host == "lightning":
        make_trainer(callbacks=[callback], max_steps=5).fit(make_module("mlp"))
        return
    with Loop(host, callback) as loop:
        for _ in range(5):
            loop.step(1.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TrainingStoppedError("enough"), "a callback has stopped the run"),
        (KeyError("mine"), "the run has ended with KeyError"),
    ],
)
@pytest.mark.parametrize("host", ["plain", "lightning"])
def test_how_it_has_ended(host: str, error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    callback = Raises(error)
    callback.strict = True
    with pytest.raises(type(error)):
        _train(host, callback)
    found = summary(capsys.readouterr().out)
    assert found[""] == words
    assert found["steps"] == "3 (0 to 2)"


def test_a_run_that_is_tried_again_after_an_error_has_not_ended_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise MemoryError("a batch of this size does not fit")
    except MemoryError:
        with Loop("plain", GradNormCallback()) as loop:
            loop.step(1.0)
    assert summary(capsys.readouterr().out)[""] == "the run is over"


def test_a_trainer_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_runs = pytest.importorskip("tests.trainer_runs")
    callback = StabilizerTrainerCallback([GradNormCallback(heatmap_every_n_steps=None)])
    trainer_runs.make_trainer("single", tmp_path, callbacks=[callback]).train()
    assert summary(capsys.readouterr().out)["steps"] == "3 (0 to 2)"


# When there is none.


def test_a_run_without_steps_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with Loop("plain", GradNormCallback()):
        pass
    with Loop("plain", GradNormCallback()) as loop:
        loop.backward(1.0)  # a step that never came
    assert TITLE not in capsys.readouterr().out


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STABILIZER_SUMMARY", "0")
    with Loop("plain", GradNormCallback()) as loop:
        loop.step(1.0)
    assert TITLE not in capsys.readouterr().out


def test_a_fault_of_its_own_ends_nothing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(GradNormCallback):
        def summary(self, optimizer_index: int) -> list[tuple[str, str]]:
            raise RuntimeError("no words")

    with Loop("plain", Broken()) as loop:
        loop.step(1.0)
    assert "no words" in caplog.text
    assert TITLE not in capsys.readouterr().out


def _two_ranks(rank: int, world_size: int) -> str:
    model, optimizer = unit()
    said = io.StringIO()
    handle = attach(None, model=model, optimizer=optimizer, callbacks=[LayerClipCallback()], log=no_log)
    with contextlib.redirect_stdout(said), handle:
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    return said.getvalue()


def test_rank_0_alone_has_one() -> None:
    first, second = run_distributed(_two_ranks)
    assert summary(first)["steps"] == "3 (0 to 2)"
    assert second == ""


# All that may be in it.


def test_incidents_have_their_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = tuple(Fault(step, ((0, 2, 1, 7),)) for step in (24, 28, 32, 36))
    run(Plan(faults=faults), [grad_loc(tmp_path, cooldown_steps=0)])
    found = summary(capsys.readouterr().out)
    incidents = found["incidents"].split("\n")
    assert [line[:8] for line in incidents if line.startswith("step")] == ["step 24:", "step 28:", "step 32:"]
    assert "D, token at rank 0" in found["incidents"]
    assert incidents[-1] == "and 1 more"
    assert found["folder"] == str(tmp_path)
    assert found["alarms"] == "none"


class Eventful(StabilizerCallback):
    """Whatever can happen, happens."""

    def on_step_end(self, context: Any) -> None:
        step = context.step
        for number in range(12):
            if step % (number + 1) == 0:
                self.console.tell(Notice(kind=f"kind {number}", step=step, text=f"kind {number} at step {step}"))
        self.console.count(BAD_CHECKPOINT if step == 40 else GOOD_CHECKPOINT, step=step)
        if step % 20 == 5:
            self.console.count(ROLLBACK, step=step)


def test_it_is_short_whatever_has_happened(capsys: pytest.CaptureFixture[str]) -> None:
    with Loop("plain", Eventful(), LayerClipCallback(), AdaptiveClipThreshold()) as loop:
        for step in range(50):
            loop.step(NAN if step in (30, 33) else 5.0)
    out = capsys.readouterr().out
    found = summary(out)
    block = out[out.index(TITLE) :].rstrip().splitlines()
    assert len(block) <= 25
    assert max(map(len, block)) <= 80
    alarms = found["alarms"].split("\n")
    assert alarms[0] == "kind 0: 50, steps 0 to 49"
    assert re.fullmatch(r"and \d+ other kinds", alarms[-1])
    assert found["checkpoints"] == "49 good, 1 bad (step 40)"
    assert found["rollbacks"] == "3, steps 5 to 45"
    assert found["skipped"] == "2: steps 30, 33"


def test_what_nobody_was_told_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Without "log" there is no warning, and a summary all the same."""
    callback = watcher()
    play(BURST, callback)
    jumps = [alarm for alarm in callback.alarms if alarm.kind == "jump"]
    num, first, last = sum(alarm.count for alarm in jumps), jumps[0].step, jumps[-1].step
    assert num > len(jumps) > 1, "some were within a cooldown"
    assert f"loss jump: {num}, steps {first} to {last}" in summary(capsys.readouterr().out)["alarms"]


def test_what_comes_within_the_last_cooldown_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A run may die in it; and the next run of the same callback does not count it again."""
    callback = watcher("log", cooldown_steps=100)
    losses = healthy(120)
    play(with_spikes(losses, dict.fromkeys(range(80, 110, 7), 9.0)), callback)
    assert summary(capsys.readouterr().out)["alarms"] == "loss jump: 5, steps 80 to 108"
    play(losses, callback)
    assert "jump" not in summary(capsys.readouterr().out)["alarms"]


def test_two_consoles_know_nothing_of_each_other() -> None:
    first, second = RunConsole(), RunConsole()
    first.count("loss jump", step=1)
    assert second.kinds == {}
