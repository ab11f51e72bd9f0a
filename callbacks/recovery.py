"""Recovery: of a run in trouble it is told, it skips, slows down, goes back to a good checkpoint, or stops."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.notices import entry_notice
from stabilizer.callbacks.rolling_back import GoodCheckpoints, RollingBack
from stabilizer.callbacks.rolling_back_hosts import refusal
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.run_memory import RunMemory
from stabilizer.callbacks.skip_keeper import SkipKeeper
from stabilizer.callbacks.skipped_data import SkippedData
from stabilizer.callbacks.trouble import TroubleWatch
from stabilizer.errors import TrainingStoppedError
from stabilizer.recovery.conditions import Trouble
from stabilizer.recovery.ladder import Entry, Ladder
from stabilizer.recovery.skip_list import SkipList
from stabilizer.recovery.specs import RUNGS, Spec, parsed_conditions, plain_specs, quiet_steps
from stabilizer.thresholds.arguments import check_whole

__all__ = ["Recovery"]

_COOLDOWN = 100  # steps between two warnings of rungs that may be taken again and again


class Recovery:
    """What a callback that guards checkpoints does about a run in trouble; see docs/guides/recovery.md.

    Args:
        owner: The callback that this belongs to.
        conditions: When a run is in trouble: "nonfinite", "loss", a mapping with its arguments, or a function of a
            `StepContext` that gives the same bool or tensor on every rank.
        ladder: What is done about it: "alarm", "skip", "lower_lr", "roll_back" and "stop", in this order.
        calm_steps: Steps without trouble after which the first rung is next again.
        skip_list: Another file than `skip_list.json` beside the checkpoints.
        max_skips: Micro-batches of a rank that the list may have.

    Attributes:
        ladder: Of the run, with its history.
        data: What the run leaves out, and where it is.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> recovery = Recovery(StabilizerCallback(), ladder=["skip", "roll_back"])
        >>> recovery.may_skip, recovery.rolls_back, recovery.lowers_lr
        (True, True, False)
    """

    def __init__(
        self,
        owner: StabilizerCallback,
        *,
        conditions: Sequence[Spec] = ("nonfinite", "loss"),
        ladder: Sequence[Spec] = ("alarm",),
        calm_steps: int = 200,
        skip_list: str | os.PathLike[str] | None = None,
        max_skips: int = 10_000,
    ) -> None:
        self._owner = owner
        self._conditions = parsed_conditions(conditions)
        self.calm_steps = check_whole("calm_steps", calm_steps, low=1)
        check_whole("max_skips", max_skips, low=1)
        if skip_list is not None and not isinstance(skip_list, str | os.PathLike):
            raise ValueError(f"skip_list={skip_list!r}: expected the name of a file")
        self.ladder = Ladder(ladder, calm_steps=calm_steps, quiet_steps=quiet_steps(self._conditions))
        self._keeper = SkipKeeper(None if skip_list is None else Path(skip_list), max_skips=max_skips)
        self._watch = TroubleWatch(self._conditions)
        self.data = SkippedData(self.skips)
        self._lowered: tuple[float, int] = (1.0, 0)  # factor, and the first step without it
        self._skips_steps, self._acted_at = False, -1
        self._told: dict[str, int] = {}
        self._rolling: RollingBack | None = None
        self._good: GoodCheckpoints | None = None
        self._suspected: int | None = None
        # Another run begins with what is here now, unless it resumes.
        self._fresh = {"ladder": self.ladder.state_dict(), "data": self.data.state_dict()}
        self._run = RunMemory()

    @property
    def skips(self) -> SkipList:
        """The skip list."""
        return self._keeper.skips

    @property
    def rolls_back(self) -> bool:
        """Whether it may go back to a checkpoint."""
        return "roll_back" in self.ladder.names

    @property
    def may_skip(self) -> bool:
        """Whether it may skip steps."""
        return "skip" in self.ladder.names

    @property
    def lowers_lr(self) -> bool:
        """Whether it may lower learning rates."""
        is_slow_after = self.rolls_back and self.ladder.arguments("roll_back")["lr_factor"] < 1
        return is_slow_after or "lower_lr" in self.ladder.names

    @property
    def looks_at_loss(self) -> bool:
        """Whether it looks at the loss, for `loss_weight`."""
        return self._watch.looks_at_loss

    @property
    def needs_loss(self) -> bool:
        """Whether it is of no use without a loss; an alarm alone is no reason to ask for one."""
        return self._watch.needs_loss and self.ladder.names not in ([], ["alarm"])

    @property
    def history(self) -> list[Entry]:
        """What has happened, the last hundred events."""
        return list(self.ladder.history)

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers, plain types."""
        return {
            "conditions": plain_specs(self._conditions),
            "ladder": plain_specs(self.ladder.rungs),
            "calm_steps": self.calm_steps,
            "max_skips": self._keeper.max_skips,
        }

    def join_run(self, host: RunHost, *, good_checkpoints: GoodCheckpoints) -> None:
        """Take part in a run; on every rank.

        Args:
            host: Of the run.
            good_checkpoints: Knows which ones are good.

        Raises:
            ValueError: If the host cannot go back to a checkpoint, or the skip list is none.
        """
        self._good, self._rolling, self._suspected = good_checkpoints, None, None
        owner = self._owner
        if self.rolls_back and (reason := refusal(host)):
            raise ValueError(
                f"{owner.state_key}: ladder has 'roll_back', but {reason}. Leave this rung out, and resume from the "
                "last good checkpoint when 'stop' has ended the run"
            )
        if self._run.is_another(host):
            self._forget()
        self._keeper.join(host)
        trainer, read = host.engine if host.kind == "lightning" else None, self._keeper.read_resumed
        host.undo.append(self.data.join(trainer, owner.driver, watches=self.rolls_back, before_data=read))
        if self.rolls_back:
            self._rolling = RollingBack(host, owner, good=good_checkpoints, keeper=self._keeper, data=self.data)
        host.undo.append(self._leave)

    def begin_step(self, context: StepContext) -> None:
        """Skip, and lower the learning rates, while that lasts.

        Args:
            context: Of a step whose gradients are complete.
        """
        step = self._clock(context)
        self._watch.begin_step(context)
        if self._skips_steps and self.ladder.is_calm(step):
            self._skips_steps = False
        if self.may_skip:
            flag = self._watch.flag(context)
            context.plan.skip(flag if self._skips_steps else torch.zeros_like(flag))
        factor, end = self._lowered
        if self.lowers_lr and step < end:
            context.plan.scale_lr(factor)

    def end_step(self, context: StepContext) -> None:
        """Look whether the run is in trouble, and do something about it.

        Args:
            context: Of a step that is over.
        """
        step = self._clock(context)
        if context.optimizer_index == 0:
            self.data.note(context, step=step)
        trouble = self._watch.take(context, step=step)
        # Of several optimizers the first that is in trouble speaks for all: they share a checkpoint.
        if trouble is not None and self._acted_at != step:
            self._acted_at = step
            self._act(trouble, context, step=step)
        self._suspect(step)

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on: plain types."""
        return {
            "ladder": self.ladder.state_dict(),
            "watch": self._watch.state_dict(),
            "data": self.data.state_dict(),
            "skips": self._keeper.state_dict(),
            "lowered": list(self._lowered),
            "skips_steps": self._skips_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self.ladder.load_state_dict(state["ladder"])
        self._watch.load_state_dict(state["watch"])
        self.data.load_state_dict(state["data"])
        self._keeper.load_state_dict(state["skips"])
        factor, end = state["lowered"]
        self._lowered, self._skips_steps = (float(factor), int(end)), bool(state["skips_steps"])
        self._run.note_state()

    def _forget(self) -> None:
        """Another run begins: data, losses and what was done in the one before say nothing of it."""
        self.ladder.load_state_dict(self._fresh["ladder"])
        self.data.load_state_dict(self._fresh["data"])
        self._watch.load_state_dict({})
        self._keeper.forget()
        self._lowered, self._skips_steps, self._told = (1.0, 0), False, {}

    def _clock(self, context: StepContext) -> int:
        """The step of the first optimizer, whichever one moves: what checkpoints are counted by."""
        return context.step if context.optimizer_index == 0 else max(self._owner.next_step(0) - 1, 0)

    def _act(self, trouble: Trouble, context: StepContext, *, step: int) -> None:
        entry = self.ladder.climb(trouble, step=step)
        context.log(tags.RECOVERY_RUNG, float(["wait", *RUNGS].index(entry.rung)))
        if entry.rung == "lower_lr":
            rung = self.ladder.arguments("lower_lr")
            self._lowered = float(rung["factor"]), step + 1 + int(rung["num_steps"])
            entry.outcome = f"learning rates x {rung['factor']:g} for {rung['num_steps']} steps"
        elif entry.rung == "skip":
            self._skips_steps = True
            entry.outcome = f"such steps are skipped until there has been none for {self.calm_steps}"
        elif entry.rung == "roll_back":
            context.defer(functools.partial(self._request, entry, step))
        elif entry.rung == "stop":
            context.defer(functools.partial(self._stop, entry))
        if self.ladder.is_top(entry):
            self._watch.accept()
        if entry.rung not in ("roll_back", "stop"):
            self._tell(entry)
        context.write_text(tags.RECOVERY_TEXT, str(entry))

    def _suspect(self, step: int) -> None:
        """Keep what was saved before the trouble at hand, if there is any."""
        both = (self._watch.first_bad, self.ladder.first_bad(step))
        first = min((one for one in both if one is not None), default=None)
        if first != self._suspected and self._good is not None:
            self._suspected = first
            self._good.suspect(first)

    def _tell(self, entry: Entry) -> None:
        """Warn; of what may come again and again once in a while."""
        last, repeats = self._told.get(entry.rung), entry.rung in ("alarm", "wait", self.ladder.names[-1])
        if repeats and last is not None and entry.step - last < _COOLDOWN:
            return
        self._told[entry.rung] = entry.step
        self._owner.console.tell(entry_notice(entry, self._owner.state_key))

    def _request(self, entry: Entry, step: int) -> None:
        assert self._rolling is not None
        self._rolling.when_possible(functools.partial(self._roll_back, entry, step))

    def _stop(self, entry: Entry) -> None:
        raise TrainingStoppedError(
            f"{self._owner.state_key}: step {entry.step}: {entry.reason}. What was done before:\n{self.ladder.told()}"
        )

    def _roll_back(self, entry: Entry, step: int) -> None:
        """Go back; on every rank, when all of a step is over."""
        assert self._rolling is not None
        target = self._rolling.go_back(entry, step=step)
        if isinstance(target, str):
            entry.outcome = f"not done: {target}"
            self._owner.console.tell(entry_notice(entry, self._owner.state_key))
            following = self.ladder.after_roll_back(entry)
            if following is not None:
                self._stop(following)
            return
        self.ladder.rolled_back(step=step, target=target)
        self._watch.clear()
        if (rung := self.ladder.arguments("roll_back"))["lr_factor"] < 1:
            self._lowered = float(rung["lr_factor"]), step + 1 + int(rung["lr_steps"])
        self._owner.console.tell(entry_notice(entry, self._owner.state_key))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_good": None, "_rolling": None}

    def _leave(self) -> None:
        self._rolling = self._good = None
        self._run.end()
