"""`stabilizer calibrate` where there is nothing to calibrate: one line that says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate_tools import command_in, norms, write_events


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return command_in(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        (None, (), "no such folder"),
        ({}, (), "neither an event file of TensorBoard nor a CSV file"),
        ({"train/loss": norms(number=5)}, (), "no gradient norm.*--tag.*there are: train/loss"),
        (
            {"train/loss": norms(number=5)},
            ("--tag", "train/los"),
            "--tag=train/los: no such series.*closest.*train/loss",
        ),
        ({"grad_norm": norms(number=150)}, (), "50 norms from step 100 on, too few.*--skip-steps"),
        ({"grad_norm": dict.fromkeys(range(500), 2.0)}, (), "all 400 norms are 2: that is no gradient norm"),
        ({"grad_norm": dict.fromkeys(range(500), 0.0)}, (), "all 400 norms are zero"),
        ({"grad_norm": norms()}, ("--quantile", "99.9"), "--quantile=99.9: expected a number above 0 and at most 1"),
        ({"grad_norm": norms()}, ("--margin", "0.5"), "--margin=0.5: expected a number of at least 1"),
        ({"grad_norm": norms()}, ("--skip-steps", "-1"), "--skip-steps=-1: expected 0 or more"),
        ({"grad_norm": norms()}, ("--batch", "many"), "batch"),
        ({"grad_norm": norms()}, ("--out", "."), "cannot be written"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(
    series: Any, options: tuple[str, ...], message: str, run: Any, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    if series is not None:
        logs.mkdir()
        if series:
            write_events(logs, series)
    content, error = run(logs, *options)
    assert content is None
    assert re.search(message, error), error


def test_bytes_that_are_no_log_are_one_line_too(run: Any, tmp_path: Path) -> None:
    for name in ("events.out.tfevents.1.host", "a.csv"):
        path = tmp_path / name
        path.write_bytes(b"\xff\x00\x13" * 40)
        content, error = run(path)
        assert content is None
        assert name in error
