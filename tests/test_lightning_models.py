"""Every strategy of `tests.lightning_models` trains, on the data and with the gradients of one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from tests import sharding
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, expected_batches, make_module, make_trainer
from tests.models import make_mlp, make_transformer, reference_gradients


def _fit(
    rank: int, world_size: int, strategy: str, kind: str, package: str, accumulate: int
) -> tuple[list[dict[str, Tensor]], bool, int]:
    seen: list[dict[str, Tensor]] = []
    wrapped: list[bool] = []

    class Watch(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients = {}
            if isinstance(trainer.model, FullyShardedDataParallel):
                with FullyShardedDataParallel.summon_full_params(trainer.model, with_grads=True):
                    gradients = {_clean(n): p.grad.clone() for n, p in module.model.named_parameters()}
            else:
                gradients = {_clean(n): sharding.full(p.grad).clone() for n, p in module.model.named_parameters()}
            seen.append(gradients)
            wrapped.append(
                trainer.model is not module or any(isinstance(p, DTensor) for p in module.model.parameters())
            )

    style = "tp" if strategy == "tp" else "sp"
    module = make_module(kind, package=package, tensor_style=style)
    trainer = make_trainer(
        strategy, devices=world_size, package=package, callbacks=[Watch()], accumulate_grad_batches=accumulate
    )
    trainer.fit(module)
    return seen, all(wrapped), trainer.global_step


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _check(strategy: str, kind: str, world_size: int, *, package: str = PACKAGES[0], accumulate: int = 1) -> None:
    num_ranks = 1 if strategy in ("tp", "sp") else world_size // 2 if strategy == "fsdp2_tp" else world_size
    model: nn.Module = make_mlp() if kind == "mlp" else make_transformer()
    batches = expected_batches(kind, 0, num_ranks=num_ranks, num_micro_batches=accumulate)
    expected = reference_gradients(model, batches)
    answers = run_distributed(_fit, strategy, kind, package, accumulate, world_size=world_size, timeout=110)
    for steps, wrapped, global_step in answers:
        assert wrapped == (strategy != "single")
        assert len(steps) == global_step == 3
        assert steps[0].keys() == expected.keys()
        for name, gradient in steps[0].items():
            want = expected[name]
            assert want is not None
            torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6, msg=name)
        assert not torch.equal(next(iter(steps[1].values())), next(iter(steps[2].values())))


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("tp", 2)])
def test_strategy_trains_like_one_process(strategy: str, world_size: int, kind: str) -> None:
    _check(strategy, kind, world_size)


def test_sequence_parallel_trains() -> None:
    _check("sp", "transformer", 2)


def test_two_axes_train() -> None:
    _check("fsdp2_tp", "transformer", 4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accumulation_sees_the_batches_of_the_reference(strategy: str) -> None:
    _check(strategy, "mlp", 2, accumulate=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_the_other_import_name(strategy: str) -> None:
    _check(strategy, "mlp", 2, package=PACKAGES[1])


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy='fsdp3' is none of"):
        make_trainer("fsdp3")
