"""Killed at any moment, a training goes on from a verified checkpoint as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.checkpoints import last_good_checkpoint, read_guard
from tests.checkpoint_training import NUM_STEPS, Moment, Plan
from tests.states import same

_LIMIT = 60.0


class _Runner:
    """Has runs forked by a process that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint_training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )

    def run(self, plan: Plan, moment: Moment | None = None) -> list[int]:
        """Exit codes of the ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        told = {
            "plan": dataclasses.asdict(plan),
            "moment": None if moment is None else dataclasses.asdict(moment),
            "port": port,
            "seconds": _LIMIT,
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(told) + "\n")
        stdin.flush()
        codes: list[int] = json.loads(stdout.readline())
        return codes

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def runner() -> Iterator[_Runner]:
    started = _Runner()
    yield started
    started.close()


def _result(plan: Plan, rank: int = 0) -> Any:
    return torch.load(Path(plan.folder, f"result_{rank}.bin"), weights_only=True)


_whole: dict[tuple[str, int], Any] = {}


def _uninterrupted(runner: _Runner, plan: Plan, folder: Path) -> Any:
    """What comes of a training that nobody kills."""
    key = (plan.host, plan.num_ranks)
    if key not in _whole:
        folder.mkdir()
        whole = Plan(plan.host, str(folder), plan.num_ranks)
        assert runner.run(whole) == [0] * plan.num_ranks
        _whole[key] = _result(whole)
    return _whole[key]


def _kill_and_go_on(runner: _Runner, plan: Plan, moment: Moment, expected: Any) -> None:
    Path(plan.folder).mkdir()
    codes = runner.run(plan, moment)
    assert codes[moment.rank] == -9, f"it was not killed at {moment}: {codes}"
    saved = Path(plan.folder, "saved.txt")
    done = max(map(int, saved.read_text().split())) if saved.exists() else 0
    with warnings.catch_warnings(action="ignore"):  # of what the kill has left
        found = last_good_checkpoint(plan.folder)
    if done:
        # What was saved before is not lost, whatever was being written.
        assert found is not None
        guard = read_guard(found)
        assert guard is not None
        assert guard.step >= done
    assert runner.run(plan) == [0] * plan.num_ranks
    for rank in range(plan.num_ranks):
        result = _result(plan, rank)
        assert all(torch.equal(result["model"][name], value) for name, value in expected["model"].items())
        assert same(result["callbacks"], expected["callbacks"])


def test_goes_on_after_a_kill(runner: _Runner, tmp_path: Path) -> None:
    """In a save that is to replace the last one, and between two saves where another rank dies."""
    plan = Plan("lightning", str(tmp_path / "first"))
    moment = Moment(8, in_save=True, seconds=0.004)
    _kill_and_go_on(runner, plan, moment, _uninterrupted(runner, plan, tmp_path / "whole"))
    plan = Plan("accelerate", str(tmp_path / "second"), num_ranks=2, overwrites=True)
    moment = Moment(9, in_save=False, seconds=0.002, rank=1)
    _kill_and_go_on(runner, plan, moment, _uninterrupted(runner, plan, tmp_path / "whole of both"))


def _moments(seed: int, num_ranks: int) -> list[Moment]:
    """Two thirds of them within a save: most is at stake there."""
    random_numbers = random.Random(seed)
    return [
        Moment(
            step=random_numbers.randrange(2, NUM_STEPS, 2) if number % 3 else random_numbers.randrange(NUM_STEPS),
            in_save=bool(number % 3),
            seconds=random_numbers.choice([0.0, 0.001, 0.003, 0.01, 0.02]) * random_numbers.random(),
            rank=random_numbers.randrange(num_ranks),
        )
        for number in range(20)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("host", ["lightning", "accelerate"])
def test_goes_on_after_twenty_kills(host: str, num_ranks: int, runner: _Runner, tmp_path: Path) -> None:
    for number, moment in enumerate(_moments(7, num_ranks)):
        plan = Plan(host, str(tmp_path / str(number)), num_ranks, overwrites=bool(number % 2))
        _kill_and_go_on(runner, plan, moment, _uninterrupted(runner, plan, tmp_path / "whole"))
