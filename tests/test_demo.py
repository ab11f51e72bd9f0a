"""`stabilizer demo`, as a user starts it: in processes of its own, looked at from outside."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stabilizer.cli import UsageError, demo, main, tensorboard_command

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    "model.token_embedding",
    "model.position_embedding",
    *(f"model.blocks.{number}" for number in range(6)),
    "model.norm",
    "model.head",
]
CONFIG = """
steps: 4
grad_norm:
  layer_every_n_steps: 1
  heatmap_every_n_steps: null
"""


class Session:
    """A program with all its children in one process group, which ends with the test."""

    def __init__(self, command: Sequence[str], *, cwd: Path) -> None:
        # Python's default filters: what a user would see.
        hidden = {"PYTHONWARNINGS", "STABILIZER_DISABLE"}
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        env.update(OMP_NUM_THREADS="1", COLUMNS="200")
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def finish(self, timeout: float = 100.0) -> tuple[int, str, str]:
        """Wait for the end: status, standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            pytest.fail(f"not done after {timeout} s\n{out}\n{err}")
        return self.process.returncode, out, err

    def is_alive(self) -> bool:
        """Whether any process of the group is left."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """End the whole group."""
        if self.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    started: list[Session] = []
    yield started
    for session in started:
        session.kill()
        session.process.communicate()


def assert_group_ends(session: Session, *, within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while session.is_alive():
        assert time.monotonic() < deadline, "a process of the demo outlived it"
        time.sleep(0.1)


def read_scalars(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list(folder.rglob("events.out.tfevents.*"))
    assert len(files) == 1, f"one rank writes: {files}"
    events = EventAccumulator(str(files[0].parent)).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


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
def test_four_steps_log_every_layer_and_say_how_to_see_them(
    strategy: str, program: list[str], tmp_path: Path, sessions: list[Session]
) -> None:
    # What pip writes for a console script.
    script = "import sys\nfrom stabilizer.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "demo.yaml").write_text(CONFIG)
    # Long and with blanks: it must be quoted, and never wrapped.
    logdir = tmp_path / ("runs of " + "a long name " * 12)
    arguments = ["demo", "--config", "demo.yaml", "--strategy", strategy, "--logdir", str(logdir)]

    session = Session([sys.executable, *program, *arguments], cwd=tmp_path)
    sessions.append(session)
    status, out, err = session.finish()
    assert status == 0, out + err
    assert_group_ends(session)

    lines = out.replace("\r", "\n").splitlines()
    assert f"tensorboard --logdir {shlex.quote(str(logdir))}" in lines
    assert [line for line in lines if line.startswith("loss ")], out
    for layer in LAYERS:
        assert len([line for line in lines if re.search(rf"\s{re.escape(layer)}\s", line)]) == 1, f"{layer} once: {out}"

    steps = read_scalars(logdir)
    assert steps["grad_norm/total"] == [0, 1, 2, 3]
    layers = {tag.removeprefix("grad_norm/layer/") for tag in steps if tag.startswith("grad_norm/layer/")}
    assert layers == set(LAYERS)
    assert all(steps[f"grad_norm/layer/{name}"] == [0, 1, 2, 3] for name in LAYERS)
    assert steps["train/loss"] == [0, 1, 2, 3]

    # The progress bar is all that a newcomer sees there.
    noise = [line for line in err.replace("\r", "\n").splitlines() if line.strip() and "it/s" not in line]
    assert noise == []


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
def test_an_exception_on_one_rank_leaves_no_process(rank: int, tmp_path: Path, sessions: list[Session]) -> None:
    (tmp_path / "failing.py").write_text(FAILING_RANK)
    session = Session([sys.executable, "failing.py", str(rank)], cwd=tmp_path)
    sessions.append(session)
    status, out, err = session.finish()
    assert status != 0, out
    assert "out of luck" in err
    assert_group_ends(session)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        # A terminal sends the signal to all processes in its foreground.
        pytest.param(signal.SIGINT, os.killpg, id="ctrl-c"),
        pytest.param(signal.SIGINT, os.kill, id="interrupt of rank 0", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, os.kill, id="terminate rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_process(
    number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path, sessions: list[Session]
) -> None:
    arguments = ["demo", "--steps", "100000", "--logdir", str(tmp_path / "runs")]
    session = Session([sys.executable, "-m", "stabilizer", *arguments], cwd=tmp_path)
    sessions.append(session)
    deadline = time.monotonic() + 90
    while not any(file.stat().st_size > 5_000 for file in tmp_path.rglob("events.out.tfevents.*")):
        assert session.process.poll() is None, session.finish()
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.2)
    send(session.process.pid, number)
    status, _, err = session.finish(timeout=30)
    assert status != 0
    assert "Traceback" not in err, err
    assert_group_ends(session)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], ["steps=0", "at least 1"]),
        (["--steps", "many"], ["steps", "many"]),
        (["--strategy", "fsdp3"], ["strategy", "fsdp3", "fsdp2"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--config", "unknown.yaml"], ["grad_norm.layer_evry"]),
        (["--config", "broken.yaml"], ["config"]),
        (["--grad_norm.every_n_steps", "0"], ["every_n_steps=0"]),
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


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from stabilizer.callbacks import GradNormCallback

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'torch-stabilizer\[lightning\]'"):
        demo(GradNormCallback())


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
