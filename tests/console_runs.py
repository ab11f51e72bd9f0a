"""Programs whose output tests read, in processes of their own: what a person sees is what is on stdout and stderr."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.environments import ROOT

__all__ = ["ODD", "PROGRAM", "on_a_terminal", "piped", "ranks", "unread"]

#: The kind that the program's own callback tells of at every step from 40 on.
ODD = "odd thing"

#: A loop with a loss and a gradient that are not finite at steps 30 and 33, and a callback that never stops telling.
PROGRAM = """
import torch
import torch.distributed as dist
from stabilizer.callbacks import LayerClipCallback, LossMeanVarCallback, StabilizerCallback, attach
from stabilizer.notices import Notice


class Watch(StabilizerCallback):
    def on_step_end(self, context):
        step = context.step
        if step >= 40:
            text = f"step {step}: odd \\x1b[31m" + "x" * 200
            self.console.tell(Notice(kind="odd thing", step=step, text=text, advice="look", more="odd/log"))


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [LayerClipCallback(), LossMeanVarCallback(), Watch()]
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None) as handle:
        for step in range(50):
            batch = torch.full((1, 2), float("nan") if step in (30, 33) else 1.0)
            loss = model(batch).sum()
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
"""


def _environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONWARNINGS")}
    return {**inherited, "STABILIZER_PREFLIGHT": "0", "OMP_NUM_THREADS": "1", **changes}


def piped(program: str, *options: str, **changes: str) -> tuple[str, str]:
    """Run a program whose output is no terminal.

    Args:
        program: Its code.
        *options: Of Python.
        **changes: Of the environment.

    Returns:
        What is on stdout, and on stderr.
    """
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(**changes),
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def unread(program: str, **changes: str) -> tuple[int, str]:
    """Run a program whose stdout is a pipe that nobody reads any more.

    Args:
        program: Its code.
        **changes: Of the environment.

    Returns:
        How it has ended, and what is on stderr.
    """
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # What is not written at once would be written again at the end.
            env=_environment(PYTHONUNBUFFERED="", **changes),
            timeout=100,
            check=False,
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


def on_a_terminal(program: str, *, seconds: float = 100) -> str:
    """Run a program on a terminal of its own, 80 columns wide.

    Args:
        program: Its code.
        seconds: When it is ended.

    Returns:
        All that the terminal was sent.
    """
    ours, theirs = pty.openpty()
    environment = _environment(TERM="xterm-256color", COLUMNS="80", LINES="24")
    environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    )
    os.close(theirs)
    sent, end = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux says that nobody writes there any more
                break
            if not piece:
                break
            sent += piece
        assert child.wait(timeout=max(end - time.monotonic(), 1)) == 0, sent.decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    return sent.decode()


def ranks(program: str, folder: Path, *, world_size: int = 2, seconds: float = 100) -> list[tuple[str, str]]:
    """Run a program on several processes of one group.

    Args:
        program: Its code; the group is made before it.
        folder: Where they meet.
        world_size: How many there are.
        seconds: When they are ended.

    Returns:
        By rank, what is on stdout, and on stderr.
    """
    children: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world_size):
            begin = (
                "import torch.distributed as dist\n"
                f"dist.init_process_group('gloo', init_method='file://{folder}/meeting', rank={rank}, "
                f"world_size={world_size})\n"
            )
            options: dict[str, Any] = {"cwd": ROOT, "env": _environment(), "text": True}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            code = begin + program + "\ndist.destroy_process_group()\n"
            children.append(subprocess.Popen([sys.executable, "-c", code], **options, **pipes))
        end, found = time.monotonic() + seconds, []
        for child in children:
            said = child.communicate(timeout=max(end - time.monotonic(), 1))
            assert child.returncode == 0, said
            found.append(said)
        return found
    finally:
        for child in children:
            child.kill()
            child.wait()
