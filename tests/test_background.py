"""What no step waits for: order, limits, faults, and the end of a program."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from stabilizer.background import SHARED, Background
from stabilizer.callbacks import GradNormCallback, StabilizerCallback, StepContext, attach, grad_norm
from tests.event_files import read_run
from tests.tiny_loops import loss_at, unit


def test_jobs_are_done_one_after_another_in_their_order() -> None:
    background, done, threads = Background(), [], set()

    def job(number: int) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.01 if number % 2 else 0)
        done.append(number)

    for number in range(20):
        assert background.add("a job", lambda number=number: job(number), failed=_never)
    assert background.drain(seconds=20)
    assert done == list(range(20))
    assert threading.get_ident() not in threads


def test_a_thread_is_there_only_while_there_are_jobs() -> None:
    background = Background()
    background.add("a job", lambda: time.sleep(0.01), failed=_never)
    assert background.drain(seconds=20)
    deadline = time.monotonic() + 20
    while any(thread.name == "stabilizer-background" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    background.add("another", lambda: None, failed=_never)
    assert background.drain(seconds=20)


def test_too_many_jobs_are_left_out_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    background, gate, done = Background(max_jobs=4, max_large=2), threading.Event(), []
    background.add("first", gate.wait, failed=_never, is_large=True)
    with caplog.at_level(logging.WARNING, logger="stabilizer"):
        taken = [
            background.add(f"picture {number}", lambda n=number: done.append(n), failed=_never, is_large=True)
            for number in range(3)
        ]
        taken += [background.add(f"text {n}", lambda n=n: done.append(f"t{n}"), failed=_never) for n in range(4)]
    gate.set()
    assert background.drain(seconds=20)
    assert taken == [True, False, False, True, True, False, False]
    assert done == [0, "t0", "t1"]
    assert len(caplog.records) == 1
    assert "picture 1 is left out" in caplog.text


def test_a_job_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    background, errors, done = Background(), [], []
    background.add("bad", lambda: 1 / 0, failed=errors.append)
    background.add("worse", lambda: 1 / 0, failed=lambda error: 1 / 0)
    background.add("good", lambda: done.append(1), failed=_never)
    assert background.drain(seconds=20)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert done == [1]
    assert "worse failed" in caplog.text


def test_waiting_has_an_end() -> None:
    background, gate = Background(), threading.Event()
    background.add("hangs", gate.wait, failed=_never)
    start = time.monotonic()
    assert not background.drain(seconds=0.2)
    assert 0.1 < time.monotonic() - start < 10
    gate.set()
    assert _is_drained(background)


def test_no_job_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    background, errors, done = Background(), [], []
    background.add("a logger that gives up", lambda: sys.exit(3), failed=errors.append)
    background.add("another", lambda: sys.exit(3), failed=lambda error: sys.exit(4))
    background.add("good", lambda: done.append(1), failed=_never)
    assert background.drain(seconds=20)
    assert [str(error) for error in errors] == ["a logger that gives up has raised SystemExit(3)"]
    assert isinstance(errors[0].__cause__, SystemExit)
    assert done == [1]
    assert "another failed" in caplog.text


def test_a_long_wait_is_explained_and_what_hangs_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    background, gates = Background(), [threading.Event(), threading.Event()]
    background.add("a quick one", lambda: None, failed=_never)
    background.drain(seconds=20)
    assert caplog.messages == []
    background.add("the first", gates[0].wait, failed=_never)
    background.add("the second", gates[1].wait, failed=_never)
    assert not background.drain(seconds=2.5)
    waiting, left = caplog.messages
    assert waiting == "waiting for 2 pictures and texts to be written, at most 2 s"
    assert left.startswith("2 pictures and texts were not written: the first is not done after")
    start = time.monotonic()
    assert not background.drain(seconds=30)
    assert not background.drain()
    assert time.monotonic() - start < 10
    assert len(caplog.messages) == 2
    # Once it goes on, what comes next is waited for again.
    gates[0].set()
    threading.Timer(0.5, gates[1].set).start()
    assert _is_drained(background)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("limits", [{"max_jobs": 0}, {"max_large": 0}])
def test_limits_under_one_are_errors(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        Background(**limits)


@pytest.mark.parametrize(("job", "expected"), [("0.5", ["done"]), ("3600", [])])
@pytest.mark.timeout(120)
def test_the_end_of_a_program(job: str, expected: list[str]) -> None:
    """What is under way is finished, and what hangs keeps no program alive."""
    program = (
        "import time; import stabilizer.background as b\n"
        "import atexit; atexit.unregister(b.SHARED.drain); atexit.register(b.SHARED.drain, seconds=5)\n"
        f"b.SHARED.add('a job', lambda: (time.sleep({job}), print('done', flush=True)), failed=print)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == expected, done.stderr


class Slow:
    """A writer whose pictures take long, until a gate opens."""

    def __init__(self, *, fails: bool = False) -> None:
        self.gate, self.written, self.fails = threading.Event(), [], fails

    def add_scalar(self, *_: Any) -> None:
        """Take a number."""

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Take a picture."""
        if self.fails:
            raise OSError("no space left")
        self.gate.wait(timeout=60)
        self.written.append((tag, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Take a text."""
        self.gate.wait(timeout=60)
        self.written.append((tag, step))


class Wordy(StabilizerCallback):
    """Writes a text at every step."""

    def on_gradients(self, context: StepContext) -> None:
        """Write."""
        context.write_text("wordy/text", f"step {context.step}")


def _train(log: Any, callbacks: list[StabilizerCallback], *, num_steps: int, before_end: Any = None) -> None:
    model, optimizer = unit()
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log):
        for _ in range(num_steps):
            loss_at(model, 3.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        if before_end is not None:
            before_end()


@pytest.mark.timeout(120)
def test_no_step_waits_for_a_logger_and_the_end_writes_everything() -> None:
    """The writer takes nothing before the last step is done: a step that waited for it would wait for ever."""
    slow = Slow()
    callbacks = [GradNormCallback(heatmap_every_n_steps=2), Wordy()]
    _train(slow, callbacks, num_steps=7, before_end=slow.gate.set)
    pictures = [step for tag, step in slow.written if tag == "grad_norm/heatmap"]
    assert pictures == [2, 4, 6]
    assert [step for tag, step in slow.written if tag == "wordy/text"] == list(range(7))


@pytest.mark.timeout(120)
def test_a_run_that_breaks_off_does_not_wait_long_and_the_next_one_not_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    hung, start = Slow(), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            _train(hung, [Wordy()], num_steps=2, before_end=interrupt)
        first = time.monotonic() - start
        _train(hung, [Wordy()], num_steps=2)
        assert 4 < first < 20
        assert time.monotonic() - start - first < 10
        told = [message for message in caplog.messages if "pictures and texts" in message]
        assert [message.partition(" pictures")[0] for message in told] == ["waiting for 4", "4"]
    finally:
        hung.gate.set()
        assert _is_drained(SHARED)


@pytest.mark.parametrize("strict", [False, True])
def test_a_picture_that_cannot_be_written_is_told_once(caplog: pytest.LogCaptureFixture, strict: bool) -> None:
    slow = Slow(fails=True)
    slow.gate.set()
    callbacks = [GradNormCallback(heatmap_every_n_steps=1, strict=strict)]
    if strict:
        with pytest.raises(OSError, match="no space left"):
            _train(slow, callbacks, num_steps=5)
        return
    _train(slow, callbacks, num_steps=5)
    told = [record for record in caplog.records if "picture grad_norm/heatmap failed" in record.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info is not None
    assert not callbacks[0].has_failed


def test_the_step_s_thread_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    threads, draw = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **kwargs: (threads.append(threading.get_ident()), draw(self, *args, **kwargs)),
    )
    with SummaryWriter(str(tmp_path)) as writer:
        _train(writer, [GradNormCallback(heatmap_every_n_steps=3)], num_steps=5)
    assert read_run(tmp_path).pictures == {"grad_norm/heatmap": [3, 4]}
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_figures_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What refers to itself would stay until Python looks for that, with all its pixels."""
    figures: list[Any] = []
    draw = grad_norm.norm_heatmap

    def keep(*args: Any, **options: Any) -> Any:
        figures.append(draw(*args, **options))
        return figures[-1]

    monkeypatch.setattr(grad_norm, "norm_heatmap", keep)
    with SummaryWriter(str(tmp_path)) as writer:
        _train(writer, [GradNormCallback(heatmap_every_n_steps=1)], num_steps=3)
    assert len(figures) == 2
    assert all(figure.axes == [] and figure.canvas is None for figure in figures)


def _is_drained(background: Background) -> bool:
    """Whether it gets done what it was thought to hang on, within some time."""
    end = time.monotonic() + 20
    while not background.drain(seconds=20) and time.monotonic() < end:
        time.sleep(0.01)
    return background.drain(seconds=0)


def _never(error: Exception) -> None:
    raise AssertionError(error)
