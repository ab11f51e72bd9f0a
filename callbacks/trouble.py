"""TroubleWatch: whether one of several conditions holds, from the reduced numbers of steps, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.incoming import Arrived, Incoming
from stabilizer.recovery.conditions import LossCondition, NonfiniteCondition, Trouble

__all__ = ["TroubleWatch"]

# Steps that an accelerator has for its numbers to reach the host before anybody waits for them.
_LAG = 2


class _Judges:
    """The conditions on the steps of one optimizer."""

    def __init__(self, specs: Sequence[Mapping[str, Any]]) -> None:
        self.nonfinite: NonfiniteCondition | None = None
        self.loss: LossCondition | None = None
        for spec in specs:
            options = {key: value for key, value in spec.items() if key != "name"}
            if spec["name"] == "nonfinite":
                self.nonfinite = NonfiniteCondition(**options)
            elif spec["name"] == "loss":
                self.loss = LossCondition(**options)
        # Numbers that are on their way, and flags of the user's own functions behind them.
        self.incoming = Incoming[None]()

    @property
    def all(self) -> dict[str, NonfiniteCondition | LossCondition]:
        found = {"nonfinite": self.nonfinite, "loss": self.loss}
        return {name: condition for name, condition in found.items() if condition is not None}

    def state_dict(self) -> dict[str, Any]:
        """Waits for what is on its way."""
        pending = list(self.incoming.arrived(waits=True))
        self.put_back([(one.step, one.numbers) for one in pending])
        states = {name: condition.state_dict() for name, condition in self.all.items()}
        return {**states, "pending": [[one.step, list(one.numbers)] for one in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, condition in self.all.items():
            if name in state:
                condition.load_state_dict(state[name])
        self.incoming.clear()
        self.put_back(state["pending"])

    def put_back(self, pending: Sequence[Any]) -> None:
        for step, numbers in pending:
            self.incoming.push(int(step), torch.tensor(numbers, dtype=torch.float64), None)


class TroubleWatch:
    """Judges every step, in order.

    On a CPU a step is judged at its end, on an accelerator two steps later, so that the host does not wait for it.

    Args:
        specs: Of `parsed_conditions`.
    """

    def __init__(self, specs: Sequence[Mapping[str, Any]]) -> None:
        self._specs = list(specs)
        self._names = {spec["name"] for spec in specs}
        self._functions: list[Callable[[StepContext], Any]] = [
            spec["function"] for spec in specs if spec["name"] == "call"
        ]
        self._judges: dict[int, _Judges] = {}
        self._flags: dict[int, list[Tensor]] = {}  # of the user's functions, of the step at hand

    @property
    def needs_loss(self) -> bool:
        """Whether it is of no use without a loss."""
        return "loss" in self._names

    @property
    def looks_at_loss(self) -> bool:
        """Whether a loss says anything here."""
        return bool({"loss", "nonfinite"} & self._names)

    @property
    def first_bad(self) -> int | None:
        """The first step that speaks for trouble, of what has been judged."""
        conditions = [condition for judges in self._judges.values() for condition in judges.all.values()]
        return min((one.first_bad for one in conditions if one.first_bad is not None), default=None)

    def begin_step(self, context: StepContext) -> None:
        """Ask the user's functions.

        Args:
            context: Of a step whose gradients are complete.
        """
        device = context.is_bad.device
        self._flags[context.optimizer_index] = [_flag(function(context), device) for function in self._functions]

    def flag(self, context: StepContext) -> Tensor:
        """Whether a condition speaks against the step at hand by itself.

        Args:
            context: After `begin_step`.

        Returns:
            Shape (), bool, on the device; the same on every rank, for it comes from reduced numbers.
        """
        flags, loss = list(self._flags.get(context.optimizer_index, [])), context.loss
        if "nonfinite" in self._names:
            # Under a loss scale a gradient that is not finite is the scaler's affair; a loss never is.
            flags += [] if context.is_scaled else [context.is_bad]
            flags += [] if loss is None else [loss.num_nonfinite > 0]
        if "loss" in self._names and loss is not None:
            limit = self._of(context).loss
            assert limit is not None
            flags.append(~(loss.mean <= limit.limit) & (loss.num_seen > 0) & (loss.num_nonfinite == 0))
        none = torch.zeros_like(context.is_bad)
        return torch.stack([none, *(flag.to(none.device) for flag in flags)]).any()

    def take(self, context: StepContext, *, step: int) -> Trouble | None:
        """Take a step, and judge those that have come.

        Args:
            context: Of a step that is over.
            step: Its number on the clock that all optimizers share.

        Returns:
            What holds now, of several conditions as one.
        """
        judges, loss, outcome = self._of(context), context.loss, context.outcome
        is_bad = context.is_bad if outcome is None else context.is_bad & ~outcome.overflowed
        zero = torch.zeros((), dtype=torch.float64, device=is_bad.device)
        seen = [zero, zero, zero] if loss is None else [loss.num_nonfinite, loss.num_seen, loss.mean]
        own = self._flags.pop(context.optimizer_index, [zero] * len(self._functions))
        numbers = torch.stack([number.to(zero) for number in (is_bad, *seen, *own)])
        judges.incoming.push(step, numbers, None)
        lag = 0 if is_bad.device.type == "cpu" else _LAG
        arrived = judges.incoming.arrived(before=step - lag + 1)
        return _merged([trouble for one in arrived for trouble in self._judge(judges, one)])

    def clear(self) -> None:
        """Forget the trouble at hand, which is over; what is usual stays."""
        for judges in self._judges.values():
            judges.incoming.clear()
            for condition in judges.all.values():
                condition.clear()

    def accept(self) -> None:
        """Take a loss that has stayed high for what is usual: nobody can do more about it."""
        for judges in self._judges.values():
            if judges.loss is not None:
                judges.loss.accept()

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on: plain types."""
        return {str(index): judges.state_dict() for index, judges in self._judges.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self._judges = {int(index): _Judges(self._specs) for index in state}
        for index, judges in self._judges.items():
            judges.load_state_dict(state[str(index)])

    def _of(self, context: StepContext) -> _Judges:
        return self._judges.setdefault(context.optimizer_index, _Judges(self._specs))

    def _judge(self, judges: _Judges, arrived: Arrived[None]) -> list[Trouble]:
        is_bad, num_nonfinite, num_seen, mean, *own = arrived.numbers
        step, found = arrived.step, []
        if judges.nonfinite is not None:
            found.append(judges.nonfinite.update(step, is_bad=bool(is_bad or num_nonfinite)))
        if judges.loss is not None and num_seen:
            found.append(judges.loss.update(step, mean))
        for flag, function in zip(own, self._functions, strict=False):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            found.append(Trouble("call", step, step, f"{name} says so at step {step}") if flag else None)
        return [trouble for trouble in found if trouble is not None]


def _flag(found: Any, device: torch.device) -> Tensor:
    if isinstance(found, Tensor):
        return found.to(device).reshape(()) != 0
    return torch.full((), bool(found), device=device)  # unlike a copy it waits for nothing


def _merged(troubles: Sequence[Trouble]) -> Trouble | None:
    if not troubles:
        return None
    first = min(trouble.first_step for trouble in troubles)
    text = "; ".join(trouble.text for trouble in troubles)
    return Trouble(troubles[0].condition, max(trouble.step for trouble in troubles), first, text)
