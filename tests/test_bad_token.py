"""The example that plants a bad token: what it finds, prints, writes and logs."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stabilizer.cli import main as stabilizer
from stabilizer.examples.bad_token import Plant, main, micro_batches
from stabilizer.localize.incident import Incident
from tests.event_files import read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad token") / "two words"


@pytest.fixture(scope="module")
def found(folder: Path) -> tuple[list[Incident], str]:
    """One run as a user makes it, and what it prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        incidents = main(["--logdir", str(folder), "--save-batch"])
    return incidents, stream.getvalue()


def test_the_token_is_named_with_its_text(found: tuple[list[Incident], str]) -> None:
    [incident] = found[0]
    plant = Plant()
    [token] = incident.tokens
    assert incident.step == plant.step
    assert (token.micro_batch, token.row, token.position) == (plant.micro_batch, plant.row, plant.position)
    assert (incident.type, incident.reproducible, incident.action) == ("D", True, "report")
    assert incident.num_passes <= 3
    assert incident.num_forwards == 1
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < incident.threshold < incident.observed_norm / 3
    batches = micro_batches(plant)
    for _ in range(plant.step):
        next(batches)
    label = int(next(batches)[plant.micro_batch]["labels"][plant.row, plant.position])
    assert token.token_id == label
    assert token.text == bytes([label]).decode(errors="replace")
    assert token.context is not None
    assert f">>>{token.text}<<<" in token.context


def test_what_is_printed_leads_to_the_incident(found: tuple[list[Incident], str], folder: Path) -> None:
    output = found[1]
    place = folder / "incidents" / "step_70"
    assert "Gradient spike at step 70: D, data" in output
    lines = output.splitlines()
    assert f"stabilizer replay {shlex.quote(str(place))}" in lines
    assert lines[-1] == f"tensorboard --logdir {shlex.quote(str(folder))}"
    written = json.loads((place / "incident.json").read_text())
    assert Incident.from_json(json.dumps(written)) == found[0][0]


def test_tensorboard_has_text_and_pictures(found: tuple[list[Incident], str], folder: Path) -> None:
    run = read_run(folder)
    assert run.scalars["gradloc/incidents"] == {70: 1.0}
    assert run.scalars["gradloc/passes"] == {70: float(found[0][0].num_passes)}
    assert {"gradloc/card", "gradloc/norm_history", "gradloc/top_tokens"} <= run.pictures.keys()
    events: Any = EventAccumulator(str(folder))
    events.Reload()
    [text] = events.Tensors("gradloc/incident/text_summary")
    assert text.step == 70
    [content] = text.tensor_proto.string_val
    assert content.decode().startswith("### Gradient spike at step 70: D, data\n")


def test_the_command_shows_it_again(
    found: tuple[list[Incident], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stabilizer(["replay", str(folder / "incidents" / "step_70")]) == 0
    output = capsys.readouterr().out
    assert "Gradient spike at step 70" in output
    assert "weights    (4, 64) float32" in output


def test_a_healthy_run_has_no_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--logdir", str(tmp_path), "--weight", "1"]) == []
    assert "nothing was searched" in capsys.readouterr().out
    assert not (tmp_path / "incidents").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone"], ["gone", "no incident"]),
        ([], ["folder"]),
        (["{folder}"], ["give one of the folders in it: step_70"]),
        (["{folder}/step_70", "--model", "nowhere:model"], ["nowhere"]),
        (["{folder}/step_70", "--modle", "x"], ["--modle"]),
    ],
    ids=["gone", "nothing", "all incidents", "no such model", "misspelt"],
)
def test_a_mistake_of_the_command_is_one_line(
    arguments: list[str],
    words: list[str],
    found: tuple[list[Incident], str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(folder=folder / "incidents") for argument in arguments]
    capsys.readouterr()
    assert stabilizer(["replay", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stabilizer: error: ")
    assert error.count("\n") == 1, error
    assert all(word in error for word in words), error
