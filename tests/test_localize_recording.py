"""The recorder: batches that are taken apart, and random states."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from stabilizer.localize.recording import Recorder
from stabilizer.localize.rng import RngState
from tests.stateful import Net, rng_fingerprint

CPU = torch.device("cpu")


def _recorder(model: nn.Module | None = None) -> Recorder:
    return Recorder(model or nn.Identity(), device=CPU)


# Batches.


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """Not to be assigned to."""

    x: Any
    y: Any = None


class Encoding(collections.UserDict[str, Any]):
    """As transformers' BatchEncoding: with attributes beside the data, and read through them too."""

    def __init__(self, data: Any = None, extra: Any = None) -> None:
        super().__init__(data)
        self.extra = extra


class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: assigning an entry assigns an attribute."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Custom:
    """Nothing that is known."""

    def __init__(self, x: Any) -> None:
        self.x = x


class View(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Any:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


_X = torch.arange(3.0)
_BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # name: (batch, what a step function does to it, what is read)
    "dictionary": (lambda: {"x": _X}, lambda b: b.pop("x"), lambda b: b["x"]),
    "list": (lambda: [_X], lambda b: b.clear(), lambda b: b[0]),
    "tuple": (lambda: ([_X], 1), lambda b: b[0].clear(), lambda b: b[0][0]),
    "named tuple": (lambda: Point([_X], 1), lambda b: b.x.clear(), lambda b: b.x[0]),
    "dataclass": (lambda: Sample({"a": [_X]}), lambda b: b.x["a"].pop(), lambda b: b.x["a"][0]),
    "encoding": (lambda: Encoding({"x": [_X]}, 3), lambda b: b.pop("x"), lambda b: b["x"][b.extra - 3]),
    "in an encoding": (lambda: Encoding({"x": [_X]}), lambda b: b["x"].pop(), lambda b: b["x"][0]),
    "output": (lambda: Output(x=[_X]), lambda b: b["x"].pop(), lambda b: b.x[0]),
    "default dictionary": (lambda: collections.defaultdict(list, x=[_X]), lambda b: b["x"].pop(), lambda b: b["x"][0]),
    "object": (lambda: Custom(_X), lambda b: vars(b).clear(), lambda b: b.x),
    "mapping": (lambda: View(x=_X), lambda b: None, lambda b: b["x"]),
    "view of a mapping": (lambda: MappingProxyType({"x": _X}), lambda b: None, lambda b: b["x"]),
    "packed": (lambda: pack_sequence([_X]), lambda b: None, lambda b: b.data),
    "set": (lambda: (_X, {1}), lambda b: b[1].clear(), lambda b: b[min(b[1]) - 1]),
    "deque": (lambda: collections.deque([_X]), lambda b: b.pop(), lambda b: b[0]),
    "tensor": (lambda: _X, lambda b: None, lambda b: b),
    "with a lock": (lambda: {"x": _X, "lock": threading.Lock()}, lambda b: b.pop("x"), lambda b: b["x"]),
}


@pytest.mark.parametrize(("make", "spoil", "read"), _BATCHES.values(), ids=_BATCHES.keys())
@pytest.mark.parametrize("way", ["positional", "keyword"])
def test_batches_of_every_kind_can_be_taken_apart(
    make: Callable[[], Any], spoil: Callable[[Any], Any], read: Callable[[Any], Any], way: str
) -> None:
    batch, kind = make(), type(make())
    recorder = _recorder()
    recorder.record((batch, 0), {}) if way == "positional" else recorder.record((), {"batch": batch})
    spoil(batch)
    for _ in range(3):
        args, kwargs = recorder.micro_batches[0].call()
        again = args[0] if way == "positional" else kwargs["batch"]
        assert type(again) is kind
        # The very tensor: it costs no memory.
        found = read(again)
        assert found is _X or (kind.__name__ == "PackedSequence" and torch.equal(found, _X))
        spoil(again)


def test_one_list_in_two_places_is_one_list_and_a_circle_a_circle() -> None:
    shared: list[Any] = [_X]
    batch: dict[str, Any] = {"a": shared, "b": (shared,)}
    batch["self"] = batch
    micro_batch = _recorder().record((batch, shared), {"again": shared})
    arguments, kwargs = micro_batch.call()
    one, two = arguments
    assert one["a"] is one["b"][0] is two is kwargs["again"]
    assert one["a"] is not shared
    assert one["self"] is one


def test_iterators_and_modules_are_handed_on() -> None:
    stream, model = iter([1, 2]), nn.Linear(2, 2)
    (first, second), _ = _recorder().record((stream, model), {}).call()
    assert first is stream
    assert second is model


def test_tensors_that_were_changed_in_place_are_named() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(2, 3), "deep": [(torch.zeros(2),)], "kept": torch.zeros(2)}
    with torch.inference_mode():
        inference = torch.zeros(1)
    sample = Sample(torch.zeros(1), Custom(torch.zeros(1)))
    micro_batch = _recorder().record((batch, sample), {"mask": torch.zeros(2), "still": inference})
    assert micro_batch.changed() == []
    (again, same), kwargs = micro_batch.call()
    again["x"][:, 1].add_(1)
    batch["deep"][0][0].mul_(2)
    same.y.x.zero_()
    kwargs["mask"].fill_(1)
    assert sorted(micro_batch.changed()) == ["0.deep.0.0", "0.x", "1.y.x", "mask"]


# Steps.


def test_micro_batches_stay_until_the_next_step_begins() -> None:
    recorder = _recorder()
    numbers = [recorder.record((n,), {}).index for n in range(3)]
    recorder.end_step()
    kept = [micro_batch.args for micro_batch in recorder.micro_batches]
    first = recorder.record((3,), {})
    assert numbers == [0, 1, 2]
    assert kept == [(0,), (1,), (2,)]
    assert first.index == 0
    assert first.weight is None
    assert recorder.micro_batches == [first]
    recorder.clear()
    assert recorder.micro_batches == []
    assert recorder.record((4,), {}).index == 0


# Random states.


def _draw(model: Net) -> list[float]:
    own = [float(torch.rand(1, generator=model.generator)), model.dice.random(), float(model.numbers.random())]
    return [float(torch.rand(1)), random.random(), random.gauss(0, 1), float(np.random.randn()), *own]


def test_every_generator_is_rewound_to_its_micro_batch() -> None:
    model = Net()
    recorder = _recorder(model)
    drawn = []
    for number in range(3):
        random.gauss(0, 1)  # keeps a second value for later
        recorder.record((number,), {})
        drawn.append(_draw(model))
    for number in (1, 0, 2, 2):
        recorder.micro_batches[number].restore()
        assert _draw(model) == drawn[number]


def test_recording_draws_nothing() -> None:
    model = Net()
    before = rng_fingerprint()
    _recorder(model).record((), {})
    assert rng_fingerprint() == before


def test_the_device_is_not_started_by_asking_for_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert RngState.capture(torch.device("cuda", 0)).accelerator is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    states = {0: torch.ones(1), 1: torch.zeros(1)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device.index, state))
    state = RngState.capture(torch.device("cuda", 1))
    states[1] = torch.full((1,), 5.0)
    state.restore()
    assert states[1].item() == 0
