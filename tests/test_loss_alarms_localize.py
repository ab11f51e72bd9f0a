"""The action "localize": what GradLocCallback is asked for, and what is said where it cannot help."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradLocCallback, LossMeanVarCallback
from tests.localize_loops import Plan, grad_loc, run, written
from tests.loss_alarm_loops import BURST, healthy, play, watcher, with_spikes


def _searching(folder: Path, *, factor: float, **options: Any) -> tuple[GradLocCallback, LossMeanVarCallback]:
    """A run whose loss jumps at step 60 and whose next step has a gradient that no trigger would search."""
    search = grad_loc(folder, trigger_ratio=1e6, cooldown_steps=500, **options)
    losses = watcher("localize", weight="samples")
    plan = Plan(steps=64, faulty=61, factor=factor)
    told_losses = with_spikes(healthy(64), {60: 9.0})
    _tell(plan, [search, losses], told_losses)
    return search, losses


def _tell(plan: Plan, callbacks: list[Any], values: list[float]) -> None:
    """`run`, in which the loop tells other losses than it propagates."""
    now = [0]

    def on_step(step: int, model: Any) -> None:
        now[0] = step
        callbacks[0].driver.record_loss(values[step])

    run(plan, callbacks, on_step=on_step)


def test_localize_has_the_next_step_searched_whatever_the_trigger_says(tmp_path: Path) -> None:
    search, losses = _searching(tmp_path, factor=3000.0)
    assert [alarm.step for alarm in losses.alarms] == [60]
    assert list(written(tmp_path)) == [61]
    [incident] = search.incidents
    # What was planted.
    assert [(one.micro_batch, one.row, one.position) for one in incident.tokens] == [(2, 1, 7)]


def test_localize_says_so_if_no_norm_is_over_its_threshold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stabilizer"):
        search, losses = _searching(tmp_path, factor=1.0)
    assert [alarm.step for alarm in losses.alarms] == [60]
    assert search.incidents == []
    assert "asked to look at step 61: no norm is over its threshold" in caplog.text


def test_localize_without_grad_loc_is_told_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    play(BURST, watcher("localize", strict=True))
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "localize does nothing here: there is no GradLocCallback" in said
