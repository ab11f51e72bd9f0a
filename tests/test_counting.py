"""The counters of `tests.counting` see what they claim to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests import sharding
from tests.counting import HostReadError, count_collectives, count_host_reads, fake_cuda
from tests.launcher import run_distributed
from tests.models import TinyTransformer, loss_of, make_mlp, mlp_batch


def _counted(function: Callable[[], Any]) -> tuple[Counter[str], list[tuple[int, ...]]]:
    with count_collectives() as calls:
        function()
    return calls.names, calls.sizes


def _waited(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _plain(rank: int, world_size: int) -> dict[str, tuple[Counter[str], list[tuple[int, ...]]]]:
    t, own = torch.ones(4), dist.new_group()
    return {
        "all_reduce": _counted(lambda: dist.all_reduce(t)),
        "own group": _counted(lambda: _waited(dist.all_reduce(t.double(), group=own, async_op=True))),
        "barrier": _counted(dist.barrier),
        "send and receive": _counted(lambda: dist.send(t, 1) if rank == 0 else dist.recv(t, 0)),
        "isend and irecv": _counted(lambda: _waited(dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0))),
        "broadcast": _counted(lambda: dist.broadcast(t, 0)),
        "object": _counted(lambda: dist.all_gather_object([None] * world_size, 1)),
        "functional": _counted(lambda: functional.wait_tensor(functional.all_reduce(t, "sum", own))),
        "none": _counted(lambda: (t + 1).sum().item()),
    }


def test_plain_collectives_are_counted() -> None:
    first, second = run_distributed(_plain)
    expected = {
        "all_reduce": (["c10d.allreduce_.default"], [(16,)]),
        "own group": (["c10d.allreduce_.default"], [(32,)]),
        "broadcast": (["c10d.broadcast_.default"], [(16,)]),
        "functional": (["_c10d_functional.all_reduce.default"], [(16,)]),
        "none": ([], []),
    }
    for name, (names, sizes) in expected.items():
        assert first[name] == second[name] == (Counter(names), sizes), name
    assert first["barrier"][0] == second["barrier"][0] == {"c10d.barrier.default": 1}
    assert first["object"][0] == {"c10d.allgather_.default": 2}
    for kind in ("send and receive", "isend and irecv"):
        assert first[kind] == (Counter(["c10d.send.default"]), [(16,)])
        assert second[kind] == (Counter(["c10d.recv_.default"]), [(16,)])


def _wrapped(rank: int, world_size: int) -> dict[str, Counter[str]]:
    counts = {}
    batch = mlp_batch(rank)
    models = {
        "ddp": DistributedDataParallel(make_mlp()),
        "fsdp1": sharding.shard_fsdp1(make_mlp()),
        "fsdp2": sharding.shard_fsdp2(make_mlp()),
    }
    for name, model in models.items():
        with count_collectives() as forward:
            loss = loss_of(model, batch)
        counts[f"{name} forward"] = forward.names
        counts[f"{name} backward"] = _counted(loss.backward)[0]
    parameters = list(models["fsdp2"].parameters())
    counts["clip"] = _counted(lambda: sharding.full(nn.utils.clip_grad_norm_(parameters, 1.0)))[0]
    tensor = distribute_tensor(torch.ones(4, 4), sharding.mesh_1d(), [Shard(0)])
    counts["full_tensor"] = _counted(tensor.full_tensor)[0]
    return counts


def test_collectives_of_wrappers_and_dtensor_are_counted() -> None:
    for counts in run_distributed(_wrapped):
        assert counts["ddp forward"] == {}
        assert counts["ddp backward"] == {"c10d.allreduce_.default": 1}
        assert counts["fsdp1 backward"]["c10d._reduce_scatter_base_.default"] == 2
        # Two groups of parameters: the root's is gathered once, the block's again for its backward.
        assert counts["fsdp2 forward"] == {"c10d._allgather_base_.default": 2}
        assert counts["fsdp2 backward"] == {"c10d._allgather_base_.default": 1, "c10d._reduce_scatter_base_.default": 2}
        assert counts["clip"] == {"_c10d_functional.all_reduce.default": 1}
        assert counts["full_tensor"] == {"_c10d_functional.all_gather_into_tensor.default": 1}


def test_difference_of_two_counts() -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    model = make_mlp()
    loss_of(model, mlp_batch()).backward()
    with count_host_reads() as without:
        step(torch.optim.AdamW(model.parameters()))
    with count_host_reads() as with_read:
        step(torch.optim.AdamW(model.parameters()))
        assert next(model.parameters()).sum().item() != 0
    assert with_read.minus(without) == {"aten._local_scalar_dense.default": 1}


_T = torch.arange(4.0)
READS: dict[str, Callable[[], object]] = {
    "aten._local_scalar_dense.default": lambda: _T.sum().item(),
    "aten.equal.default": lambda: torch.equal(_T, _T),
    "aten.nonzero.default": lambda: _T.nonzero(),
    "aten.masked_select.default": lambda: _T.masked_select(_T > 1),
    "aten.index.Tensor": lambda: _T[_T > 1],
}


@pytest.mark.parametrize("name", READS)
def test_host_reads_are_counted(name: str) -> None:
    with count_host_reads() as calls:
        READS[name]()
    assert calls.names == {name: 1}


@pytest.mark.parametrize("read", [float, int, bool, lambda t: 1 if t > 0 else 2], ids=["float", "int", "bool", "if"])
def test_conversions_are_counted(read: Callable[[torch.Tensor], object]) -> None:
    with count_host_reads() as calls:
        read(torch.tensor(2.0))
    assert calls.names == {"aten._local_scalar_dense.default": 1}


def test_a_quiet_computation_counts_nothing() -> None:
    with count_host_reads() as calls:
        torch.where(_T > 1, _T, 0.0).norm()
    assert len(calls) == 0


#: What makes the host wait; each takes a fake tensor on the device.
WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.sum()),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "in": lambda t: t.sum() in t,
    "max": lambda t: max(t[0], t[1]),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: torch.unique(t),
    "bincount": lambda t: torch.bincount(t.long()),
    "mask": lambda t: t[t > 0],
    "index": lambda t: t[torch.zeros((), dtype=torch.long, device="cuda")],
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "copy to cpu": lambda t: torch.empty(4).copy_(t),
    "copy to device": lambda t: t.copy_(torch.empty(4)),
    "to device": lambda t: torch.ones(4).to("cuda"),
    "tensor": lambda t: torch.tensor(1.0, device="cuda"),
    "event": lambda t: torch.cuda.Event().synchronize(),
    "synchronize": lambda t: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_fake_cuda_raises_where_the_host_would_wait(name: str) -> None:
    with fake_cuda():
        tensor = torch.ones(4, device="cuda")
        with pytest.raises(HostReadError, match=r"would wait"):
            WAITS[name](tensor)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda t: t.numpy(), RuntimeError),
        (np.asarray, RuntimeError),
        (lambda t: f"{t.sum():.2f}", TypeError),
        (lambda t: t.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")), RuntimeError),
    ],
    ids=["numpy", "asarray", "format", "repeat_interleave"],
)
def test_fake_cuda_raises_as_torch_does(read: Callable[[torch.Tensor], object], error: type[Exception]) -> None:
    with fake_cuda():
        tensor = torch.ones(4, device="cuda")
        with pytest.raises(error):
            read(tensor)


def test_fake_cuda_lets_quiet_work_pass() -> None:
    outside = torch.tensor(3.0)
    with fake_cuda():
        with torch.device("cuda"):
            model = TinyTransformer()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        assert norm.device.type == "cuda"
        host = norm.to("cpu", non_blocking=True)
        assert host.device.type == "cpu"
        torch.empty(4).copy_(torch.ones(4, device="cuda"), non_blocking=True)
        norm.copy_(norm * 2)
        norm.add_(torch.full((), 2.0, device="cuda"))
        gradients[0][0] = 0.0
        gradients[0][gradients[0] > 0] = 1.0
        torch.optim.AdamW(model.parameters(), fused=True).step()
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        # The host's own numbers cost no wait.
        assert outside.item() == 3.0
        assert float(outside) == 3.0
        assert torch.tensor(4.0).item() == 4.0


def test_fake_cuda_leaves_nothing_behind() -> None:
    before = torch.cuda.Event
    with fake_cuda(), count_host_reads(device_type="cuda") as calls:
        tensor = torch.ones(4, device="cuda")
        with pytest.raises(HostReadError):
            tensor.sum().item()
    assert calls.names == {"aten._local_scalar_dense.default": 1}
    assert torch.cuda.Event is before
    assert torch.ones(2).sum().item() == 2.0
