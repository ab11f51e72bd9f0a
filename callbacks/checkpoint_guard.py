"""CheckpointGuardCallback: what the host saves is verified, and the last good checkpoints stay."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, checkpoint_charts
from stabilizer.callbacks.checkpoint_accelerate import AccelerateSaves
from stabilizer.callbacks.checkpoint_lightning import TrainerSaves
from stabilizer.callbacks.checkpoint_saves import GuardedSaves
from stabilizer.callbacks.checkpoint_transformers import TransformersSaves
from stabilizer.callbacks.checks import check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.notices import BAD_CHECKPOINT_ADVICE, GOOD_CHECKPOINT, checkpoint_notice
from stabilizer.callbacks.recovery import Recovery
from stabilizer.callbacks.run_host import RunHost
from stabilizer.checkpoints.finding import GoodCheckpoint, newest_good
from stabilizer.checkpoints.guard_file import Guard
from stabilizer.errors import logger
from stabilizer.names import Granularity
from stabilizer.recovery.specs import Spec
from stabilizer.reduction import Reducer, world_size
from stabilizer.tally import Weight

__all__ = ["CheckpointGuardCallback"]

# A run whose weights are dead goes on saving.
_STEPS_TO_TELL_AGAIN = 100


class CheckpointGuardCallback(StabilizerCallback):
    """Verifies every checkpoint that the host saves, and keeps the last good ones whatever the host deletes.

    A thread of the first rank reads what was saved, on the CPU and without executing anything of it: whole, loadable,
    parameters of the model's shapes, and everything finite in the model and the optimizers. The verdict and checksums
    go into a guard file beside it, by which `last_good_checkpoint` finds where the next start resumes. The newest
    `keep_good` good ones are neither deleted by the host (`save_top_k`, `total_limit`) nor written over, and a bad one
    never takes the place of one of them. docs/callbacks/checkpoint_guard.md has the details.

    Args:
        every_n_steps: Steps between two rows of `checkpoint/good` and `checkpoint/bad`: how many have been found so.
        keep_good: How many steps with a good checkpoint stay in a folder; `None` leaves all deleting to the host.
        conditions: When the run is in trouble: "nonfinite", "loss", a mapping with its arguments, or a function; see
            docs/guides/recovery.md.
        ladder: What is done about it, one after the other: "alarm", "skip", "lower_lr", "roll_back", "stop".
        calm_steps: Steps without trouble after which the ladder begins anew.
        skip_list: File of the data that are left out; by default `skip_list.json` beside the checkpoints.
        max_skips: Micro-batches of a rank that may be left out.
        layers: Not used here: whole checkpoints are verified.
        exclude: Not used here.
        granularity: Not used here.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> callback = CheckpointGuardCallback(keep_good=3)
        >>> callback.verify("last.ckpt")  # between runs nothing is verified
        False
    """

    is_gated = False

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        keep_good: int | None = 2,
        conditions: Sequence[Spec] = ("nonfinite", "loss"),
        ladder: Sequence[Spec] = ("alarm",),
        calm_steps: int = 200,
        skip_list: str | os.PathLike[str] | None = None,
        max_skips: int = 10_000,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            layers=layers,
            exclude=exclude,
            granularity=granularity,
            name=name,
            strict=strict,
        )
        self.keep_good = None if keep_good is None else check_interval("keep_good", keep_good)
        self._saves: GuardedSaves | None = None
        self.recovery = Recovery(
            self, conditions=conditions, ladder=ladder, calm_steps=calm_steps, skip_list=skip_list, max_skips=max_skips
        )
        self.loss_weight: Weight | None = "auto" if self.recovery.looks_at_loss else None
        self.needs_loss = self.recovery.needs_loss
        self.may_skip, self.lowers_lr = self.recovery.may_skip, self.recovery.lowers_lr

    def join_run(self, host: RunHost) -> None:
        """Stand before the saves of the host."""
        self._close()
        self.recovery.join_run(host, good_checkpoints=self)
        if host.kind == "lightning":
            # Its last save comes after the end of training: `teardown` is later.
            self._saves = TrainerSaves(
                self.keep_good, trainer=host.engine, model=host.model, next_step=self._settled_step
            )
            trainer = host.engine
            host.undo.append(lambda: None if trainer.state.status == "running" else self._close())
            return
        if host.kind == "accelerate":
            self._saves = AccelerateSaves(
                self.keep_good, accelerator=host.engine, model=host.model, next_step=self._settled_step
            )
        elif host.kind == "transformers":
            self._saves = TransformersSaves(driver=self.driver, model=host.model, next_step=self._settled_step)
        else:
            self._saves = GuardedSaves(self.keep_good, model=host.model)
        host.undo.append(self._close)

    def on_gradients(self, context: StepContext) -> None:
        """Skip, and lower the learning rates, while recovery wants that."""
        self.recovery.begin_step(context)

    def on_step_end(self, context: StepContext) -> None:
        """Tell of verdicts, log their numbers, and look whether the run is in trouble."""
        self._tell(context)
        if context.step % self.every_n_steps == 0:
            worker = None if self._saves is None else self._saves.worker
            for tag, number in (
                (tags.CHECKPOINT_GOOD, 0 if worker is None else worker.num_good),
                (tags.CHECKPOINT_BAD, 0 if worker is None else worker.num_bad),
            ):
                context.log(tag, float(number))
        self.recovery.end_step(context)

    def batches(self, loader: Iterable[Any], *, epoch: int, first_batch: int = 0) -> Iterator[Any]:
        """In a loop, the micro-batches of an epoch without those that are left out; Lightning needs no such call.

        Args:
            loader: A data loader.
            epoch: Counted from 0.
            first_batch: Number of the loader's first micro-batch, where training goes on in the middle of an epoch.
        """
        return self.recovery.data.batches(loader, epoch=epoch, first_batch=first_batch)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called last, by Lightning."""
        super().teardown(trainer, pl_module, stage)
        self._close()

    def verify(self, path: str | os.PathLike[str]) -> bool:
        """Have a checkpoint verified that a loop has saved by itself; on every rank, or on the first alone.

        Args:
            path: A file of `torch.save`, or a folder of `torch.distributed.checkpoint`.

        Returns:
            Whether this process verifies it: the first rank does, while a run lasts.
        """
        if self._saves is None:
            return False
        checkpoint = self._saves.local(path)
        if checkpoint is None:
            return False
        self._saves.announce(checkpoint, self._settled_step(), inside=False)
        self._saves.saved(checkpoint, self._settled_step())
        return True

    def latest(self, before_step: int) -> GoodCheckpoint | None:
        """The newest good checkpoint, when everything that was saved is verified; on every rank, the same answer.

        Args:
            before_step: Only those saved before this optimizer step was taken.
        """
        found: GoodCheckpoint | None = None
        saves = self._saves
        if saves is not None and saves.is_writer:
            saves.worker.wait()
            found = _newest(saves, before_step)
        if world_size() > 1:
            [plain, *_] = Reducer(torch.device("cpu")).objects(None if found is None else (str(found.path), found.step))
            found = None if plain is None else GoodCheckpoint(Path(plain[0]), int(plain[1]))
        return found

    def suspect(self, after_step: int | None) -> None:
        """While the run is in trouble, let no checkpoint saved since then take the place of an older one.

        Args:
            after_step: The first bad step; `None` when the trouble is over.
        """
        if self._saves is not None:
            self._saves.keeper.suspect_after = after_step

    def folders(self) -> list[Path]:
        """Where checkpoints were saved in this run, on the first rank."""
        return [] if self._saves is None else list(self._saves.keeper.folders)

    def condemn(self, *, after_step: int, reason: str) -> None:
        """Mark what was saved while the run was in trouble: it is bad, whatever its numbers are; on every rank.

        Args:
            after_step: Checkpoints of larger steps.
            reason: For their guard files.
        """
        if self._saves is not None and self._saves.is_writer:
            self._saves.worker.wait()
            self._saves.keeper.condemn(range(after_step + 1, self.next_step(0) + 1), reason=reason)

    def charts(self) -> list[Chart]:
        """Verdicts, and what was done about trouble."""
        return checkpoint_charts()

    def limitations(self, setting: Any) -> list[str]:
        """Hosts whose saves nobody stands before, or whose deletions."""
        found: list[str] = []
        if setting.host == "plain loop":
            found.append("a loop tells of its checkpoints by verify(path); nothing is kept from being deleted")
        elif setting.host not in ("Lightning", "Accelerate"):
            found.append("keep_good does nothing here: the trainer deletes as save_total_limit says")
        return found

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        return {**super().hyperparameters(), "keep_good": self.keep_good, **self.recovery.hyperparameters()}

    def extra_state(self) -> dict[str, Any]:
        """Where recovery is."""
        return {"recovery": self.recovery.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go on with recovery where another one was saved."""
        self.recovery.load_state_dict(state["recovery"])

    def _settled_step(self) -> int:
        """The step that comes next: of a step that the optimizer has just taken, the host may not have told yet."""
        if self.driver is not None:
            self.driver.settle()
        return self.next_step(0)

    def _close(self) -> None:
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.close()
            _say(saves, self)

    def _tell(self, context: StepContext) -> None:
        if self._saves is None or not self._saves.worker.verdicts:
            return
        for text in _say(self._saves, self):
            context.write_text(tags.CHECKPOINT_TEXT, text)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_saves": None}


def _newest(saves: GuardedSaves, before_step: int) -> GoodCheckpoint | None:
    try:
        return newest_good(saves.keeper.known(), before_step=before_step, expected=saves.expected())
    except Exception:  # whatever it is: the other ranks wait for an answer
        logger.exception("looking for the last good checkpoint failed")
        return None


def _say(saves: GuardedSaves, owner: StabilizerCallback) -> list[str]:
    """Tell of verdicts on the first rank, where they are."""
    texts = []
    while saves.worker.verdicts:
        path, guard = saves.worker.verdicts.popleft()
        if guard.verdict == "good":
            logger.info("%s: %s is good (step %d)", owner.state_key, path, guard.step)
            owner.console.count(GOOD_CHECKPOINT, step=guard.step)
        else:
            since = None if saves.told_bad is None else guard.step - saves.told_bad
            if since is not None and 0 <= since < _STEPS_TO_TELL_AGAIN:
                why = guard.reasons[0][:100]
                texts.append(f"also a BAD CHECKPOINT {path} (step {guard.step}; see step {saves.told_bad}): {why}")
            else:
                saves.told_bad = guard.step
                texts.append(_bad(path, guard))
            owner.console.tell(checkpoint_notice(texts[-1], path, guard, source=owner.state_key))
    return texts


def _bad(path: Path, guard: Guard) -> str:
    return f"BAD CHECKPOINT {path} (step {guard.step}): {'; '.join(guard.reasons)}. {BAD_CHECKPOINT_ADVICE}"
