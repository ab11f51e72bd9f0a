"""The recorder's buffers: copied only where they move, and put back as they were before each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.localize import buffers
from stabilizer.localize.recording import MicroBatch, Recorder
from tests.counting import fake_cuda, host_may_wait
from tests.stateful import fingerprint

CPU = torch.device("cpu")


def _recorder(model: nn.Module) -> Recorder:
    return Recorder(model, device=CPU)


class Buffered(nn.Module):
    """A constant, one that moves, one that moves unseen, one that is replaced, one that is none."""

    mask: Tensor
    moving: Tensor
    unseen: Tensor
    new: Tensor

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size, size).tril())
        self.register_buffer("rope", torch.randn(size, 2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("moving", torch.zeros(3))
        self.register_buffer("unseen", torch.zeros(3))
        self.register_buffer("new", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        """Move them."""
        self.moving += 1
        self.unseen.data.add_(1)
        self.new = self.new + 1
        output: Tensor = self.norm(x)
        return output


def _copies(micro_batch: MicroBatch) -> dict[str, int | None]:
    """Where the copies of buffers are."""
    return {b.name: None if b.value is None else b.value.data_ptr() for b in micro_batch.buffers}


def test_constants_are_not_copied_again() -> None:
    model = Buffered()
    recorder = _recorder(model)
    places = []
    for _ in range(8):
        places.append(_copies(recorder.record((), {})))
        model(torch.randn(4, 3))
        if len(places) % 4 == 0:
            recorder.end_step()
    # Values are compared after 1, 2, 4 micro-batches: from there to 8 nothing is copied that stands still.
    assert {n for n in places[0] if len({place[n] for place in places[4:]}) == 1} == {"mask", "rope", "nothing"}


def test_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Buffered()
    recorder = _recorder(model)
    copied: list[int] = []
    copies = buffers._copies

    def count(tensors: Sequence[Tensor]) -> list[Tensor]:
        copied.append(len(tensors))
        return copies(tensors)

    monkeypatch.setattr(buffers, "_copies", count)
    for _ in range(6):
        recorder.record((), {})
        model(torch.randn(4, 3))
    # All; all once more for each comparison; else those that move: three, and the three of the norm.
    assert copied == [8, 8, 8, 6, 8, 6]
    model.eval()
    for _ in range(3):
        recorder.record((), {})
    # The last moves; then those that were seen to move unseen: batch norm's kernels do not count what they change.
    assert copied[6:] == [6, 3, 8]


def test_a_norm_that_is_trained_late_is_copied_from_then_on() -> None:
    model = nn.BatchNorm1d(3).eval()
    recorder = _recorder(model)
    for number in range(100):
        recorder.record((), {})
        model(torch.randn(4, 3))
        if number == 70:
            model.train()
    kept = fingerprint(dict(model.named_buffers()))
    last = recorder.record((), {})
    model(torch.randn(4, 3))
    last.restore()
    assert fingerprint(dict(model.named_buffers())) == kept


def test_buffers_come_back_as_they_were_before_each_micro_batch() -> None:
    model = Buffered()
    recorder = _recorder(model)
    worth = []
    for _ in range(5):
        recorder.record((), {})
        worth.append(fingerprint(dict(model.named_buffers())))
        model(torch.randn(4, 3))
    for number in (4, 0, 2, 2, 1, 3):
        recorder.micro_batches[number].restore()
        assert fingerprint(dict(model.named_buffers())) == worth[number]
        model(torch.randn(4, 3))
    assert recorder.micro_batches[0].changed() == []


def test_a_replaced_buffer_keeps_its_copy_when_the_replay_writes_into_it() -> None:
    model = Buffered()
    recorder = _recorder(model)
    recorder.record((), {})
    model.new = torch.tensor(5.0)
    micro_batch = recorder.micro_batches[0]
    for _ in range(2):
        micro_batch.restore()
        assert model.new == 0
        model.new += 3


def test_a_buffer_that_was_not_there_or_nothing() -> None:
    model = Buffered()
    recorder = _recorder(model)
    recorder.record((), {})
    model._buffers["nothing"] = torch.ones(2)
    model.norm.register_buffer("late", torch.ones(2))
    recorder.record((), {})
    recorder.micro_batches[0].restore()
    assert model._buffers["nothing"] is None
    model.norm.get_buffer("late").add_(1)
    recorder.micro_batches[1].restore()
    assert model.norm.get_buffer("late").tolist() == [1, 1]


def test_large_constants_are_never_copied_and_large_buffers_once_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_SMALL", 8 * 8 * 4 - 1)
    model = Buffered()
    recorder = _recorder(model)
    for _ in range(3):
        micro_batch = recorder.record((), {})
        assert _copies(micro_batch)["mask"] is None
        model(torch.randn(4, 3))
    before = fingerprint(model.mask)
    micro_batch.restore()
    assert micro_batch.changed() == []
    assert fingerprint(model.mask) == before
    model.mask.mul_(2)
    # Its value then is gone, and that is said.
    assert micro_batch.changed() == ["buffer mask"]
    second = recorder.record((), {})
    worth = fingerprint(model.mask)
    model.mask.mul_(2)
    assert second.changed() == []
    second.restore()
    assert fingerprint(model.mask) == worth


def test_buffers_of_every_kind() -> None:
    with torch.inference_mode():
        inference = torch.zeros(2)
    model: Any = nn.LazyBatchNorm1d()
    for name, tensor in {
        "flags": torch.ones(2, dtype=torch.bool),
        "strided": torch.arange(6).view(2, 3).t(),
        "expanded": torch.zeros(1).expand(3),
        "half_": torch.ones(2, dtype=torch.bfloat16),
        "inference": inference,
        "sparse": torch.eye(2).to_sparse(),
        "leaf": torch.ones(2, requires_grad=True),
        "nan": torch.tensor([torch.nan]),
        "empty": torch.zeros(0, 3),
    }.items():
        model.register_buffer(name, tensor)
    recorder = _recorder(model)
    for _ in range(3):
        recorder.record((), {})
    with torch.no_grad(), torch.inference_mode():
        inference.add_(1)
    model.flags.logical_not_()
    model.strided.mul_(2)
    model.half_.add_(1)
    model.leaf.data.add_(1)
    recorder.micro_batches[-1].restore()
    assert model.flags.all()
    assert model.strided.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert model.half_.tolist() == [1, 1]
    assert inference.tolist() == [0, 0]
    assert model.sparse.to_dense().tolist() == [[1, 0], [0, 1]]
    model(torch.randn(4, 3))
    recorder.record((), {})
    model.running_mean.fill_(9)
    recorder.micro_batches[-1].restore()
    assert not (model.running_mean == 9).any()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_no_wait_for_the_device() -> None:
    with fake_cuda():
        with torch.device("cuda", 0), host_may_wait():
            model = Buffered()
            x = torch.randn(4, 3)
        recorder = Recorder(model, device=torch.device("cuda", 0))
        for _ in range(4):
            recorder.record(({"x": x},), {})
            model(x)
        recorder.end_step()
        recorder.micro_batches[0].restore()
