"""The short examples, as a user starts them: in an empty folder, looked at from outside."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from stabilizer.examples.starting import read_options
from tests.demo_session import Session
from tests.event_files import Run, read_run

# Some ten seconds each where nothing else runs.
pytestmark = pytest.mark.timeout(300)

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = [
    "lightning_script",
    "lightning_cli",
    "accelerate_loop",
    "transformers_trainer",
    "image_classifier",
    "fsdp2_two_processes",
    "own_callback",
]


def start(name: str, folder: Path, *, steps: int) -> str:
    """Run an example to its end; what it prints."""
    with Session(["-m", f"stabilizer.examples.{name}", "--steps", str(steps)], cwd=folder) as session:
        status, out, err = session.finish()
        assert status == 0, out + err
        session.assert_group_ends()
    logdir = f"stabilizer-{name.replace('_', '-')}"
    assert [path.name for path in folder.iterdir()] == [logdir], "nothing is left beside its own folder"
    assert out.splitlines()[-1] == f"tensorboard --logdir {logdir}"
    return out


def only_run(folder: Path) -> Run:
    [events] = folder.rglob("events.out.tfevents.*")
    return read_run(events.parent)


def test_a_lightning_script_has_the_default_suite(tmp_path: Path) -> None:
    start("lightning_script", tmp_path, steps=12)
    run = only_run(tmp_path)
    assert list(run.scalars["grad_norm/total"]) == list(range(12))
    assert list(run.scalars["grad_norm/layer/model.blocks.3"]) == [0, 10]
    assert list(run.scalars["clip/total_threshold"]) == list(range(12))
    assert "loss/mean_100" in run.scalars
    assert run.layouts >= 1, "the charts under Custom Scalars"
    losses = list(run.scalars["grad_norm/total_after"].values())
    assert all(value <= 1.0 + 1e-5 for value in losses), "clipped at 1 until the threshold is warm"


def test_lightning_cli_takes_what_the_file_says(tmp_path: Path) -> None:
    start("lightning_cli", tmp_path, steps=32)
    folder = tmp_path / "stabilizer-lightning-cli"
    assert "class_path: stabilizer.callbacks.LayerClipCallback" in (folder / "config.yaml").read_text()
    scalars = only_run(tmp_path).scalars
    assert list(scalars["grad_norm/layer/model.head"]) == [0, 5, 10, 15, 20, 25, 30]
    assert math.isfinite(scalars["clip/layer_threshold/model.head"][30]), "warm after the 30 steps of the file"
    assert "clip/layer_threshold/model.position_embedding" not in scalars, "excluded"


def test_an_accelerate_loop_logs_a_point_an_optimizer_step(tmp_path: Path) -> None:
    start("accelerate_loop", tmp_path, steps=12)
    scalars = only_run(tmp_path).scalars
    assert list(scalars["grad_norm/total"]) == list(range(12))
    assert scalars["gns/noise_scale"]
    assert scalars["loss/mean_100"][10] < scalars["loss/mean_100"][0]
    saved = json.loads((tmp_path / "stabilizer-accelerate-loop" / "saved" / "stabilizer.json").read_text())
    assert saved, "the callbacks' states"


def test_the_trainer_s_own_limit_is_taken_over(tmp_path: Path) -> None:
    out = start("transformers_trainer", tmp_path, steps=12)
    assert "max_grad_norm=1.0" in " ".join(out.split())
    scalars = only_run(tmp_path).scalars
    assert list(scalars["grad_norm/total"]) == list(range(1, 13)), "the trainer's count"
    assert max(scalars["clip/total_threshold"].values()) <= 1.0
    assert max(scalars["grad_norm/total"].values()) > 1.0 > max(scalars["grad_norm/total_after"].values()) - 1e-5
    assert "train/loss" in scalars


def test_the_broken_image_is_named_by_its_row(tmp_path: Path) -> None:
    from stabilizer.examples.image_classifier import BAD_ROW, BAD_STEP, batches

    out = start("image_classifier", tmp_path, steps=73)
    # What is broken, from the data and not from what the example says of it.
    data = batches()
    images = [next(data)[0].amax(dim=(1, 2, 3)) for _ in range(73)]
    broken = [(step, row) for step, rows in enumerate(images) for row in (rows > 1).nonzero().flatten().tolist()]
    assert broken == [(BAD_STEP, BAD_ROW)]
    assert f"The broken image was row {BAD_ROW} of step {BAD_STEP}; found: [{BAD_ROW}]" in out.splitlines()
    folder = tmp_path / "stabilizer-image-classifier"
    [incident] = (folder / "incidents").iterdir()
    found = json.loads((incident / "incident.json").read_text())
    assert (found["step"], found["type"], found["reproducible"]) == (BAD_STEP, "D", True)
    assert [token["row"] for token in found["tokens"]] == [BAD_ROW]
    assert found["counterfactual_norm"] < found["threshold"] < found["observed_norm"] / 3
    assert read_run(folder).scalars["gradloc/incidents"][BAD_STEP] == 1.0


def test_sharded_norms_are_those_of_the_whole_layers(tmp_path: Path) -> None:
    from stabilizer.examples.gpt import GPT
    from stabilizer.examples.recipe import make_loader, next_byte_loss

    out = start("fsdp2_two_processes", tmp_path, steps=3)
    scalars = only_run(tmp_path).scalars
    torch.manual_seed(0)
    model = GPT(context=64, num_layers=4, dim=48)
    batches = [next(iter(make_loader(context=64, batch_size=8, seed=0, rank=rank))) for rank in range(2)]
    (sum((next_byte_loss(model, batch) for batch in batches), torch.zeros(())) / 2).backward()

    def norm_of(module: nn.Module) -> float:
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        return float(torch.stack([grad.norm() for grad in grads]).norm())

    assert scalars["grad_norm/total"][0] == pytest.approx(norm_of(model), rel=1e-4)
    for layer in ("token_embedding", "blocks.0", "blocks.3", "head"):
        assert scalars[f"grad_norm/layer/{layer}"][0] == pytest.approx(norm_of(model.get_submodule(layer)), rel=1e-4)
    assert list(scalars["grad_norm/total"]) == [0, 1, 2]
    held = re.search(r"Rank 0 holds ([\d,]+) of ([\d,]+) parameters", out)
    assert held is not None
    local, whole = (int(number.replace(",", "")) for number in held.groups())
    assert whole == sum(parameter.numel() for parameter in model.parameters())
    assert 0.4 < local / whole < 0.6


def test_the_own_callback_shrinks_the_embeddings_and_nothing_else(tmp_path: Path) -> None:
    start("own_callback", tmp_path, steps=4)
    scalars = only_run(tmp_path).scalars
    for layer in ("token_embedding", "position_embedding", "blocks.2", "head"):
        factor = 0.1 if layer.endswith("embedding") else 1.0
        before, after = (scalars[f"grad_norm/{kind}/{layer}"] for kind in ("layer", "layer_after"))
        assert after == pytest.approx({step: factor * value for step, value in before.items()}, rel=1e-5)
    for step, share in scalars["monitor/embedding_share"].items():
        squares = [scalars[f"grad_norm/layer/{one}_embedding"][step] ** 2 for one in ("token", "position")]
        assert share == pytest.approx(sum(squares) / scalars["grad_norm/total"][step] ** 2, rel=1e-4)
    assert len(scalars["monitor/embedding_share"]) == 4


BLOCKED = """
import runpy, sys
for name in sys.argv[2:]:
    sys.modules[name] = None
runpy.run_module(f"stabilizer.examples.{sys.argv[1]}", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "extra", "missing"),
    [
        ("lightning_script", "lightning", ["lightning", "pytorch_lightning"]),
        pytest.param("lightning_cli", "lightning", ["lightning", "pytorch_lightning"], marks=pytest.mark.slow),
        pytest.param("accelerate_loop", "accelerate", ["accelerate"], marks=pytest.mark.slow),
        # Not transformers: torchmetrics imports it where its metadata are, and these cannot be hidden here.
    ],
)
def test_without_its_package_an_example_says_what_to_install(
    name: str, extra: str, missing: list[str], tmp_path: Path
) -> None:
    with Session(["-c", BLOCKED, name, *missing], cwd=tmp_path) as session:
        status, out, err = session.finish()
    assert (status, out) == (1, "")
    assert err == f"{missing[0]} is missing: pip install 'torch-stabilizer[{extra}]'\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "many"], ["--stepz", "3"]])
def test_bad_options_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_options(arguments, name="own_callback", text="", steps=60)
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_says_how_it_is_run_and_what_to_look_at(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 120
    told = ast.get_docstring(ast.parse(text)) or ""
    assert f"python -m stabilizer.examples.{name}\n" in told
    assert "look at afterwards" in " ".join(told.split())
    assert f"tensorboard --logdir stabilizer-{name.replace('_', '-')}" in " ".join(told.split())
    assert f"[`{name}`]({name}.py)" in (FOLDER / "README.md").read_text()


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text())
    assert set(listed) <= {path.name for path in FOLDER.glob("*.py")}
    programs = {path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs - {"arithmetic.py"} <= set(listed)
