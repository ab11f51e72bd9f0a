"""`stabilizer demo --fault`: what is broken is named, and told to the reader last; without it nothing is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stabilizer.examples.planting import plant, planted_row
from tests.demo_session import Session, noise
from tests.event_files import Run, read_run

# Some ten seconds each where nothing else runs.
pytestmark = pytest.mark.timeout(300)


def run_demo(folder: Path, *arguments: str) -> tuple[list[str], str, Run, Path]:
    """Lines of standard output, standard error, what was logged, and where."""
    words = ["demo", "--size", "tiny", "--logdir", "runs", *arguments]
    with Session(["-m", "stabilizer", *words], cwd=folder) as session:
        status, out, err = session.finish()
        assert status == 0, out + err
        session.assert_group_ends()
    [events] = (folder / "runs").rglob("events.out.tfevents.*")
    return out.replace("\r", "\n").splitlines(), err, read_run(events.parent), events.parent


def incident_of(run: Path, step: int) -> dict[str, Any]:
    [folder] = (run / "incidents").iterdir()
    assert folder.name == f"step_{step}"
    found: dict[str, Any] = json.loads((folder / "incident.json").read_text())
    return found


def check_told_last(lines: list[str], err: str, text: str) -> None:
    """The truth is the last line and stands nowhere else, and the command for TensorBoard before it."""
    assert lines[-1] == f"Broken on purpose: {text}"
    assert lines[-3] == "tensorboard --logdir runs"
    told = "\n".join([*lines[:-1], err])
    assert "times 10000" not in told
    assert "token_loss" not in told
    assert "layer_spike" not in told
    assert "drill:" not in told


@pytest.mark.parametrize("engine", ["lightning", "accelerate"])
def test_the_token_is_named_with_its_text(engine: str, tmp_path: Path) -> None:
    arguments = ["--engine", engine, "--fault", "token", "--fault-step", "53", "--steps", "56"]
    lines, err, run, folder = run_demo(tmp_path, *arguments)
    row = planted_row(step=53, rank=1, context=64)
    place = next(place for place in range(32, 64) if chr(row[1:][place]).isalpha())
    letter = chr(row[1 + place])

    check_told_last(lines, err, plant("token", step=53, rank=1, context=64).text)
    assert f"the loss of token {letter!r} times 10000, at step 53: rank 1, micro-batch 0, row 5" in lines[-1]
    found = incident_of(folder, 53)
    [token] = found["tokens"]
    where = (token["rank"], token["micro_batch"], token["row"], token["position"])
    assert where == (1, 0, 5, place)
    assert (token["text"], found["type"], found["reproducible"]) == (letter, "D", True)
    assert f">>>{letter}<<<" in token["context"]
    assert found["counterfactual_norm"] < found["threshold"] < found["observed_norm"] / 3
    assert run.scalars["gradloc/incidents"][53] == 1.0
    # What makes the pages worth a look.
    groups = {tag.partition("/")[0] for tag in run.scalars}
    assert {"grad_norm", "clip", "loss", "gns", "finding", "warning", "gradloc", "drill"} <= groups


@pytest.mark.slow
def test_a_layer_s_gradient_is_named_by_its_layer(tmp_path: Path) -> None:
    lines, err, run, folder = run_demo(tmp_path, "--fault", "layer")
    check_told_last(lines, err, "the gradient of block 3 on rank 1 times 1000, at step 120")
    found = incident_of(folder, 120)
    assert found["type"] == "B", "some layers only"
    assert found["tokens"] == []
    assert "model.blocks.3" in " ".join(lines)
    assert min(run.scalars["clip/layer_coefficient/model.blocks.3"].values()) < 0.02
    assert min(run.scalars["clip/layer_coefficient/model.head"].values()) > 0.3, "the others are left alone"


@pytest.mark.slow
def test_a_nan_is_named_by_layer_and_rank_and_the_step_is_skipped(tmp_path: Path) -> None:
    lines, err, run, folder = run_demo(tmp_path, "--fault", "nan")
    check_told_last(lines, err, "one NaN in the gradient of block 3 on rank 1, at step 120")
    text = " ".join(" ".join(lines).split())
    assert "rank 1" in text
    assert "model.blocks.3" in text
    assert run.scalars["skip/count"][199] == 1.0
    assert (folder / "numerics" / "step_120").is_dir()


@pytest.mark.slow
def test_a_flipped_bit_is_laid_to_the_machine(tmp_path: Path) -> None:
    lines, err, _, folder = run_demo(tmp_path, "--fault", "bit")
    check_told_last(lines, err, plant("bit", step=120, rank=1).text)
    found = incident_of(folder, 120)
    assert (found["type"], found["reproducible"]) == ("T", False)
    assert "points to the machine" in " ".join(" ".join(lines + err.splitlines()).split())


@pytest.mark.slow
def test_a_learning_rate_that_jumps_is_told(tmp_path: Path) -> None:
    lines, err, run, _ = run_demo(tmp_path, "--fault", "rate")
    check_told_last(lines, err, "the learning rate times 100, at steps 120 to 122")
    assert "learning rate jump" in " ".join(" ".join(lines + err.splitlines()).split()).lower()
    losses = run.scalars["train/loss"]
    assert max(losses[step] for step in range(121, 131)) > max(losses[step] for step in range(110, 121)) + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "single"])
def test_without_a_fault_nothing_is_said(strategy: str, tmp_path: Path) -> None:
    lines, err, run, folder = run_demo(tmp_path, "--strategy", strategy)
    assert noise(err) == []
    assert "spike" not in " ".join(lines).lower()
    assert lines[-1] == "tensorboard --logdir runs"
    assert not (folder / "incidents").exists()
    assert not (folder / "numerics").exists()
    for tag, points in run.scalars.items():
        if tag.startswith(("alarm/", "finding/", "warning/", "gradloc/incidents", "skip/count", "drill/")):
            assert max(points.values()) == 0.0, tag
    assert list(run.scalars["grad_norm/total"]) == list(range(200))


def test_the_place_is_the_same_each_time_and_on_the_rank_s_own_text() -> None:
    first, again, other = (plant("token", step=60, rank=rank) for rank in (1, 1, 0))
    assert first == again
    assert first.fault.rank == 1
    assert other.text != first.text
    assert plant("rate", step=60, rank=1).fault.num_steps == 3
