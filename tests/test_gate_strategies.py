"""The gate under every strategy: one forward pass, four gated backward passes, each rank with its own open tokens."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from stabilizer.gate import Gate
from stabilizer.localize.masking import masked, unit_norms
from stabilizer.localize.taps import find_tap, tapped
from stabilizer.names import clean_name
from tests import sharding
from tests.gate_tools import partition, reference_gradients_of, token_losses
from tests.launcher import run_distributed
from tests.models import Batch, Block, make_transformer, token_batch
from tests.spread import CASES, spread, whole_gradients

NUM_PASSES = 4
Named = dict[str, Tensor]


def _masks(data_rank: int) -> list[Tensor]:
    """Another order on each rank."""
    masks = partition(24)
    return masks[data_rank:] + masks[:data_rank]


def _expected(num_data_ranks: int, number: int) -> Named:
    """Averaged over the ranks, each with its own batch and mask."""
    model = make_transformer()
    parts = [reference_gradients_of(model, token_batch(rank), _masks(rank)[number]) for rank in range(num_data_ranks)]
    names = [name for name, _ in model.named_parameters()]
    return {name: sum(grads) / num_data_ranks for name, *grads in zip(names, *parts, strict=True)}  # type: ignore[misc]


def _check(found: Named, expected: Named, tolerance: float) -> None:
    assert sorted(found) == sorted(expected)
    difference = sum((found[name].double() - value).square().sum() for name, value in expected.items())
    whole = sum(value.square().sum() for value in expected.values())
    assert (difference / whole) ** 0.5 < tolerance  # type: ignore[operator]


def _gathered(model: nn.Module) -> Named:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {clean_name(name): p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    return {name: gradient for name, gradient in whole_gradients(model).items() if gradient is not None}


def passes(rank: int, world_size: int, strategy: str, kind: str) -> tuple[list[Named], list[Tensor], int]:
    """Gradients of each pass, what arrived, and the number of forward passes."""
    model, data_rank = spread(strategy, rank)
    batch = token_batch(data_rank)
    with contextlib.ExitStack() as stack:
        if strategy == "ddp":
            stack.enter_context(model.no_sync())  # type: ignore[operator]
        if kind == "checkpointed":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        elif kind == "compiled":
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile(backend="aot_eager")  # type: ignore[operator]
            # As in training, before a search.
            token_losses(model(batch[0]), batch[1]).mean().backward()
            # Now: between a forward and its backward pass, FSDP2 shows gathered parameters.
            model.zero_grad()
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return _passes(model, strategy, batch, _masks(data_rank))


def _passes(
    model: nn.Module, strategy: str, batch: Batch, masks: list[Tensor]
) -> tuple[list[Named], list[Tensor], int]:
    found, arrived, num_forwards = [], [], 0
    loss, gate = None, Gate()
    for mask in masks:
        if loss is None or strategy == "fsdp1":
            # Freed after a backward pass: FSDP1 wants another forward for each.
            gate, num_forwards = Gate(), num_forwards + 1
            with tapped(find_tap(model), gate):
                loss = token_losses(model(batch[0]), batch[1]).mean()
            gate.seal()
        gate.clear()
        gate.set_open(mask)
        model.zero_grad()
        loss.backward(retain_graph=strategy != "fsdp1")
        found.append(_gathered(model))
        assert gate.arrived is not None
        arrived.append(gate.arrived)
    return found, arrived, num_forwards


CHECKS = [(name, "plain") for name in ("single", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "sp", "fsdp2_tp")]


# torch: the compiler looks at a tensor's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("strategy", "kind"), [*CHECKS, ("fsdp2", "checkpointed"), ("fsdp2", "compiled")])
def test_one_forward_and_four_passes(strategy: str, kind: str) -> None:
    case = CASES[strategy]
    results = run_distributed(passes, strategy, kind, world_size=case.world_size, timeout=100)
    for number in range(NUM_PASSES):
        expected = _expected(case.num_data_ranks, number)
        for rank, (found, arrived, num_forwards) in enumerate(results):
            assert num_forwards == (NUM_PASSES if strategy == "fsdp1" else 1)
            if strategy == "ddp":
                model, batch = make_transformer(), token_batch(rank)
                local = reference_gradients_of(model, batch, _masks(rank)[number])
                expected = {name: grad for (name, _), grad in zip(model.named_parameters(), local, strict=True)}
            _check(found[number], expected, 2e-6)
            assert torch.equal(arrived[number], arrived[0])


def vocabulary(rank: int, world_size: int, layout: str) -> tuple[list[Named], list[Tensor]]:
    """A head that tensor parallelism cuts, and logits that stay a DTensor."""
    mesh = sharding.mesh_1d(name="tensor")
    model, batch, gate = sharding.tensor_parallel(make_transformer(), mesh=mesh), token_batch(), Gate()
    placement = Shard(-1) if layout == "vocabulary" else Shard(1)
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=placement, use_local_output=False)
    parallelize_module(model, mesh, {"lm_head": style})
    found, arrived = [], []
    with loss_parallel() if layout == "vocabulary" else contextlib.nullcontext():
        with tapped(find_tap(model), gate):
            logits = model(batch[0])
        assert isinstance(logits, DTensor)
        if layout != "vocabulary":
            logits = logits.full_tensor()
        loss = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
        for mask in _masks(0):
            gate.clear()
            gate.set_open(mask)
            model.zero_grad()
            loss.backward(retain_graph=True)
            found.append({name: g for name, g in whole_gradients(model).items() if g is not None})
            assert gate.arrived is not None
            arrived.append(gate.arrived)
    return found, arrived


@pytest.mark.parametrize("layout", ["vocabulary", "sequence"])
def test_logits_that_are_dtensors(layout: str) -> None:
    batch = token_batch()
    logits = make_transformer()(batch[0]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(token_losses(logits, batch[1]).mean(), logits)
    norms = torch.linalg.vector_norm(gradient, dim=-1).flatten()
    for found, arrived in run_distributed(vocabulary, layout):
        for number in range(NUM_PASSES):
            _check(found[number], _expected(1, number), 2e-6)
            torch.testing.assert_close(arrived[number], norms, rtol=1e-5, atol=0)


def _values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 8, 5, generator=generator), torch.rand(3, 8, generator=generator) > 0.5


PLACEMENTS: list[list[Any]] = [[Shard(0)], [Shard(1)], [Shard(2)], [Shard(-1)], [Replicate()], [Partial()]]


def cut(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, bool]]:
    """The gradient with a gate, and the norms, in every layout."""
    whole, mask = _values()
    results = []
    for placements in PLACEMENTS:
        if placements == [Partial()]:
            made = DTensor.from_local(whole * [0.25, 0.75][rank], sharding.mesh_1d(), placements)
        else:
            made = distribute_tensor(whole, sharding.mesh_1d(), placements)
        closed: Any = masked(made, mask)
        results.append((closed.full_tensor(), unit_norms(made, dims=2), closed.placements == made.placements))
    return results


def test_every_layout_of_a_gradient() -> None:
    whole, mask = _values()
    expected = torch.where(mask.unsqueeze(-1), whole, 0)
    for results in run_distributed(cut):
        for closed, norms, is_same_layout in results:
            torch.testing.assert_close(closed, expected)
            torch.testing.assert_close(norms, torch.linalg.vector_norm(whole, dim=-1))
            assert is_same_layout
