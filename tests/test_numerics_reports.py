"""What NumericsCallback leaves behind, and what it costs while all is well: nothing that the host waits for."""

from __future__ import annotations

import contextlib
import json
import math
import stat
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stabilizer.callbacks import GradLocCallback, NumericsCallback, attach
from stabilizer.callbacks.acting import Actor
from stabilizer.callbacks.incoming import Incoming
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.run_host import RunHost
from stabilizer.errors import StabilizerWarning
from stabilizer.timed import watches
from tests.counting import fake_cuda, host_may_wait
from tests.fake_suites import fake_suite
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, run
from tests.loggers import points_of
from tests.numerics_runs import STEP, Trouble, findings_of, make_numerics, train
from tests.test_cost import QUIET, count

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_reports_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    train(folder, Trouble("token"), profile_on_incident=True)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == [f"step_{STEP}/report.json", f"trace_step_{STEP + 1}_rank_0.json"]
    assert [mode(folder / name) for name in found] == [0o600] * 2
    assert [mode(path) for path in (folder, folder / f"step_{STEP}")] == [0o700] * 2


def test_one_trace_a_run_of_the_step_after_the_first_incident(tmp_path: Path) -> None:
    callback = make_numerics(tmp_path, profile_on_incident=True, cooldown_steps=0)
    faults = tuple(Fault(step, ((0, 0, 1, 3),)) for step in (STEP, STEP + 3))
    run(Plan(steps=STEP + 6, faults=faults, micro_batches=2), [callback])
    assert len(findings_of(callback)) == 2
    [trace] = tmp_path.glob("trace*")
    assert trace.name == f"trace_step_{STEP + 1}_rank_0.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    # A whole step: forward, backward and optimizer.
    assert {"aten::embedding", "aten::embedding_dense_backward"} <= names
    assert any("Optimizer.step" in str(name) for name in names)


def test_beside_a_profiler_of_the_user_s_there_is_no_trace_and_no_trouble(tmp_path: Path) -> None:
    profiler = torch.profiler.profile()

    def on_step(step: int, model: nn.Module) -> None:
        if step == STEP:
            profiler.start()
        if step == STEP + 1:
            profiler.stop()

    [finding], _ = train(tmp_path, Trouble("token"), on_step=on_step, profile_on_incident=True)
    assert finding.verdict == "repeats"
    assert any("embedding" in event.key for event in profiler.key_averages())
    assert not list(tmp_path.glob("trace*"))


def test_a_run_that_ends_at_the_incident_leaves_no_profiler_on(tmp_path: Path) -> None:
    callback = make_numerics(tmp_path, profile_on_incident=True)
    run(Plan(steps=STEP + 1, faulty=STEP, bad=((0, 0, 1, 3),), micro_batches=1), [callback])
    assert len(findings_of(callback)) == 1
    with torch.profiler.profile():  # would raise
        pass


def drop_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The weights stay as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def test_the_log_has_the_finding_and_how_many_there_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, callback = nn.Linear(3, 2), make_numerics(tmp_path, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows: list[Any] = []
    texts: list[str] = []
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    with attach(
        None,
        model=model,
        optimizer=optimizer,
        callbacks=[callback],
        loss_fn=loss_fn,
        log=lambda values, step: rows.append((values, step)),
    ) as handle:
        handle._suites.sink.text = lambda tag, text, step: texts.append(f"{tag} {step} {text}")  # type: ignore[method-assign]
        for step in range(6):
            loss_fn(model, torch.full((4, 3), math.nan if step == 4 else 1.0)).backward()
            if step == 4:
                optimizer.register_step_pre_hook(drop_gradients)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", StabilizerWarning)
                optimizer.step()
            if step == 4:
                assert "nonfinite_loss: step 4: the loss is not finite" in str(caught[0].message)
            optimizer.zero_grad()
    points = points_of(rows)
    assert {key: value for key, value in points.items() if key[0] == "numerics/incidents"} == {
        ("numerics/incidents", 4): 1.0
    }
    assert any(text.startswith("numerics/text 4 **nonfinite&#95;loss**\n\nstep 4") for text in texts)


def _traced(rank: int, world_size: int, folder: str) -> Any:
    trouble = Trouble("once", rank=rank, owner=1)
    findings, _ = train(folder, trouble, strategy="ddp", profile_on_incident=True)
    return [one.rank for one in findings], len(watches)


@pytest.mark.slow
@pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="plain")
def test_the_rank_that_is_named_is_traced(tmp_path: Path) -> None:
    results = run_distributed(_traced, str(tmp_path), timeout=60)
    assert results == [([1], 0), ([1], 0)], "a watch of collectives is left behind"
    assert [path.name for path in tmp_path.glob("trace*")] == [f"trace_step_{STEP + 1}_rank_1.json"]


def _collectives(rank: int, world_size: int, strategy: str) -> Any:
    search = count(rank, world_size, strategy, QUIET, [GradLocCallback()])
    own = count(rank, world_size, strategy, QUIET, [NumericsCallback()])
    both = count(rank, world_size, strategy, QUIET, [GradLocCallback(), NumericsCallback()])
    return search[0], own[0], both[0]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_quiet_steps_have_the_collectives_of_grad_loc_s(strategy: str) -> None:
    for search, own, both in run_distributed(_collectives, strategy, timeout=120):
        assert search == own == both
        assert sum(own.values()) == 6, "of three steps: the norms with the losses, and the flags"


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_waits_for_one_flag_a_step_and_for_nothing_else() -> None:
    """A read raises here, and the suite's own, of which that flag is a part, is left out."""
    callback = NumericsCallback(every_n_steps=4, check_parameters_every_n_steps=4, warmup_steps=0, strict=True)
    no_flags = mock.patch.object(Actor, "_read", lambda self, plan, *flags: [False] * (4 + len(plan.stops)))
    # Copies are read after that flag, when they have come; here none ever does.
    no_copies = mock.patch.object(Incoming, "arrived", return_value=())
    with fake_cuda(), no_flags, no_copies:
        suite = fake_suite([callback])
        callback.host = RunHost("plain", None, nn.Module(), [suite.optimizer], Replays([]), [])
        for step in range(1, 9):  # the last one is one of the interval
            with host_may_wait() if step <= 4 else contextlib.nullcontext():  # what is built once
                suite.run(is_scaled=step % 2 == 0)
                suite.before_step()
                suite.finish()
        assert suite.step == 9
