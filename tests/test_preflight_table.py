"""The table that preflight prints, and what it does when something is wrong."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.preflight import Fact, Setting, facts, preflight, show
from tests.preflight_settings import make_setting

LONG = Fact("in no optimizer", "3: " + ", ".join(f"model.layers.{n}.attention.query.weight" for n in range(3)), "why")


def test_the_table_can_be_read_without_colour_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    show([Fact("host", "ok"), LONG, Fact("GradNormCallback[vision]", "ok")], title="A table")
    output = capsys.readouterr().out
    assert "\x1b" not in output
    lines = output.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "GradNormCallback[vision]" in output
    marked = [line for line in lines if "!" in line and "practice" not in line]
    assert len(marked) == 1
    assert "in no optimizer" in marked[0]
    assert "-> why" in output
    assert "practice advises otherwise" in output


def test_a_table_without_marks_does_not_speak_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    show([Fact("host", "ok")])
    assert "!" not in capsys.readouterr().out


def test_a_terminal_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show(facts(make_setting()))
    assert "nobody clips" in (tmp_path / "out").read_text()


def test_preflight_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    setting = make_setting(callbacks=[GradNormCallback()])
    preflight(setting)
    output = capsys.readouterr().out
    assert "Stabilizer preflight (plain loop)" in output
    for fact in facts(setting):
        assert fact.name in output


@pytest.mark.parametrize("value", ["0", "false", " No "])
def test_it_can_be_turned_off(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STABILIZER_PREFLIGHT", value)
    preflight(lambda: pytest.fail("asked"))
    assert not capsys.readouterr().out


def test_it_never_raises(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Setting:
        raise RuntimeError("no trainer")

    with caplog.at_level(logging.ERROR, logger="stabilizer"):
        preflight(broken)
    assert "preflight table failed; training goes on" in caplog.text
    assert "no trainer" in caplog.text
    assert not capsys.readouterr().out
