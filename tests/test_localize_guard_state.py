"""The guard's snapshot: tensors and objects of every kind on modules, and those that are not the user's own."""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stabilizer.localize.guard import Guard
from stabilizer.localize.state import Snapshot
from tests.stateful import Stats, fingerprint

CPU = torch.device("cpu")


def _guard(model: nn.Module) -> Guard:
    return Guard(model, parameters=list(model.parameters()), device=CPU)


def _tensors() -> Iterator[tuple[str, Callable[[], Tensor], Callable[[Tensor], Any]]]:
    with torch.inference_mode():
        inference = torch.zeros(3)

    def add_inference(tensor: Tensor) -> None:
        with torch.inference_mode():
            tensor.add_(1)

    yield "expanded", lambda: torch.zeros(2, 1).expand(2, 5), lambda t: t[:, :1].add_(1)
    yield "transposed", lambda: torch.arange(6.0).view(2, 3).t(), lambda t: t.mul_(-1)
    yield "bool", lambda: torch.zeros(3, dtype=torch.bool), lambda t: t.logical_not_()
    yield "bfloat16", lambda: torch.ones(3, dtype=torch.bfloat16), lambda t: t.div_(3)
    yield "NaN and -0.0", lambda: torch.tensor([torch.nan, -0.0, torch.inf]), lambda t: t.fill_(0)
    yield "unseen", lambda: torch.zeros(3), lambda t: t.data.add_(1)
    yield "data replaced", lambda: torch.zeros(3), lambda t: setattr(t, "data", torch.ones(3))
    yield "resized", lambda: torch.zeros(3), lambda t: t.resize_(5).fill_(1)
    yield "empty", lambda: torch.zeros(0), lambda t: t.resize_(2).fill_(1)
    yield "leaf", lambda: torch.zeros(3, requires_grad=True), lambda t: t.data.add_(1)
    yield "with a graph", lambda: torch.zeros(3, requires_grad=True) * 2, lambda t: t.detach().add_(1)
    yield "inference", lambda: inference, add_inference
    yield "complex", lambda: torch.zeros(2, dtype=torch.complex64), lambda t: t.add_(1j)


@pytest.mark.parametrize(("make", "change"), [case[1:] for case in _tensors()], ids=[case[0] for case in _tensors()])
@pytest.mark.parametrize("place", ["attribute", "buffer", "list"])
def test_tensors_of_every_kind(make: Callable[[], Tensor], change: Callable[[Tensor], Any], place: str) -> None:
    model: Any = nn.Linear(2, 2)
    tensor = make()
    if place == "buffer":
        model.register_buffer("held", tensor)
    else:
        model.held = tensor if place == "attribute" else [{"deep": (tensor,)}]
    before, version = fingerprint(tensor), None if tensor.is_inference() else tensor._version
    with _guard(model):
        change(tensor)
        assert fingerprint(tensor) != before
    held = model.held if place != "list" else model.held[0]["deep"][0]
    assert held is tensor
    assert fingerprint(tensor) == before
    assert tensor.is_inference() or tensor._version == version


class _Plain:
    """Of the user's own; without anything else."""

    def __init__(self, **values: Any) -> None:
        self.value = 0
        vars(self).update(values)


class _MyOptimizer(torch.optim.SGD):
    """Of the user's own, made from one of torch."""


class _MySet(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.value = 0


class _MyLogger(logging.Logger):
    pass


class _MyThread(threading.Thread):
    pass


def _trainer() -> Any:
    from lightning.pytorch import Trainer

    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)


def _my_callback() -> Any:
    from lightning.pytorch import Callback

    return type("Mine", (Callback,), {"__module__": __name__})()


_STRANGERS: dict[str, Callable[[], Any]] = {
    "trainer": _trainer,
    "callback of the user's own": _my_callback,
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
    "optimizer of the user's own": lambda: _MyOptimizer([nn.Parameter(torch.zeros(1))], lr=0.1),
    "loader": lambda: torch.utils.data.DataLoader([0, 1]),  # type: ignore[arg-type]
    "dataset of the user's own": _MySet,
    "logger": lambda: _MyLogger("mine"),
    "thread": _MyThread,
    "service with a lock": lambda: _Plain(lock=threading.Lock()),
    "service with a thread": lambda: _Plain(worker=threading.Thread()),
    "service with a queue": lambda: _Plain(inbox=queue.Queue()),
    "service with a file": lambda: _Plain(file=open("/dev/null")),  # noqa: SIM115
    "class": lambda: type("Mine", (), {}),
}


@pytest.mark.parametrize("make", _STRANGERS.values(), ids=_STRANGERS.keys())
@pytest.mark.parametrize("place", ["attribute", "list", "object"])
def test_what_is_not_the_users_own_is_not_rewound(make: Callable[[], Any], place: str) -> None:
    stranger = make()
    model: Any = nn.Linear(2, 2)
    model.held = {"attribute": stranger, "list": [stranger], "object": _Plain(inner=stranger)}[place]
    stranger.value = 1
    with _guard(model):
        stranger.value = 2
        stranger.other = 3
    assert (stranger.value, stranger.other) == (2, 3)
    if "file" in vars(stranger):
        stranger.file.close()


def test_a_process_group_and_what_it_holds_are_not_looked_into(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model: Any = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
        model.module.group = dist.group.WORLD
        require = model.require_backward_grad_sync
        with _guard(model):
            model.require_backward_grad_sync = not require
            model.eval()
            model(torch.randn(3, 2))
        assert model.require_backward_grad_sync is not require
        assert model.training
        assert model.module.training
    finally:
        dist.destroy_process_group()


def _own() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    yield "object", _Plain, lambda held: setattr(held, "value", 5)
    yield "new attribute", _Plain, lambda held: setattr(held, "other", 5)
    yield "lost attribute", _Plain, lambda held: delattr(held, "value")
    yield "object in an object", lambda: _Plain(inner=[Stats()]), lambda held: held.inner[0].losses.append(1.0)
    yield "namespace", lambda: SimpleNamespace(n=[1]), lambda held: held.n.pop()
    yield "user dictionary", lambda: collections.UserDict(a=[1]), lambda held: held.update(b=2)
    yield "order of keys", lambda: {"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))
    yield "default dictionary", lambda: collections.defaultdict(list), lambda held: held["x"]
    yield "full deque", lambda: collections.deque([1, 2], maxlen=2), lambda held: held.append(3)
    yield "set", lambda: {1, 2}, lambda held: held.discard(1)
    yield "array", lambda: np.array([1.0, np.nan]), lambda held: held.__setitem__(0, 3.0)
    yield "empty array", lambda: np.array(1), lambda held: held.fill(3)
    yield "array of objects", lambda: np.array([None, "a"], dtype=object), lambda held: held.__setitem__(0, 3.0)
    yield "state of numpy", lambda: np.random.RandomState(1), lambda held: held.randn()
    yield "list of metrics", lambda: [_metric()], lambda held: held[0].update(3.0)


def _metric() -> Any:
    from torchmetrics import MeanMetric

    return MeanMetric()


def _worth(held: Any) -> Any:
    if isinstance(held, np.random.RandomState):
        return repr(held.get_state())
    if isinstance(held, np.ndarray):
        return repr(held)
    held = vars(held) if isinstance(held, _Plain | collections.UserDict) else held
    return fingerprint({key: _worth(item) for key, item in held.items()} if isinstance(held, dict) else held)


@pytest.mark.parametrize(("make", "change"), [case[1:] for case in _own()], ids=[case[0] for case in _own()])
def test_what_is_the_users_own_is(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    held = model[0].held = make()
    before = _worth(held)
    with _guard(model):
        change(held)
        assert _worth(held) != before
    assert model[0].held is held
    assert _worth(held) == before


def test_modules_that_come_and_go_come_and_go_back() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, layout = model[0], list(model._modules)
    with _guard(model):
        del model[0]
        model.append(nn.Linear(2, 2))
        model.register_buffer("late", torch.zeros(1))
    assert model[0] is first
    assert list(model._modules) == layout
    assert list(model.buffers()) == []


def test_hooks_stay_as_they_have_become() -> None:
    model = nn.Linear(2, 2)
    early = model.register_forward_hook(lambda *args: None)
    with _guard(model):
        early.remove()
        late = model.register_forward_pre_hook(lambda *args: None)
    assert not model._forward_hooks
    assert list(model._forward_pre_hooks) == [late.id]


def test_structures_that_hold_themselves_and_deep_ones() -> None:
    model: Any = nn.Linear(2, 2)
    model.loop = [1]
    model.loop.append(model.loop)
    model.back = _Plain(owner=model)
    deep = model.deep = []
    for _ in range(5000):
        deep.append([])
        deep = deep[0]
    with _guard(model):
        model.loop.append(2)
        model.back.value = 2
        deep.append(3)
    assert len(model.loop) == 2
    assert model.back.value == 0
    assert deep == []


def test_a_freed_view_is_left_alone() -> None:
    """What FSDP1 without original parameters leaves on modules: views of memory that is gone."""
    flat = torch.zeros(6)
    model: Any = nn.Linear(2, 2)
    model.view = flat[:4].view(2, 2)
    flat.untyped_storage().resize_(0)
    snapshot = Snapshot(model)
    flat.untyped_storage().resize_(24)
    flat.fill_(7)
    snapshot.restore()
    assert flat.tolist() == [7] * 6
