"""Acceptance: each fault on purpose gets its own verdict on every host, and a healthy run gets none."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradLocCallback
from stabilizer.numerics import timing
from tests.acceptance_dead import DEAD_STEP, GROUP_SECONDS
from tests.acceptance_hosts import HOSTS
from tests.acceptance_runs import KINDS, NUM_SLOW_STEPS, SLOW_KINDS, WARMUP, Case, Found, cases, run
from tests.environments import ROOT
from tests.launcher import run_distributed

NO_VERDICT, HEALTHY = "none", "healthy"
SEEDS = range(5)
SPREAD = [host for host, num in HOSTS.items() if num > 1]
#: In the suite: what is said of a scale and of a rate is the same in a Trainer, however it spreads the model.
QUICK_SCALED = ("lightning/single", "accelerate/ddp")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
]


def trained(host: str, planned: list[Case], num_steps: int, folder: Path, *, is_scaled: bool = False) -> list[Found]:
    """What a run has left on every rank."""
    arguments = host, [case.fault for case in planned], num_steps, folder, is_scaled
    if HOSTS[host] == 1:
        return [run(0, 1, *arguments)]
    found: list[Found] = run_distributed(run, *arguments, world_size=HOSTS[host], timeout=250)
    return found


def label(finding: dict[str, Any]) -> str:
    """Column of the matrix."""
    return str(finding["verdict"] or finding["kind"])


def within(finding: dict[str, Any], case: Case) -> bool:
    """Whether a finding is of the step, or the steps, of a fault."""
    first = case.fault["step"]
    return bool(first <= finding["step"] < first + case.fault.get("num_steps", 1) + 1)


def count(planned: Iterable[Case], findings: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """(Row, column) -> how often."""
    matrix: Counter[tuple[str, str]] = Counter()
    left = list(findings)
    for case in planned:
        own = [finding for finding in findings if within(finding, case)]
        left = [finding for finding in left if finding not in own]
        matrix.update((case.name, label(finding)) for finding in own)
        if not own:
            matrix[case.name, NO_VERDICT] += 1
    matrix.update((HEALTHY, label(finding)) for finding in left)
    if not left:
        matrix[HEALTHY, NO_VERDICT] += 1
    return matrix


def show(matrix: Counter[tuple[str, str]]) -> str:
    """As a table of faults and verdicts."""
    rows = list(dict.fromkeys([*KINDS, *SLOW_KINDS, HEALTHY]))
    columns = list(dict.fromkeys(column for _, column in sorted(matrix)))
    lines = [" " * 26 + " ".join(f"{column:>20}" for column in columns)]
    for row in rows:
        numbers = [matrix[row, column] for column in columns]
        if any(numbers):
            lines.append(f"{row:26}" + " ".join(f"{number or '.':>20}" for number in numbers))
    return "\n".join(lines)


def check(planned: list[Case], found: list[Found]) -> Counter[tuple[str, str]]:
    """Every fault has its one finding, with all that it should name; the same on every rank."""
    findings = found[0].findings
    assert len({repr(one.findings) for one in found}) == 1  # where NaN is equal to itself
    matrix = count(planned, findings)
    expected = Counter({(case.name, case.verdict): 1 for case in planned} | {(HEALTHY, NO_VERDICT): 1})
    assert matrix == expected, "\n" + show(matrix) + "\n" + "\n".join(str(finding) for finding in findings)
    for case in planned:
        [finding] = [finding for finding in findings if within(finding, case)]
        assert finding["kind"] in case.kinds, finding
        if case.name in SLOW_KINDS:
            continue
        fault = case.fault
        named = finding["step"], finding["rank"], finding["micro_batch"]
        assert named == (fault["step"], fault["rank"], fault["micro_batch"]), finding
        assert finding["host"] == socket.gethostname(), finding
        assert case.layer in (None, finding["layer"]), finding
        tokens = [place for one in found[:1] for place in one.tokens.get(fault["step"], [])]
        assert {place[:2] for place in tokens} <= {(fault["rank"], fault["micro_batch"])}, tokens
        assert (
            {place[2 : 2 + len(case.tokens[0])] for place in tokens} == set(case.tokens) if case.tokens else not tokens
        )
    return matrix


def accept(host: str, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    """One seed's faults on one host."""
    prefix = "model." if host.startswith("lightning") else ""
    planned = cases(list(KINDS), seed=seed, num_ranks=HOSTS[host], prefix=prefix)
    last = max(case.fault["step"] for case in planned)
    return check(planned, trained(host, planned, last + 2, folder))


def accept_scaled(host: str, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    """A loss scale and a learning rate, in a run in which everything else is in order."""
    planned = cases(list(SLOW_KINDS), seed=seed, num_ranks=HOSTS[host], prefix="")
    return check(planned, trained(host, planned, NUM_SLOW_STEPS, folder, is_scaled=True))


@pytest.mark.parametrize("host", HOSTS)
def test_each_fault_has_its_verdict(host: str, tmp_path: Path) -> None:
    assert WARMUP > 20  # which is what the callbacks are told
    print("\n" + show(accept(host, 0, tmp_path)))  # noqa: T201


@pytest.mark.parametrize("host", QUICK_SCALED)
def test_what_is_no_gradient(host: str, tmp_path: Path) -> None:
    print("\n" + show(accept_scaled(host, 0, tmp_path)))  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("host", HOSTS)
def test_five_seeds(host: str, tmp_path: Path) -> None:
    matrix: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        matrix += accept(host, seed, tmp_path / str(seed))
        matrix += accept_scaled(host, seed, tmp_path / f"{seed}_scaled")
    print(f"\n{host}, {len(SEEDS)} seeds\n{show(matrix)}")  # noqa: T201
    for name, (_, verdict, _) in {**KINDS, **SLOW_KINDS}.items():
        assert matrix[name, verdict] == len(SEEDS)


def searched(rank: int, num_ranks: int, folder: str) -> Found:
    """A run in which one rank is slow to begin a search, and any wait is told."""
    least, localize = timing._MIN_SECONDS, GradLocCallback.localize

    def slow(self: GradLocCallback, context: Any, steps: Any) -> bool:
        time.sleep(1.0 if rank == 0 else 0.0)
        return localize(self, context, steps)

    timing._MIN_SECONDS, GradLocCallback.localize = 0.5, slow  # type: ignore[method-assign]
    try:
        fault = {"kind": "layer_spike", "step": WARMUP + 2, "layer": "layers.0", "factor": 2000.0}
        return run(rank, num_ranks, "accelerate/ddp", [fault], WARMUP + 6, folder, slow_ratio=10.0)
    finally:
        timing._MIN_SECONDS, GradLocCallback.localize = least, localize  # type: ignore[method-assign]


def test_a_search_is_no_slow_collective(tmp_path: Path) -> None:
    found = run_distributed(searched, str(tmp_path), timeout=100)
    assert [finding["kind"] for finding in found[0].findings] == ["spike"]


def end_with_a_dead_rank(host: str, folder: Path) -> list[tuple[int, str]]:
    """Exit status and what was said, of both processes."""
    processes = []
    try:
        for rank in range(2):
            command = [sys.executable, "-m", "tests.acceptance_dead", str(rank), host, str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "STABILIZER_PREFLIGHT": "0"}
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        # The second one dies; the time of the first begins then.
        dead, _ = processes[1].communicate(timeout=120)
        alive, _ = processes[0].communicate(timeout=GROUP_SECONDS + 30)
        return [(processes[0].returncode, alive), (processes[1].returncode, dead)]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    "host", [host if host == "lightning/ddp" else pytest.param(host, marks=pytest.mark.slow) for host in SPREAD]
)
def test_a_rank_that_dies_ends_the_run_with_a_message(host: str, tmp_path: Path) -> None:
    (status, alive), (killed, dead) = end_with_a_dead_rank(host, tmp_path)
    assert killed == -signal.SIGKILL, dead
    assert f"rank 1, step {DEAD_STEP}, micro-batch 0: this process kills itself" in dead
    assert status > 0, alive
    assert "trained to the end" not in alive
    assert f"a fault on purpose: faults[0]: kind='dead_rank', step={DEAD_STEP}, rank=1" in alive
    # What the process group says of it.
    assert re.search(
        r"RuntimeError: .*(closed by peer|reset by peer|Connection refused|[Tt]imed out|Broken pipe)", alive
    )
