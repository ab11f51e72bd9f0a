"""The guard on several ranks: DDP, FSDP1 and FSDP2 train the same bits with replays inside it as without."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stabilizer.localize.guard import Guard
from stabilizer.localize.recording import Recorder
from tests.launcher import run_distributed
from tests.sharding import mesh_1d
from tests.stateful import differences, fingerprint, rng_fingerprint

CPU = torch.device("cpu")


class Part(nn.Module):
    """5 -> 5, with dropout, a norm that is trained, and a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 5) to the same."""
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.3, self.training)
        self.seen.append(float(x.detach().sum()))
        return x


class Stack(nn.Module):
    """Three parts and a head that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 5) to (batch, 1)."""
        for part in self.parts:
            x = part(x)
        output: Tensor = self.head(x)
        return output


def _wrapped(kind: str) -> nn.Module:
    model = Stack()
    if kind.startswith("ddp"):
        return DistributedDataParallel(
            model, gradient_as_bucket_view=kind != "ddp, copies", static_graph="static" in kind
        )
    if kind.startswith("fsdp2"):
        # Gradients wait in another place where they are added up in another type.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if "mixed" in kind else None)
        for part in [*model.parts, model]:
            fully_shard(part, mesh=mesh_1d(), reshard_after_forward="kept" not in kind, mp_policy=policy)
        return model
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": "flat" not in kind}
    if "whole" in kind:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    model.parts = nn.ModuleList(FullyShardedDataParallel(part, **options) for part in model.parts)
    return FullyShardedDataParallel(model, **options)


def _quiet(model: Any, kind: str, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    """No reduction for all but the last micro-batch."""
    if "no_sync" not in kind:
        return contextlib.nullcontext()
    if not kind.startswith("fsdp2"):
        return contextlib.nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def _trained(rank: int, kind: str, replay: str, set_to_none: bool) -> Any:
    """Six steps of two micro-batches: what everything is worth afterwards."""
    model: Any = _wrapped(kind)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder, generator = Recorder(model, device=CPU), torch.Generator().manual_seed(rank)
    torch.manual_seed(10 + rank)
    seen: list[Any] = []
    for _ in range(6):
        for number in range(2):
            x = torch.randn(4, 5, generator=generator)
            recorder.record((x,), {})
            with _quiet(model, kind, number == 1):
                model(x).square().mean().backward()
        recorder.end_step()
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        if replay != "none":
            with Guard(inner, parameters=optimizer.param_groups[0]["params"], device=CPU) as guard:
                for micro_batch in recorder.micro_batches:
                    guard.restore_buffers(micro_batch)
                    # The whole gradient of this rank, where the strategy can leave it unreduced.
                    with _quiet(model, kind, replay != "unreduced"):
                        loss = inner(*micro_batch.call()[0]).square().mean()
                        if replay != "forward":
                            loss.backward()
        again = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        assert all(one is other for one, other in zip(gradients, again, strict=True))
        seen.append(fingerprint(again))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    if isinstance(model, FullyShardedDataParallel):
        state: Any = [
            fingerprint(list(model.parameters())),
            [module.seen for module in model.modules() if _has(module)],
        ]
    else:
        # Hooks are numbered through the process.
        state = fingerprint(inner, names=tuple(name for name in vars(nn.Module()) if "hook" in name))
    return seen, state, fingerprint(dict(model.named_buffers())), fingerprint(optimizer.state_dict()), rng_fingerprint()


def _has(module: nn.Module) -> bool:
    return isinstance(module, Part)


def compared(rank: int, world_size: int, kind: str) -> list[str]:
    """Where runs with and without replays differ."""
    found = []
    for set_to_none in (True, False):
        plain = _trained(rank, kind, "none", set_to_none)
        for replay in ("full", "forward", "unreduced") if "no_sync" in kind else ("full", "forward"):
            places = differences(plain, _trained(rank, kind, replay, set_to_none))
            found += [f"{replay}, {set_to_none}: {place}" for place in places]
    return found


_KINDS = [
    "ddp",
    "ddp, copies",
    "ddp, static",
    "ddp, no_sync",
    "fsdp2",
    "fsdp2, kept",
    "fsdp2, no_sync",
    "fsdp2, no_sync, mixed",
    "fsdp1",
    "fsdp1, flat",
    "fsdp1, whole",
    "fsdp1, no_sync",
]


@pytest.mark.parametrize("kind", _KINDS)
def test_training_is_the_same_bit_for_bit(kind: str) -> None:
    assert run_distributed(compared, kind) == [[], []]


def gradients_twice(rank: int, world_size: int, kind: str) -> Any:
    """The gradients of a micro-batch and of its replay."""
    model: Any = _wrapped(kind)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    torch.manual_seed(10 + rank)
    recorder, parameters = Recorder(model, device=CPU), list(model.parameters())
    found = []
    for _ in range(3):
        recorder.record((torch.randn(4, 5),), {})
        model.zero_grad()
        with model.no_sync() if kind == "ddp" else contextlib.nullcontext():
            model(*recorder.micro_batches[-1].call()[0]).square().mean().backward()
        found.append(fingerprint([parameter.grad for parameter in parameters]))
        # Not what the next one has before it.
        for buffer in model.buffers():
            buffer.mul_(3)
    again = []
    with Guard(inner, parameters=parameters, device=CPU) as guard:
        for number in (2, 0, 1):
            guard.restore_buffers(recorder.micro_batches[number])
            for parameter in parameters:
                parameter.grad = None
            inner(*recorder.micro_batches[number].call()[0]).square().mean().backward()
            again.append(fingerprint([parameter.grad for parameter in parameters]))
    return found, [again[1], again[2], again[0]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_the_replayed_gradient_is_the_first_one_bit_for_bit(kind: str) -> None:
    for found, again in run_distributed(gradients_twice, kind):
        assert differences(found, again) == []


def sharded_buffers(rank: int, world_size: int) -> Any:
    """A sharded buffer and a sharded attribute, before, in and after a replay."""
    model: Any = nn.Linear(2, 2)
    model.register_buffer("table", distribute_tensor(torch.zeros(4, 2), mesh_1d(), [Shard(0)]))
    model.held = [distribute_tensor(torch.zeros(4, 2), mesh_1d(), [Replicate()])]
    recorder = Recorder(model, device=CPU)
    for _ in range(3):
        recorder.record((), {})
        model.table.add_(1)
    with Guard(model, parameters=list(model.parameters()), device=CPU) as guard:
        guard.restore_buffers(recorder.micro_batches[1])
        inside = model.table.to_local().tolist()
        model.held[0].add_(1)
    return inside, model.table.to_local().tolist(), model.held[0].to_local().tolist()


def test_sharded_tensors() -> None:
    for inside, table, held in run_distributed(sharded_buffers):
        assert (inside, table, held) == ([[1, 1]] * 2, [[3, 3]] * 2, [[0, 0]] * 4)


def gathered_views(rank: int, world_size: int) -> Any:
    """What FSDP1 hangs on modules is what FSDP1 last made of it."""
    model: Any = _wrapped("fsdp1, flat")
    model(torch.randn(4, 5)).sum().backward()
    linear = model.module.parts[0].module.linear
    with Guard(model, parameters=list(model.parameters()), device=CPU):
        view, linear.note = torch.zeros(5, 5), 1
        vars(linear)["weight"] = view
    return vars(linear)["weight"] is view, hasattr(linear, "note")


def test_views_of_fsdp1_are_left_alone() -> None:
    assert run_distributed(gathered_views) == [(True, False)] * 2
