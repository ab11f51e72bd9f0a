"""The calls of a forward pass, and the gradients of the backward pass after it, on the host: who was the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

__all__ = [
    "Call",
    "Event",
    "Kinds",
    "Producer",
    "ProducerKind",
    "Seen",
    "first_in_backward",
    "first_in_forward",
    "value_of",
]

ProducerKind: TypeAlias = Literal[
    "input", "parameter", "output", "code", "loss", "gradient", "gradient_code", "loss_gradient", "parameter_gradient"
]
#: Whether there is NaN, infinity, minus infinity.
Kinds: TypeAlias = tuple[bool, bool, bool]
#: Way to a tensor, and what it has.
Seen: TypeAlias = tuple[str, Kinds]
#: "enter" or "exit", and the number of the call.
Event: TypeAlias = tuple[str, int]

_TEXTS: dict[ProducerKind, str] = {
    "input": "{module} is given {value}: {path}, which is in the batch or made outside of all modules",
    "parameter": "{module} has {value} in {path}",
    "output": "{module} makes {value}: {path}, of inputs and parameters that are finite",
    "code": "{module} makes {value} in its own code, before its part {part}: {path}",
    "loss": "the loss is {value}, though all that modules have made is finite",
    "gradient": "{module} makes {value} in its backward pass, in the gradient of {path}, of a gradient that is finite",
    "gradient_code": "{module} makes {value} in the backward pass of its own code, after its part {part}: {path}",
    "loss_gradient": "the loss makes {value} in its backward pass, in the gradient of {path} of {module}",
    "parameter_gradient": "the gradient of {path} of {module} alone has {value}: those that pass modules are finite",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Producer:
    """What made a value that is not finite of values that are.

    Attributes:
        kind: "output": of a module; "code": of a module, between two of its parts; "loss": of none; "gradient",
            "gradient_code" and "loss_gradient": the same in the backward pass; "parameter_gradient": of one parameter
            alone; "input" and "parameter": it was there before the pass.
        module: Clean name; empty for the model itself.
        path: Way to the tensor inside of what the module was given or has returned.
        value: "NaN", "Inf" or "-Inf".
        part: Module of `module` that stands next to the place.
    """

    kind: ProducerKind
    module: str
    path: str
    value: str
    part: str = ""

    @property
    def is_of_a_module(self) -> bool:
        """Whether a module can be blamed."""
        return bool(self.module) and self.kind not in ("input", "loss", "loss_gradient")

    @property
    def is_of_a_parameter(self) -> bool:
        """Whether the path is that of a parameter or buffer."""
        return self.kind in ("parameter", "parameter_gradient")

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(
            module=self.module or "the model", path=self.path, value=self.value, part=self.part or "the first"
        )


@dataclasses.dataclass
class Call:
    """One call of a module.

    Attributes:
        name: Clean name of the module.
        parent: Number of the call around it.
        depth: How many calls are around it.
        given: What it was given.
        state: Its own parameters and buffers.
        made: What it returned.
        given_nodes: Way and number of what gradients arrive for, of what it was given.
        made_nodes: The same of what it returned.
    """

    name: str
    parent: int | None
    depth: int
    given: list[Seen] = dataclasses.field(default_factory=list)
    state: list[Seen] = dataclasses.field(default_factory=list)
    made: list[Seen] = dataclasses.field(default_factory=list)
    given_nodes: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    made_nodes: list[tuple[str, int]] = dataclasses.field(default_factory=list)


def value_of(kinds: Kinds) -> str:
    """What a person calls it.

    Args:
        kinds: At least one of them.
    """
    return "NaN" if kinds[0] else "Inf" if kinds[1] else "-Inf"


def first_in_forward(calls: Sequence[Call], events: Sequence[Event], *, minus_counts: bool = False) -> Producer | None:
    """The first value that is not finite, and whose it is.

    The first event with one decides: whatever was before it is finite.

    Args:
        calls: By number.
        events: In the order of time.
        minus_counts: Whether minus infinity alone counts: masks are full of it.

    Example:
        >>> fine, bad = (False, False, False), (True, False, False)
        >>> calls = [Call("a", None, 0, [("input[0]", fine)], [], [("output", bad)]), Call("b", None, 0)]
        >>> first_in_forward(calls, [("enter", 0), ("exit", 0), ("enter", 1)]).module
        'a'
    """
    for what, number in events:
        call = calls[number]
        found = _bad(call.given if what == "enter" else call.made, minus_counts)
        if found is None:
            continue
        maker = call
        if what == "enter":
            if call.parent is None:
                return Producer(kind="input", module=call.name, path=found[0], value=value_of(found[1]))
            maker = calls[call.parent]
        own = _bad(maker.state, minus_counts)
        if own is not None:
            return Producer(kind="parameter", module=maker.name, path=own[0], value=value_of(own[1]))
        if what == "enter":
            return Producer(kind="code", module=maker.name, path=found[0], value=value_of(found[1]), part=call.name)
        return Producer(kind="output", module=call.name, path=found[0], value=value_of(found[1]))
    return None


def first_in_backward(calls: Sequence[Call], gradients: Sequence[tuple[int, Kinds]]) -> Producer | None:
    """The first gradient that is not finite, and who has made it of gradients that are.

    Args:
        calls: By number.
        gradients: Number of the node, and what its gradient has, in the order of time.
    """
    seen = {node for node, _ in gradients}
    first = next(((node, kinds) for node, kinds in gradients if any(kinds)), None)
    if first is None:
        return None
    node, value = first[0], value_of(first[1])
    takers = [(call, path) for call in calls for path, own in call.given_nodes if own == node]
    makers = [(call, path) for call in calls for path, own in call.made_nodes if own == node]
    # What a call has returned has a gradient that is finite: all gradients before this one are.
    takers = [(call, path) for call, path in takers if any(own in seen for _, own in call.made_nodes)]
    takers = [(call, path) for call, path in takers if all(own != node for _, own in call.made_nodes)]
    if takers:
        call, path = max(takers, key=lambda one: one[0].depth)
        return Producer(kind="gradient", module=call.name, path=path, value=value)
    if not makers:
        return None
    call, path = max(makers, key=lambda one: one[0].depth)
    # The calls around it that return the same tensor have nothing to do with it.
    returned_by = {id(maker) for maker, _ in makers}
    around = call.parent
    while around is not None and id(calls[around]) in returned_by:
        around = calls[around].parent
    if around is None:
        return Producer(kind="loss_gradient", module=call.name, path=path, value=value)
    return Producer(kind="gradient_code", module=calls[around].name, path=path, value=value, part=call.name)


def _bad(seen: Sequence[Seen], minus_counts: bool) -> Seen | None:
    return next(((path, kinds) for path, kinds in seen if kinds[0] or kinds[1] or (minus_counts and kinds[2])), None)
