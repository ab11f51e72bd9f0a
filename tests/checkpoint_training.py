"""A training that may be killed at any moment and started again, in processes of its own.

`python -m tests.checkpoint_training` imports everything once and forks the ranks of each run that it is told of, a line
of JSON each. A run resumes from the last good checkpoint, trains to the last step, and saves what has come of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    CheckpointGuardCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    attach,
)
from stabilizer.checkpoints import last_good_checkpoint

__all__ = ["NUM_STEPS", "Moment", "Plan", "train"]

NUM_STEPS = 12
_SAVE_EVERY = 2
_DONE = "saved.txt"


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a process is killed.

    Attributes:
        step: The step that is about to be taken, or has been taken and is being saved.
        in_save: Which of both.
        seconds: From then on.
        rank: Who is killed; the others are, when it is gone.
    """

    step: int
    in_save: bool
    seconds: float
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained.

    Attributes:
        host: "lightning" or "accelerate".
        folder: Of the checkpoints, and of what has come of it.
        num_ranks: How many processes.
        overwrites: Whether every save goes to the same place; else the host deletes the older ones.
    """

    host: str
    folder: str
    num_ranks: int = 1
    overwrites: bool = False


class Loader:
    """Micro-batches that follow from their number; goes on where its state was taken."""

    def __init__(self, rank: int, num_ranks: int, moment: Moment | None) -> None:
        self.rank, self.num_ranks, self.moment, self.at = rank, num_ranks, moment, 0

    def __len__(self) -> int:
        return NUM_STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < NUM_STEPS:
            number, self.at = self.at, self.at + 1
            _kill_at(self.moment, number, in_save=False)
            generator = torch.Generator().manual_seed(1000 * number + self.rank)
            inputs = torch.randn(4, 32, generator=generator)
            # One loud micro-batch: a clip whose history was lost would treat it differently.
            yield inputs, inputs.sum(1, keepdim=True) * (50.0 if number == 8 else 1.0)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Module(lightning.pytorch.LightningModule):
    """Some 4 MB with the optimizer: a save takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Killer(lightning.pytorch.Callback):
    """Dies within a save, and notes the saves that were finished."""

    def __init__(self, moment: Moment | None, folder: str) -> None:
        self.moment, self.folder = moment, folder

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        _kill_at(self.moment, trainer.global_step, in_save=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_index: int) -> None:
        if trainer.global_step and trainer.global_step % _SAVE_EVERY == 0:
            _note(self.folder, trainer.global_step)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def make_callbacks() -> list[StabilizerCallback]:
    return [
        GradNormCallback(),
        LossMeanVarCallback(warmup_steps=2),
        AdaptiveClipThreshold(rule={"name": "robust_log", "warmup_steps": 4}),
        CheckpointGuardCallback(keep_good=1),
    ]


def train(rank: int, plan: Plan, moment: Moment | None, port: int) -> None:
    """Train to the last step, or until the moment comes.

    Args:
        rank: Of this process.
        plan: What is trained.
        moment: When it is killed.
        port: For the ranks to meet.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    if moment is not None and moment.rank != rank:
        moment = None
    if plan.num_ranks > 1:
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        sizes = {"WORLD_SIZE": plan.num_ranks, "LOCAL_WORLD_SIZE": plan.num_ranks, "TORCHELASTIC_RUN_ID": "tests"}
        os.environ.update({key: str(value) for key, value in {**places, **sizes}.items()})
    (_fit if plan.host == "lightning" else _loop)(rank, plan, moment)


def _fit(rank: int, plan: Plan, moment: Moment | None) -> None:
    callbacks = make_callbacks()
    common: dict[str, Any] = {"every_n_train_steps": _SAVE_EVERY, "dirpath": plan.folder}
    ways = {"save_top_k": 0, "save_last": True} if plan.overwrites else {"save_top_k": 1, "filename": "{step}"}
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=plan.num_ranks,
        strategy="ddp" if plan.num_ranks > 1 else "auto",
        max_steps=NUM_STEPS,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Killer(moment, plan.folder), ModelCheckpoint(**common, **ways)],
    )
    module, loader = Module(), Loader(rank, plan.num_ranks, moment)
    trainer.fit(module, loader, ckpt_path=last_good_checkpoint(plan.folder))
    _finish(rank, plan, module.model, callbacks)


def _loop(rank: int, plan: Plan, moment: Moment | None) -> None:
    configuration = ProjectConfiguration(
        project_dir=plan.folder, automatic_checkpoint_naming=not plan.overwrites, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    raw = make_model()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3))
    callbacks, loader = make_callbacks(), Loader(rank, plan.num_ranks, moment)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *_: None):
        accelerator.register_save_state_pre_hook(lambda *_: _kill_at(moment, callbacks[0].next_step(), in_save=True))
        found = last_good_checkpoint(plan.folder)
        if found is not None:
            accelerator.load_state(str(found))
            loader.at = callbacks[0].next_step()
        names = [path.name for path in Path(plan.folder, "checkpoints").glob("checkpoint_*")]
        accelerator.wait_for_everyone()
        numbers = [int(number[1]) for name in names if (number := re.fullmatch(r"checkpoint_(\d+)", name))]
        configuration.iteration = 1 + max(numbers, default=-1)
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            step = callbacks[0].next_step()
            if step % _SAVE_EVERY == 0:
                accelerator.save_state(f"{plan.folder}/ckpt" if plan.overwrites else None)
                accelerator.wait_for_everyone()
                if rank == 0:
                    _note(plan.folder, step)
    _finish(rank, plan, raw, callbacks)


def _finish(rank: int, plan: Plan, model: nn.Module, callbacks: list[StabilizerCallback]) -> None:
    states = {callback.state_key: callback.state_dict() for callback in callbacks}
    torch.save({"model": model.state_dict(), "callbacks": states}, Path(plan.folder, f"result_{rank}.part"))
    Path(plan.folder, f"result_{rank}.part").rename(Path(plan.folder, f"result_{rank}.bin"))


def _kill_at(moment: Moment | None, step: int, *, in_save: bool) -> None:
    if moment is None or (moment.step, moment.in_save) != (step, in_save):
        return

    def kill() -> None:
        time.sleep(moment.seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def _note(folder: str, step: int) -> None:
    with Path(folder, _DONE).open("a", encoding="utf-8") as file:
        file.write(f"{step}\n")


def _serve() -> None:
    for line in sys.stdin:
        told = json.loads(line)
        moment = None if told["moment"] is None else Moment(**told["moment"])
        print(json.dumps(_run(Plan(**told["plan"]), moment, told["port"], told["seconds"])), flush=True)  # noqa: T201


def _run(plan: Plan, moment: Moment | None, port: int, seconds: float) -> list[int]:
    """Exit codes of the ranks, negative for signals; once one is gone before its time, the others are killed."""
    ranks = {_forked(rank, plan, moment, port): rank for rank in range(plan.num_ranks)}
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > end:
            for other in ranks.keys() - codes.keys():
                os.kill(other, signal.SIGKILL)
                codes[other] = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        time.sleep(0.002)
    return [codes[process] for process in ranks]


def _forked(rank: int, plan: Plan, moment: Moment | None, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.dup2(2, 1)  # what a host prints is no answer
        train(rank, plan, moment, port)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
