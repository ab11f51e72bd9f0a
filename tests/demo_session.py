"""Programs as a user starts them, looked at from outside, and what the demo's numbers must be.

with Session(["demo", "--steps", "4"], cwd=folder) as session:
    status, out, err = session.finish()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pytest

__all__ = ["CONFIG", "LAYERS", "Session", "noise", "reference_losses"]

#: Four steps, everything logged at each.
CONFIG = """
steps: 4
grad_norm:
  layer_every_n_steps: 1
  heatmap_every_n_steps: null
loss_mean_var:
  every_n_steps: 1
"""
ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["token_embedding", "position_embedding", *(f"blocks.{number}" for number in range(6)), "norm", "head"]


class Session:
    """A Python program with all its children in one process group, which ends with the `with` block.

    Args:
        arguments: Of Python.
        cwd: Where it runs.
    """

    def __init__(self, arguments: Sequence[str], *, cwd: Path) -> None:
        # Python's default filters: what a user would see.
        hidden = {"PYTHONWARNINGS", "STABILIZER_DISABLE", "LOCAL_RANK"}
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        env.update(OMP_NUM_THREADS="1", COLUMNS="200")
        with _interrupts():
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )

    def finish(self, timeout: float = 240.0) -> tuple[int, str, str]:
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

    def assert_group_ends(self, *, within: float = 20.0) -> None:
        """Fail if a process of the group is left after some seconds."""
        deadline = time.monotonic() + within
        while self.is_alive():
            assert time.monotonic() < deadline, "a process outlived the program"
            time.sleep(0.1)

    def wait_for_training(self, folder: Path, *, within: float = 90.0) -> None:
        """Return when event files in a folder hold some steps."""
        deadline = time.monotonic() + within
        while not any(file.stat().st_size > 5_000 for file in folder.rglob("events.out.tfevents.*")):
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, "training did not start"
            time.sleep(0.2)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.process.communicate()


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Let a program hear Ctrl-C, though a shell has started these tests in the background, where it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def noise(err: str) -> list[str]:
    """What stands in standard error beside the progress bar.

    Args:
        err: All of it.
    """
    lines = err.replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and "it/s" not in line and "s/it" not in line]


def reference_losses(*, num_ranks: int, num_steps: int, max_norm: float | None = None) -> list[list[float]]:
    """What every rank's loss must be: a plain loop in one process that takes the ranks' batches in turn.

    Args:
        num_ranks: How many ranks average their gradients.
        num_steps: Length of the run.
        max_norm: What the total norm is clipped to.

    Returns:
        By step and rank.
    """
    import torch

    from stabilizer.examples.gpt import GPT
    from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss

    torch.manual_seed(1)
    model = GPT()
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer, steps=num_steps)
    streams = [iter(make_loader(context=128, batch_size=8, seed=1, rank=rank)) for rank in range(num_ranks)]
    found = []
    for _ in range(num_steps):
        losses = [next_byte_loss(model, next(stream)) for stream in streams]
        (sum(losses, torch.zeros(())) / num_ranks).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found
