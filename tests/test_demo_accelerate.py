"""`stabilizer demo --engine accelerate`: what it trains, and that its processes begin and end together."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback
from stabilizer.cli import main
from stabilizer.examples.processes import RankError, run_processes
from stabilizer.examples.report import loss_line
from tests.demo_ranks import fail, write_environment
from tests.demo_session import CONFIG, LAYERS, Session, noise, reference_losses
from tests.event_files import read_run
from tests.launcher import run_distributed

WAITING = """
import sys, time
from pathlib import Path
from stabilizer.examples.processes import run_processes

def wait(folder):
    import os
    (Path(folder) / os.environ["RANK"]).touch()
    time.sleep(600)

if __name__ == "__main__":
    run_processes(wait, args=(sys.argv[1],), num_processes=2)
"""

# Some ten seconds each where nothing else runs.
pytestmark = pytest.mark.timeout(300)


def covers(strategy: str) -> pytest.MarkDecorator:
    return pytest.mark.covers(feature="demo", strategy=strategy, host="accelerate")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=covers("ddp")),
        pytest.param("single", marks=[covers("single"), pytest.mark.slow]),
    ],
)
def test_four_steps_log_the_reference_s_numbers(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(f"engine: accelerate{CONFIG}")
    logdir = tmp_path / "all runs"
    # DDP is what the CPU gets by itself.
    chosen = [] if strategy == "ddp" else ["--strategy", strategy]
    arguments = ["-m", "stabilizer", "demo", "--config", "demo.yaml", *chosen, "--logdir", str(logdir)]
    with Session(arguments, cwd=tmp_path) as session:
        status, out, err = session.finish()
        assert status == 0, out + err
        session.assert_group_ends()

    lines = out.replace("\r", "\n").splitlines()
    assert f"Accelerate, {strategy}, {2 if strategy == 'ddp' else 1} process" in lines[0]
    assert lines[-1] == f"tensorboard --logdir {shlex.quote(str(logdir))}"
    assert len([line for line in lines if line.startswith("all ranks: mean ")]) == 1, out
    for layer in LAYERS:
        assert len([line for line in lines if re.search(rf"\s{re.escape(layer)}\s", line)]) == 1, f"{layer} once: {out}"
    assert noise(err) == []

    assert len(list(logdir.rglob("events.out.tfevents.*"))) == 1, "one rank writes"
    scalars = read_run(logdir / f"accelerate-{strategy}" / "version_0").scalars
    for tag in ("grad_norm/total", *(f"grad_norm/layer/{name}" for name in LAYERS)):
        assert list(scalars[tag]) == [0, 1, 2, 3], tag
    losses = reference_losses(num_ranks=2 if strategy == "ddp" else 1, num_steps=4, max_norm=1.0)
    assert scalars["train/loss"] == pytest.approx({step: ranks[0] for step, ranks in enumerate(losses)}, rel=1e-5)
    means = [sum(ranks) / len(ranks) for ranks in losses]
    expected = {step: sum(means[: step + 1]) / (step + 1) for step in range(4)}
    assert scalars["loss/mean_100"] == pytest.approx(expected, rel=1e-5)


def _train(rank: int, world_size: int, folder: str, *, strategy: str, num_steps: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from stabilizer.examples import accelerate_gpt
    from tests.accelerate_loops import reset

    reset()
    accelerator = accelerate_gpt.make_accelerator(strategy, run=Path(folder) / strategy)
    if strategy == "fsdp2":
        # What Accelerate does by itself on GPUs.
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = accelerate_gpt.make_sharding()
    norms = GradNormCallback(heatmap_every_n_steps=None)
    losses = accelerate_gpt.train(accelerator, steps=num_steps, callbacks=[norms])
    sharded = [name for name, p in accelerator._models[0].named_parameters() if hasattr(p, "to_local")]
    return {"losses": losses, "totals": norms.norm_history().totals.tolist(), "num_sharded": len(sharded)}


@covers("fsdp2")
def test_sharded_training_is_the_same_training(tmp_path: Path) -> None:
    expected = reference_losses(num_ranks=2, num_steps=3)
    ddp, fsdp2 = (
        run_distributed(_train, str(tmp_path), strategy=strategy, num_steps=3, world_size=2, timeout=100)
        for strategy in ("ddp", "fsdp2")
    )
    for rank in range(2):
        assert ddp[rank]["losses"] == pytest.approx([ranks[rank] for ranks in expected], rel=1e-5)
        assert fsdp2[rank]["losses"] == pytest.approx(ddp[rank]["losses"], rel=1e-5)
        assert fsdp2[rank]["totals"] == pytest.approx(ddp[0]["totals"], rel=1e-4)
        assert ddp[rank]["num_sharded"] == 0
        assert fsdp2[rank]["num_sharded"] > 60, "all parameters of the blocks"


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failing_rank_ends_the_others(failing: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {failing} ended with status 1"):
        run_processes(fail, args=(failing,), num_processes=2)
    assert time.monotonic() - start < 60
    assert "RuntimeError: out of luck" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_know_their_ranks_and_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCELERATE_USE_FSDP": "true", "OMPI_COMM_WORLD_SIZE": "8", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    run_processes(write_environment, args=(str(tmp_path),), num_processes=2)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in found} == {"2"}
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
    assert not {"ACCELERATE_USE_FSDP", "OMPI_COMM_WORLD_SIZE"} & found[0].keys()


def test_a_process_without_a_rank_takes_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_processes(write_environment, args=(str(tmp_path),), num_processes=1, has_ranks=False)
    alone = json.loads((tmp_path / "none").read_text())
    assert not {"WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & alone.keys()
    assert int(alone["OMP_NUM_THREADS"]) >= 1


@pytest.mark.skipif(os.name == "nt", reason="no signals there")
@pytest.mark.parametrize(
    ("number", "send", "status"),
    [
        # A terminal sends the signal to all processes in its foreground.
        pytest.param(signal.SIGINT, os.killpg, None, id="ctrl-c"),
        pytest.param(signal.SIGINT, os.kill, None, id="interrupt of the first process", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, os.kill, 128 + signal.SIGTERM, id="terminate the first process"),
        pytest.param(signal.SIGKILL, os.kill, -signal.SIGKILL, id="kill the first process"),
    ],
)
def test_a_signal_leaves_no_process(
    number: signal.Signals, send: Callable[[int, int], None], status: int | None, tmp_path: Path
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    with Session(["waiting.py", str(tmp_path)], cwd=tmp_path) as session:
        deadline = time.monotonic() + 60
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            assert session.process.poll() is None, session.finish()
            assert time.monotonic() < deadline, "the processes did not start"
            time.sleep(0.1)
        send(session.process.pid, number)
        found, _, err = session.finish(timeout=30)
        assert found != 0
        assert status in (None, found)
        # One that waits was interrupted: the first process, whose command line turns this into a status.
        assert err.count("Traceback") <= (1 if number == signal.SIGINT else 0), err
        session.assert_group_ends()


@pytest.mark.slow
def test_ctrl_c_ends_a_training_without_a_word(tmp_path: Path) -> None:
    arguments = ["demo", "--engine", "accelerate", "--steps", "100000", "--logdir", str(tmp_path / "runs")]
    with Session(["-m", "stabilizer", *arguments], cwd=tmp_path) as session:
        session.wait_for_training(tmp_path)
        os.killpg(session.process.pid, signal.SIGINT)
        status, _, err = session.finish(timeout=30)
        assert status == 130
        assert "Traceback" not in err, err
        session.assert_group_ends()


def test_what_cannot_be_done_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["demo", "--engine", "accelerate", "--strategy", "fsdp2"]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in ("--strategy=fsdp2", "CPU", "--strategy=ddp", "--engine=lightning")), err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["demo", "--engine", "accelerate"]) == 2
    captured = capsys.readouterr()
    assert "LOCAL_RANK=1" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_window_of_one_loss_has_no_deviation_to_tell() -> None:
    losses = LossMeanVarCallback(windows=(2, 4))
    assert loss_line(losses.statistics(), windows=losses.windows, num_steps=1) == ""
    nan = float("nan")
    found = {"mean_2": 1.5, "std_2": 0.5, "slope_4": nan, "slope_error_4": nan}
    assert loss_line(found, windows=(2, 4), num_steps=3) == "all ranks: mean 1.500, std 0.500 (last 2 steps)"
