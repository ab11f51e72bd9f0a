"""Acceptance: with recovery on, a run that a fault would spoil ends as the faultless one does."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance_hosts import HOSTS
from tests.acceptance_recovery import FAULT_STEP, FAULTS, NUM_STEPS, Recovered, recovered
from tests.launcher import run_distributed

#: How far from the faultless loss a run may end.
TOLERANCE = 0.02
QUICK = [
    ("lightning/single", "nan_gradient"),
    ("lightning/single", "learning_rate_jump"),
    ("lightning/single", "corrupted_batch"),
    ("accelerate/ddp", "nan_gradient"),
]
#: Of these nothing is left where nobody goes back.
SPOILING = ("nan_gradient", "learning_rate_jump")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
]


def train(host: str, fault: dict[str, Any] | None, folder: Path, clips: bool, **options: Any) -> Recovered:
    """What a run has left; the same on every rank."""
    if HOSTS[host] == 1:
        return recovered(0, 1, host, fault, folder, clips, **options)
    found = run_distributed(recovered, host, fault, folder, clips, world_size=HOSTS[host], timeout=250, **options)
    assert len({repr((one.losses, one.history)) for one in found}) == 1
    first: Recovered = found[0]
    return first


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final loss of a host's faultless run, with all callbacks."""

    @functools.cache
    def final_loss(host: str) -> float:
        run = train(host, None, tmp_path_factory.mktemp("faultless"), False)
        assert run.history == []
        assert run.findings == []
        assert len(run.losses) == NUM_STEPS
        return run.final_loss

    return final_loss


def check(host: str, name: str, faultless: Any, folder: Path) -> float:
    """How far a run ends from the faultless one."""
    fault, clips = FAULTS[name]
    run = train(host, fault, folder, clips)
    distance = run.final_loss / faultless(host) - 1
    assert abs(distance) < TOLERANCE, (distance, run.history)
    rungs = [rung for _, rung in run.history]
    assert rungs == ([] if clips else ["alarm", "roll_back"])
    # The steps before the fault are the same, whatever stands beside them.
    assert all(map(math.isfinite, run.losses[:FAULT_STEP]))
    return distance


@pytest.mark.parametrize(("host", "name"), QUICK)
def test_it_ends_as_the_faultless_run(host: str, name: str, faultless: Any, tmp_path: Path) -> None:
    check(host, name, faultless, tmp_path)


@pytest.mark.parametrize("name", SPOILING)
def test_without_recovery_it_does_not(name: str, faultless: Any, tmp_path: Path) -> None:
    run = train("lightning/single", FAULTS[name][0], tmp_path, False, ladder=["alarm"])
    assert not run.final_loss < (1 + TOLERANCE) * faultless("lightning/single")
    assert {rung for _, rung in run.history} == {"alarm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("host", HOSTS)
def test_every_fault_on_every_host(host: str, name: str, faultless: Any, tmp_path: Path) -> None:
    distance = check(host, name, faultless, tmp_path)
    print(f"\n{host} {name}: {distance:+.2%} of the faultless loss")  # noqa: T201
