"""Local norms under every strategy: each rank's own gradient of each micro-batch, against one process in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.nn.parallel import DistributedDataParallel

from stabilizer.parameters import ParameterIndex
from stabilizer.sensors import Sensors
from tests import reference, sharding
from tests.launcher import run_distributed
from tests.models import Block, loss_of, make_transformer, reference_gradients, token_batch
from tests.spread import CASES, spread

pytestmark = pytest.mark.norms

TOLERANCE = 1e-5
STEPS, MICRO_BATCHES = 2, 3
BF16 = torch.bfloat16

#: Layout -> how many ranks, how many of them have data of their own, options of the model.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    **{
        name: (case.world_size, case.num_data_ranks, {}) for name, case in CASES.items() if name not in ("single", "sp")
    },
    "ddp_fp16": (2, 2, {}),
    "ddp_power_sgd": (2, 2, {}),
    "ddp_bucket_view": (2, 2, {}),
    "ddp_static_graph": (2, 2, {}),
    "ddp_unused": (2, 2, {"unused": True}),
    "ddp_sparse": (2, 2, {"sparse": True}),
    "ddp_tied": (2, 2, {"tied": True}),
    "ddp_adapters": (2, 2, {"adapters": True}),
    "ddp_compiled": (2, 2, {}),
    "ddp_bf16_parameters": (2, 2, {"dtype": BF16}),
    "fsdp1_grad_op": (2, 2, {}),
    "fsdp1_bf16": (2, 2, {}),
    "fsdp1_comm_hook": (2, 2, {}),
    "fsdp1_tied": (2, 2, {"tied": True}),
    "fsdp1_adapters": (2, 2, {"adapters": True}),
    "fsdp1_unused": (2, 2, {"unused": True}),
    "fsdp1_flat": (2, 2, {}),
    "fsdp1_flat_bf16": (2, 2, {}),
    "fsdp2_bf16": (2, 2, {}),
    "fsdp2_kept": (2, 2, {}),
    "fsdp2_partly_kept": (4, 4, {}),
    "fsdp2_checkpointed": (2, 2, {}),
    "fsdp2_compiled": (2, 2, {}),
    "fsdp2_tied": (2, 2, {"tied": True}),
    "fsdp2_adapters": (2, 2, {"adapters": True}),
    "fsdp2_unused": (2, 2, {"unused": True}),
    "hsdp_bf16": (4, 4, {}),
}


def _ddp(model: nn.Module, variant: str) -> nn.Module:
    if variant == "compiled":
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")  # type: ignore[return-value]
    options = {
        "bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }
    wrapped = DistributedDataParallel(model, **options.get(variant, {}))
    if variant == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif variant == "power_sgd":
        wrapped.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    return wrapped


def _fsdp1(model: nn.Module, variant: str) -> nn.Module:
    options: dict[str, Any] = {
        "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "bf16": {"mixed_precision": MixedPrecision(param_dtype=BF16)},
        "flat": {"use_orig_params": False},
        "flat_bf16": {"use_orig_params": False, "mixed_precision": MixedPrecision(param_dtype=BF16)},
    }
    wrapped = sharding.shard_fsdp1(model, **options.get(variant, {}))
    if variant == "comm_hook":
        from torch.distributed.algorithms._comm_hooks import default_hooks as fsdp1_hooks

        # A user's own; the hooks that compress need more than gloo.
        state = fsdp1_hooks.DefaultState(process_group=torch.distributed.group.WORLD)
        wrapped.register_comm_hook(state, fsdp1_hooks.reduce_scatter_hook)
    return wrapped


def _fsdp2(model: nn.Module, variant: str) -> nn.Module:
    if variant == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if variant == "compiled":
        for block in model.layers:  # type: ignore[union-attr]
            block.compile(backend="aot_eager")
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
        "kept": {"reshard_after_forward": False},
        "partly_kept": {"reshard_after_forward": 2},
    }
    return sharding.shard_fsdp2(model, **options.get(variant, {}))


def _layout(name: str, rank: int) -> tuple[nn.Module, int]:
    options = LAYOUTS[name][2]
    family, _, variant = name.partition("_")
    if name in CASES:
        return spread(name, rank)
    if name == "hsdp_bf16":
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        return sharding.shard_fsdp2(make_transformer(), mesh=sharding.hsdp_mesh(), mp_policy=policy), rank
    make = {"ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2}[family]
    return make(make_transformer(**options), variant), rank


@contextlib.contextmanager
def sync(model: Any, is_last: bool) -> Iterator[None]:
    """Reduce gradients with the last micro-batch only."""
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "set_requires_gradient_sync"):
        inner.set_requires_gradient_sync(is_last)
        yield
    elif hasattr(inner, "no_sync") and not is_last:
        with inner.no_sync():
            yield
    else:
        yield


def measure(rank: int, world_size: int, name: str, accumulates: bool) -> tuple[int, list[Any]]:
    """Square sums by name of every micro-batch of two steps; `None` where there are none."""
    model, data_rank = _layout(name, rank)
    index = ParameterIndex(model)
    sensors = Sensors(model, index)
    sensors.start()
    found: list[dict[str, float] | None] = []
    for step in range(STEPS):
        model.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            with sync(model, micro_batch == MICRO_BATCHES - 1 or not accumulates):
                loss_of(model, token_batch(data_rank, step=step, micro_batch=micro_batch)).backward()
            taken = sensors.take()
            assert sensors.reason is None, sensors.reason
            if taken is not None:
                assert taken.dtype == torch.float32
                assert taken.shape == (len(index),)
            found.append(None if taken is None else dict(zip(index.names, taken.tolist(), strict=True)))
    sensors.close()
    return data_rank, found


def _oracle(name: str, data_rank: int, step: int, micro_batch: int) -> dict[str, float]:
    """Squares by parameter; by unit where a flat parameter is all there is."""
    batch = token_batch(data_rank, step=step, micro_batch=micro_batch)
    options = LAYOUTS[name][2]
    if "bf16" in name:
        # The same arithmetic in one process: float64 would differ by bf16's rounding.
        model = make_transformer(**options).to(BF16)
        loss_of(model, batch).backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    else:
        gradients = reference_gradients(make_transformer(**options), [batch])
    norms = reference.layer_norms(gradients, _unit if "flat" in name else lambda key: key)
    return {key: norm**2 for key, norm in norms.items()}


def _unit(key: str) -> str:
    return f"{'.'.join(key.split('.')[:2])}._flat_param" if key.startswith("layers.") else "_flat_param"


def _first_measured(name: str) -> int:
    # FSDP2 makes the tensors that carry our hooks in the first forward pass.
    return 1 if name.startswith(("fsdp2", "hsdp")) else 0


def _columns(names: Any) -> list[Any]:
    strategies = {"ddp_tp": "tp", "fsdp2_tp": "fsdp2_tp"}
    return [
        pytest.param(
            name,
            marks=pytest.mark.covers(
                feature="local norms", strategy=strategies.get(name, name.split("_")[0]), host="plain"
            ),
        )
        for name in names
    ]


def _check(name: str, accumulates: bool) -> None:
    world_size, num_data_ranks, _ = LAYOUTS[name]
    results = run_distributed(measure, name, accumulates, world_size=world_size)
    for data_rank in range(num_data_ranks):
        members = [found for number, found in results if number == data_rank]
        assert len(members) == world_size // num_data_ranks
        for number in range(STEPS * MICRO_BATCHES):
            taken = [found[number] for found in members]
            if number < _first_measured(name):
                assert taken == [None] * len(members)
                continue
            # A tensor-parallel group's squares add up to those of the one micro-batch that it shares.
            total = {key: sum(squares[key] for squares in taken) for key in taken[0]}
            expected = _oracle(name, data_rank, *divmod(number, MICRO_BATCHES))
            assert {key: value**0.5 for key, value in total.items()} == pytest.approx(
                {key: value**0.5 for key, value in expected.items()}, rel=TOLERANCE, abs=1e-12
            )


# torch's own, where a compiled block reads the hidden state of the one before it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# A static graph must not begin in `no_sync`.
@pytest.mark.parametrize("name", _columns(name for name in LAYOUTS if name != "ddp_static_graph"))
def test_local_norms_equal_those_of_the_micro_batch_alone(name: str) -> None:
    _check(name, accumulates=True)


@pytest.mark.parametrize(
    "name", ["ddp", "ddp_power_sgd", "ddp_static_graph", "fsdp1", "fsdp1_no_shard", "fsdp2", "hsdp"]
)
def test_local_norms_when_every_micro_batch_is_reduced(name: str) -> None:
    _check(name, accumulates=False)
