"""Fault: what goes wrong, when and where; made by hand or of what a configuration file holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from stabilizer.faults.tables import FIELDS, IN_ONE_PLACE, KINDS, REPEATS, TARGETS
from stabilizer.thresholds.arguments import check_whole, closest

__all__ = ["KINDS", "Fault", "FaultSpec", "parse_faults"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. Of its fields a kind takes those that mean something for it, and refuses the others.

    - `nan_gradient`, `inf_gradient`: one element of a layer's gradient, on one rank, before any reduction.
    - `layer_spike`: a layer's gradient on one rank times `factor`.
    - `token_loss`: the gradient of one token's loss times `factor`, as if that loss were multiplied.
    - `bit_flip`: an exponent bit of one element, of a gradient, or of a weight for one
      forward and backward.
    - `corrupted_batch`: token numbers are drawn anew, floating-point numbers are multiplied by `factor`.
    - `stuck_loss_scale`: a gradient scaler's scale is held at `factor`, on all ranks.
    - `dead_rank`: a process kills itself (SIGKILL).
    - `learning_rate_jump`: the learning rates of all optimizers times `factor`, on all ranks.

    Attributes:
        kind: One of these.
        step: The optimizer step, counted from 0.
        rank: On which process, counted over all nodes.
        micro_batch: Within the step, counted from 0.
        layer: Name of a layer, a module or a parameter, or the number of a block; of `token_loss` the module whose
            output has the tokens (default the output embedding). Default: one that the seed chooses.
        token: Row, or row and position; default (0, 0), of a corrupted batch all of it.
        factor: Multiplies; default 1000, of a learning rate 100. Of a loss scale the value itself, default 2^-20.
        num_steps: In how many steps in a row.
        repeats: Whether it comes again when the same micro-batch is run again: "always", "never", or "differently"
            each time. Default "always", of a flipped bit "never".
        target: What a bit is flipped in: "gradient" or "weight".
        bit: Which exponent bit, counted from the lowest; default the highest that is 0, so that the number grows.

    Raises:
        ValueError: If a field is out of range, or means nothing for this kind.

    Example:
        >>> Fault("layer_spike", step=200, layer="layers.3", factor=50.0).repeats
        'always'
        >>> Fault("dead_rank", step=10, token=(0, 1))
        Traceback (most recent call last):
        ...
        ValueError: token=(0, 1): kind='dead_rank' takes only rank, micro_batch
    """

    kind: str
    step: int
    rank: int = 0
    micro_batch: int = 0
    layer: str | int | None = None
    token: tuple[int, ...] | None = None
    factor: float | None = None
    num_steps: int = 1
    repeats: str | None = None
    target: str | None = None
    bit: int | None = None

    def __post_init__(self) -> None:
        _check_word("kind", self.kind, KINDS)
        check_whole("step", self.step, low=0)
        taken = FIELDS[self.kind]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name not in taken and value != field.default:
                told = ", ".join(taken) or "no field but step"
                raise ValueError(f"{field.name}={value!r}: kind={self.kind!r} takes only {told}")
        check_whole("rank", self.rank, low=0)
        check_whole("micro_batch", self.micro_batch, low=0)
        check_whole("num_steps", self.num_steps, low=1)
        self._check_place()
        for name, default in taken.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_words()
        if "factor" in taken:
            object.__setattr__(self, "factor", _checked_factor(self.kind, self.factor))

    @property
    def last_step(self) -> int:
        """The last step that it is in."""
        return self.step + self.num_steps - 1

    @property
    def is_everywhere(self) -> bool:
        """Whether it is on all ranks, and in all micro-batches of a step."""
        return not IN_ONE_PLACE & FIELDS[self.kind].keys()

    def is_in(self, step: int) -> bool:
        """Whether it is in a step.

        Args:
            step: Its number.
        """
        return self.step <= step <= self.last_step

    def as_dict(self) -> dict[str, Any]:
        """Its fields that mean something, as plain types that are equal to themselves."""
        values = {name: getattr(self, name) for name in ("kind", "step", *FIELDS[self.kind])}
        return {
            name: list(value)
            if isinstance(value, tuple)
            else repr(value)
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in values.items()
        }

    def __str__(self) -> str:
        """All of that in one line."""
        return ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items() if value is not None)

    def _check_place(self) -> None:
        layer: Any = self.layer
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, str | int)):
            raise ValueError(f"layer={layer!r}: expected a name, or the number of a block")
        given: Any = self.token
        if given is None:
            return
        token = tuple(given) if isinstance(given, list | tuple) else ()
        is_place = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in token)
        if len(token) not in (1, 2) or not is_place:
            raise ValueError(f"token={given!r}: expected a row, or a row and a position, such as [0, 7]")
        object.__setattr__(self, "token", token)

    def _check_words(self) -> None:
        if self.repeats is not None:
            _check_word("repeats", self.repeats, REPEATS[self.kind])
        if self.target is not None:
            _check_word("target", self.target, TARGETS)
        if self.bit is not None:
            check_whole("bit", self.bit, low=0)


#: A fault, or a mapping of its fields.
FaultSpec: TypeAlias = Fault | dict[str, Any]


def parse_faults(specs: Sequence[FaultSpec]) -> tuple[Fault, ...]:
    """Make faults of what a configuration holds.

    Args:
        specs: Faults, or mappings of their fields.

    Raises:
        ValueError: If one is none; names its place in the list, the field, the value and what is allowed.

    Example:
        >>> [fault] = parse_faults([{"kind": "token_loss", "step": 300, "token": [1, 7]}])
        >>> print(fault)
        kind='token_loss', step=300, rank=0, micro_batch=0, token=[1, 7], factor=1000.0, num_steps=1, repeats='always'
    """
    if isinstance(specs, str | Mapping | Fault) or not isinstance(specs, Sequence):
        raise ValueError(f"faults={specs!r}: expected a list, such as [{{kind: nan_gradient, step: 100}}]; [] for none")
    found = []
    for number, spec in enumerate(specs):
        try:
            found.append(spec if isinstance(spec, Fault) else _parsed(spec))
        except ValueError as error:
            raise ValueError(f"faults[{number}]: {error}") from None
    return tuple(found)


def _parsed(spec: Any) -> Fault:
    if not isinstance(spec, Mapping):
        raise ValueError(f"{spec!r}: expected a mapping, such as {{kind: nan_gradient, step: 100}}")
    names = [field.name for field in dataclasses.fields(Fault)]
    for name in spec:
        if name not in names:
            raise ValueError(f"{name!r} is no field; known are {', '.join(names)}{closest(name, names)}")
    for name in ("kind", "step"):
        if name not in spec:
            raise ValueError(f"there is no {name}: expected at least kind and step")
    return Fault(**spec)


def _check_word(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}{closest(value, list(allowed))}")


def _checked_factor(kind: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN and infinity are what a broken batch or loss may hold; anything else they would break without a name.
    can_break = kind in ("corrupted_batch", "token_loss")
    if not is_number or not (math.isfinite(value) or can_break):
        raise ValueError(f"factor={value!r}: expected a number" + ("" if can_break else " that is finite"))
    if kind in ("stuck_loss_scale", "learning_rate_jump") and not value > 0:
        raise ValueError(f"factor={value!r}: expected a number above 0")
    return float(value)
