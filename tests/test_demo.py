"""`stabilizer demo`, as a user starts it: in processes of its own, looked at from outside."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from stabilizer.cli import main
from stabilizer.examples.demo import DemoError, demo, tensorboard_command
from tests.demo_session import CONFIG, LAYERS, Session, noise, reference_losses
from tests.event_files import read_run

# Some ten seconds each where nothing else runs.
pytestmark = pytest.mark.timeout(300)


def covers(strategy: str) -> pytest.MarkDecorator:
    return pytest.mark.covers(feature="demo", strategy=strategy, host="lightning")


@pytest.mark.parametrize(
    ("strategy", "program"),
    [
        pytest.param("fsdp2", ["-m", "stabilizer"], marks=covers("fsdp2")),
        pytest.param("ddp", ["script.py"], marks=covers("ddp")),
        pytest.param("single", ["-m", "stabilizer"], marks=covers("single")),
    ],
)
def test_four_steps_log_every_layer_and_say_how_to_see_them(strategy: str, program: list[str], tmp_path: Path) -> None:
    # What pip writes for a console script.
    script = "import sys\nfrom stabilizer.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "demo.yaml").write_text(CONFIG)
    # Long and with blanks: it must be quoted, and never wrapped.
    logdir = tmp_path / ("runs of " + "a long name " * 12)
    arguments = ["demo", "--config", "demo.yaml", "--strategy", strategy, "--logdir", str(logdir)]

    with Session([*program, *arguments], cwd=tmp_path) as session:
        status, out, err = session.finish()
        assert status == 0, out + err
        session.assert_group_ends()

    lines = out.replace("\r", "\n").splitlines()
    assert f"tensorboard --logdir {shlex.quote(str(logdir))}" in lines
    assert [line for line in lines if line.startswith("loss ")], out
    assert [line for line in lines if line.startswith("all ranks: mean ")], out
    layers = [f"model.{name}" for name in LAYERS]
    for layer in layers:
        assert len([line for line in lines if re.search(rf"\s{re.escape(layer)}\s", line)]) == 1, f"{layer} once: {out}"

    assert len(list(logdir.rglob("events.out.tfevents.*"))) == 1, "one rank writes"
    scalars = read_run(logdir / strategy / "version_0").scalars
    assert {tag.removeprefix("grad_norm/layer/") for tag in scalars if "/layer/" in tag} == set(layers)
    for tag in ("grad_norm/total", "loss/mean_100", *(f"grad_norm/layer/{name}" for name in layers)):
        assert list(scalars[tag]) == [0, 1, 2, 3], tag
    # The clip of the suite is not warm yet: its threshold is 1.
    losses = reference_losses(num_ranks=1 if strategy == "single" else 2, num_steps=4, max_norm=1.0)
    assert scalars["train/loss"] == pytest.approx({step: ranks[0] for step, ranks in enumerate(losses)}, rel=1e-5)

    # The progress bar is all that a newcomer sees there.
    assert noise(err) == []


FAILING_RANK = """
import sys
from pathlib import Path
from stabilizer.examples.lightning_gpt import LightningGPT, make_trainer, train

class Failing(LightningGPT):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == int(sys.argv[1]):
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    train(make_trainer("fsdp2", steps=1000, logdir=Path("runs")), Failing(steps=1000))
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_exception_on_one_rank_leaves_no_process(rank: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_RANK)
    with Session(["failing.py", str(rank)], cwd=tmp_path) as session:
        status, out, err = session.finish()
        assert status != 0, out
        assert "out of luck" in err
        session.assert_group_ends()


@pytest.mark.parametrize(
    ("number", "send"),
    [
        # A terminal sends the signal to all processes in its foreground.
        pytest.param(signal.SIGINT, os.killpg, id="ctrl-c"),
        pytest.param(signal.SIGINT, os.kill, id="interrupt of rank 0", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, os.kill, id="terminate rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_process(number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path) -> None:
    arguments = ["demo", "--steps", "100000", "--logdir", str(tmp_path / "runs")]
    with Session(["-m", "stabilizer", *arguments], cwd=tmp_path) as session:
        session.wait_for_training(tmp_path)
        send(session.process.pid, number)
        status, _, err = session.finish(timeout=30)
        assert status != 0
        assert "Traceback" not in err, err
        session.assert_group_ends()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], ["steps=0", "at least 1"]),
        (["--steps", "many"], ["steps", "many"]),
        (["--strategy", "fsdp3"], ["strategy", "fsdp3", "fsdp2"]),
        (["--engine", "keras"], ["engine", "keras", "accelerate"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--config", "unknown.yaml"], ["grad_norm.layer_evry"]),
        (["--config", "broken.yaml"], ["config"]),
        (["--grad_norm.every_n_steps", "0"], ["every_n_steps=0"]),
        (["--loss_mean_var.every_n_steps", "0"], ["every_n_steps=0"]),
        (["--fault", "toke"], ["fault", "toke", "token"]),
        (["--fault", "token", "--fault-step", "200"], ["--fault-step=200", "0 to 199"]),
        (["--fault", "token", "--steps", "50"], ["--fault-step=120", "--steps=50", "0 to 49"]),
        (["--size", "huge"], ["size", "huge", "tiny"]),
        (["--logdir", "broken.yaml"], ["broken.yaml", "file"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unknown.yaml").write_text("grad_norm:\n  layer_evry: 3\n")
    (tmp_path / "broken.yaml").write_text("grad_norm: [3\n")
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stabilizer: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize("engine", ["lightning", "accelerate"])
def test_without_its_engine_the_error_names_the_extra(
    engine: Literal["lightning", "accelerate"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DemoError, match=rf"pip install 'torch-stabilizer\[{engine}\]'"):
        demo(GradNormCallback(), loss_mean_var=LossMeanVarCallback(), engine=engine)


def test_the_program_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--version"], ["stabilizer"]), (["--help"], ["demo"]), ([], ["demo"])):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert all(word in capsys.readouterr().out for word in words)


@pytest.mark.skipif(os.name == "nt", reason="another shell")
@pytest.mark.parametrize("folder", ["plain", "two words", "a'quote", "$HOME"])
def test_the_tensorboard_line_survives_a_shell(folder: str) -> None:
    line = tensorboard_command(Path(folder))
    printed = line.replace("tensorboard", "printf %s%s", 1)
    echoed = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=True)
    assert echoed.stdout == f"--logdir{folder}"
