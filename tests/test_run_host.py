"""What a callback may do with its host, and whose search a search is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import GradNormCallback, StabilizerCallback
from stabilizer.callbacks.order import Order
from tests.contract_hosts import HOSTS, OutOfDataError, make_host

KINDS = {"lightning.pytorch": "lightning", "pytorch_lightning": "lightning"}


class Joining(StabilizerCallback):
    """Notes what it is given, and when it is taken back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []
        self.told: list[str] = []

    def join_run(self, host: Any) -> None:
        self.seen.append((host.kind, host.engine is None, [type(one).__name__ for one in host.optimizers]))
        self.told.append(f"joined at {self.next_step()}")
        assert any(parameter.requires_grad for parameter in host.model.parameters())
        host.undo.append(lambda: self.told.append("left"))

    def on_gradients(self, context: Any) -> None:
        if self.host is not None and not context.step:
            self.told.append("first step")


class Searching(StabilizerCallback):
    """Asks for searches at some steps, and for another callback's."""

    localizes = True

    def __init__(self, *, at: tuple[int, ...] = (), asks: Searching | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.asks = at, asks
        self.searched: list[int] = []

    def on_gradients(self, context: Any) -> None:
        context.plan.search(torch.tensor(context.step in self.at))

    def localize(self, context: Any, steps: Any) -> bool:
        self.searched.append(context.step)
        if self.asks is not None:
            steps.ask(self.asks)
        return False


class SearchingFirst(Searching):
    order = Order.VERDICT


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", HOSTS)
def test_a_callback_joins_before_the_first_step_and_everything_is_put_back(name: str) -> None:
    callback = Joining()
    make_host(name).train([callback, GradNormCallback()], num_steps=2)
    assert callback.seen == [(KINDS.get(name, name), name == "plain", ["AdamW"])]
    assert callback.told == ["joined at 0", "first step", "left"]
    assert callback.host is None
    assert copy.deepcopy(callback).told == callback.told


@pytest.mark.parametrize("name", HOSTS)
def test_after_an_exception_too(name: str) -> None:
    callback = Joining()
    with pytest.raises(OutOfDataError):
        make_host(name).train([callback], num_steps=3, breaks_at=1)
    assert callback.told[-1] == "left"
    assert callback.host is None


@pytest.mark.parametrize("name", HOSTS)
def test_what_it_refuses_ends_the_start(name: str) -> None:
    class Refusing(Joining):
        def join_run(self, host: Any) -> None:
            super().join_run(host)
            raise ValueError("not here")

    callback = Refusing()
    with pytest.raises(ValueError, match="not here"):
        make_host(name).train([callback], num_steps=2)
    assert callback.told == ["joined at 0", "left"]


def test_a_search_is_only_for_those_who_want_it() -> None:
    later = Searching(at=(3,), name="later")
    first = SearchingFirst(at=(1, 2), asks=later)
    other = Searching(at=(2,), name="other")
    make_host("plain").train([other, later, first], num_steps=5)
    assert (first.searched, later.searched, other.searched) == ([1, 2], [1, 2, 3], [2])


def test_a_single_one_that_searches_needs_no_agreement() -> None:
    alone = Searching(at=(1,))
    make_host("plain").train([alone], num_steps=3)
    assert alone.searched == [1]
