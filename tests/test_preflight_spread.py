"""Preflight on models that are spread for real, in two processes."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks.preflight import preflight
from tests import sharding
from tests.counting import count_collectives, count_host_reads
from tests.launcher import run_distributed
from tests.models import make_mlp, make_transformer
from tests.preflight_settings import make_setting, rows_of


def _wrap(kind: str) -> nn.Module:
    model = make_transformer()
    low, high = torch.bfloat16, torch.float32
    if kind == "nobody":
        return model
    if kind == "ddp_low":
        return DistributedDataParallel(model.to(low))
    if kind.startswith("ddp"):
        mixed: Any = {}
        if kind == "ddp_mixed":
            from torch.nn.parallel.distributed import _MixedPrecision

            mixed = {"mixed_precision": _MixedPrecision(param_dtype=low, reduce_dtype=high)}
        wrapped = DistributedDataParallel(model, **mixed)
        hooks: dict[str, Any] = {
            "ddp_fp16_hook": default_hooks.fp16_compress_hook,
            "ddp_bf16_inside": around_bf16,
            "ddp_wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
            "ddp_allreduce": default_hooks.allreduce_hook,
            "ddp_own": own_hook,
        }
        if kind in hooks:
            wrapped.register_comm_hook(None, hooks[kind])
        if kind == "ddp_builtin":
            wrapped._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
        return wrapped
    if kind.startswith("fsdp1"):
        policies: dict[str, Any] = {
            "fsdp1_low": MixedPrecision(param_dtype=low),
            "fsdp1_reduce_low": MixedPrecision(reduce_dtype=low),
            "fsdp1_high": MixedPrecision(param_dtype=low, reduce_dtype=high),
        }
        options = {"use_orig_params": False} if kind == "fsdp1_flat" else {}
        return sharding.shard_fsdp1(model, mixed_precision=policies.get(kind), **options)
    if kind == "tp":
        return sharding.tensor_parallel(make_mlp(), mesh=sharding.mesh_1d())
    policy = {
        "fsdp2": MixedPrecisionPolicy(),
        "fsdp2_low": MixedPrecisionPolicy(param_dtype=low),
        "fsdp2_high": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high),
    }
    if kind == "fsdp2_mixed":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.layers[0], mesh=sharding.mesh_1d(), mp_policy=policy["fsdp2_low"])
        return fully_shard(model, mesh=sharding.mesh_1d(), mp_policy=policy["fsdp2_high"])
    return sharding.shard_fsdp2(model, mp_policy=policy[kind])


def own_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and strings are none
    return default_hooks.allreduce_hook(state, bucket)


def around_bf16(state, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.allreduce_hook(state, bucket)


# As `functools.wraps` leaves it; under its own name DDP refuses the hook on a CPU.
around_bf16.__wrapped__ = default_hooks.bf16_compress_hook  # type: ignore[attr-defined]


# What the row says; an entry with "low" in its advice is marked.
REDUCTIONS = {
    "nobody": ("nobody: there is no DDP or FSDP around the model, 2 processes train", ""),
    "ddp": ("DDP: float32", ""),
    "ddp_low": ("DDP: bfloat16", "autocast"),
    "ddp_mixed": ("DDP: float32", ""),
    "ddp_fp16_hook": ("DDP: float16", "compressing hook"),
    "ddp_bf16_inside": ("DDP: bfloat16", "compressing hook"),
    "ddp_wrapper": ("DDP: float16", "compressing hook"),
    "ddp_builtin": ("DDP: float16", "compressing hook"),
    "ddp_allreduce": ("DDP: float32", ""),
    "ddp_own": ("DDP: not known, the communication hook own_hook decides", ""),
    "fsdp1": ("FSDP1: float32", ""),
    "fsdp1_flat": ("FSDP1: float32", ""),
    "fsdp1_low": ("FSDP1: bfloat16", "reduce_dtype=torch.float32 in MixedPrecision,"),
    "fsdp1_reduce_low": ("FSDP1: bfloat16", "reduce_dtype=torch.float32 in MixedPrecision,"),
    "fsdp1_high": ("FSDP1: float32", ""),
    "fsdp2": ("FSDP2: float32", ""),
    "fsdp2_low": ("FSDP2: bfloat16", "reduce_dtype=torch.float32 in MixedPrecisionPolicy"),
    "fsdp2_high": ("FSDP2: float32", ""),
    "fsdp2_mixed": ("FSDP2: float32 (37 tensors), FSDP2: bfloat16 (11 tensors)", "MixedPrecisionPolicy"),
    "tp": ("tensor parallelism: activations are reduced, gradients of weights are not", ""),
}


def reduction_rows(rank: int, world_size: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of every kind, how many parameters there really are, and which collectives were started."""
    found = {}
    for kind in kinds:
        model = _wrap(kind)
        setting = make_setting(model)
        with count_collectives() as collectives, count_host_reads() as reads:
            rows = rows_of(setting)
        found[kind] = {
            "reduction": rows["gradient reduction"],
            "parameters": rows["parameters"].value,
            "names": list(rows),
            "costs": [*collectives.names, *reads.names],
        }
    return found


@pytest.mark.parametrize("family", ["ddp", "fsdp1", "fsdp2", "tp", "nobody"])
def test_the_type_gradients_are_reduced_in_is_found_by_looking(family: str) -> None:
    kinds = [kind for kind in REDUCTIONS if kind.split("_")[0] == family]
    for found in run_distributed(reduction_rows, kinds):
        for kind in kinds:
            value, advice = REDUCTIONS[kind]
            row = found[kind]["reduction"]
            assert row.value.startswith(value), kind
            assert bool(row.advice) == bool(advice), kind
            assert advice in row.advice, kind
            assert not found[kind]["costs"], kind
            # All ranks say the same of the whole model, whatever they hold of it; and no parameter is lost.
            number = sum(p.numel() for p in (make_mlp() if kind == "tp" else make_transformer()).parameters())
            shown = f"{number:,}" if number < 10_000 else f"{number / 1000:.1f} k"
            assert found[kind]["parameters"] == f"{shown} trainable, 0 frozen", kind
            assert "in no optimizer" not in found[kind]["names"], kind


def low_precision_truth(rank: int, world_size: int, kind: str) -> bool:
    """Whether a gradient really went through 16 bits: all its values are ones that such a type has."""
    model = _wrap(kind)
    tokens = torch.arange(8).view(1, 8) + rank
    model(tokens).float().square().mean().backward()
    gradient = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()][-1]
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    assert local.abs().sum() > 0
    return any(torch.equal(local, local.to(dtype).to(local.dtype)) for dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize("kind", ["ddp", "ddp_fp16_hook", "fsdp1_reduce_low", "fsdp1", "fsdp2", "fsdp2_low"])
def test_what_the_row_says_is_what_happens(kind: str) -> None:
    # Averaged by two: no bit is added to what came out of the reduction.
    is_low = bool(REDUCTIONS[kind][1])
    assert run_distributed(low_precision_truth, kind) == [is_low] * 2


def dimension_rows(rank: int, world_size: int, kind: str) -> str:
    """What the row says if the CPU passes for a GPU."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 24, bias=False))
    if kind.startswith("fsdp1"):
        options = {"device_id": torch.device("cpu"), "use_orig_params": kind == "fsdp1"}
        model = FullyShardedDataParallel(model, **options)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=sharding.mesh_1d())
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model, sharding.mesh_1d(), {"0": ColwiseParallel(), "1": ColwiseParallel()})
    setting = make_setting(model, optimizers=[])
    with mock.patch("stabilizer.callbacks.facts._is_on_gpu", return_value=True):
        return rows_of(setting)["matrix dimensions"].value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        # 24 rows over two ranks; what is multiplied is the gathered matrix, under tensor parallelism the rank's own.
        ("fsdp1", "no multiple of 16: 1: 1.weight (24 x 32)"),
        ("fsdp1_flat", "no multiple of 16: 1: _flat_param (24 x 32)"),
        ("fsdp2", "no multiple of 16: 1: 1.weight (24 x 32)"),
        ("tp", "no multiple of 16: 1: 1.weight (12 x 32)"),
    ],
)
def test_dimensions_are_those_that_a_rank_multiplies_with(kind: str, value: str) -> None:
    assert run_distributed(dimension_rows, kind)[0] == value


def printing(rank: int, world_size: int, path: str) -> None:
    """Prints into a file of its own on every rank."""
    setting = make_setting(DistributedDataParallel(make_mlp()))
    with open(f"{path}/{rank}", "w") as stream, contextlib.redirect_stdout(stream):
        preflight(setting)


def test_only_rank_0_prints(tmp_path: Any) -> None:
    run_distributed(printing, str(tmp_path))
    assert "DDP: float32" in (tmp_path / "0").read_text()
    assert not (tmp_path / "1").read_text()
