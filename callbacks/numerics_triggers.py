"""The norms of each optimizer against their thresholds, kept over runs and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.clip_limits import limits_beside
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.trigger import Observation, Trigger
from stabilizer.thresholds import RuleSpec

__all__ = ["Triggers", "own_rule"]

# Norms of which a threshold is made, at least and unless somebody says otherwise.
_MIN_WARMUP, _WARMUP = 2, 50


def own_rule(rule: RuleSpec | None, warmup_steps: int) -> RuleSpec:
    """A rule where no clip keeps thresholds: one that does not wait longer than the callback was told to.

    Args:
        rule: As the user has given it.
        warmup_steps: Of the callback.

    Example:
        >>> own_rule(None, 10)
        {'name': 'robust_log', 'warmup_steps': 10}
    """
    warmup = min(max(warmup_steps, _MIN_WARMUP), _WARMUP)
    return {"name": "robust_log", "warmup_steps": warmup} if rule is None else rule


class Triggers:
    """One trigger an optimizer.

    Args:
        rule: How thresholds follow the norms; `None` for those of the clips, and "robust_log" where there are none.
        warmup_steps: Of the callback.
    """

    def __init__(self, rule: RuleSpec | None, *, warmup_steps: int) -> None:
        self._rule, self._own = rule, own_rule(rule, warmup_steps)
        self._triggers: dict[int, Trigger] = {}
        self._saved: dict[int, dict[str, Any]] = {}

    def look(self, callback: StabilizerCallback, context: StepContext) -> Observation:
        """Hold a step's norms against the thresholds; nothing is remembered.

        Args:
            callback: Whose layers are meant.
            context: Of the step.
        """
        index, names = context.optimizer_index, tuple(context.selected_names)
        total, layers = limits_beside(callback, context) if self._rule is None else (None, None)
        trigger = self._triggers.get(index)
        if trigger is None or trigger.names[1:] != names:
            saved = self._saved.pop(index, None) if trigger is None else trigger.state_dict()
            trigger = Trigger(
                names,
                rule=self._own,
                owns_total=total is None,
                owns_layers=layers is None,
                device=context.store.norms.device,
            )
            if saved is not None:
                trigger.load_state_dict(saved)
            self._triggers[index] = trigger
        norms = torch.cat([context.store.total_norm.reshape(1), context.select(context.store.norms)])
        weight = None if context.loss is None else context.loss.weight
        return trigger.look(norms, step=context.step, weight=weight, total=total, layers=layers)

    def update(self, index: int, seen: Observation, *, valid: Tensor) -> None:
        """A step is over.

        Args:
            index: Position of the optimizer.
            seen: Of `look`.
            valid: Whether its norms may enter a history, shape (), bool.
        """
        self._triggers[index].update(seen, valid=valid)

    def let_go(self, index: int) -> None:
        """Keep what was learned on the CPU.

        Args:
            index: Position of the optimizer.
        """
        trigger = self._triggers.pop(index, None)
        if trigger is not None:
            self._saved[index] = trigger.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        found = {**self._saved, **{index: trigger.state_dict() for index, trigger in self._triggers.items()}}
        return {str(index): found[index] for index in sorted(found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state until the layers are known.

        Args:
            state: What `state_dict` gave.
        """
        self._triggers.clear()
        self._saved = {int(index): saved for index, saved in state.items()}
