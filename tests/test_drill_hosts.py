"""Drills in transformers' Trainer, in both packages of Lightning, and in gradients that are DTensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import DrillCallback, StabilizerCallback, StabilizerTrainerCallback
from stabilizer.faults.changes import of_token, scaled, with_element, with_flipped_bit
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_module
from tests.lightning_models import make_trainer as make_lightning
from tests.sharding import mesh_1d
from tests.tiny_loops import no_log
from tests.trainer_runs import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:drill. a fault on purpose")


class Norms(StabilizerCallback):
    """Keeps the norms of every step, by layer."""

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.steps: list[dict[str, float]] = []

    def on_gradients(self, context: Any) -> None:
        self.steps.append(dict(zip(context.store.layer_names, context.store.norms.tolist(), strict=True)))


def changes(found: Norms, healthy: Norms) -> list[dict[str, float]]:
    """How many times a healthy run's norm each layer has, by step, where it differs."""
    return [
        {name: norm / usual[name] for name, norm in step.items() if norm / usual[name] != pytest.approx(1.0, rel=1e-3)}
        for step, usual in zip(found.steps, healthy.steps, strict=True)
    ]


def trained(folder: Path, *callbacks: StabilizerCallback) -> None:
    trainer = make_trainer(
        "single", folder, callbacks=[StabilizerTrainerCallback(list(callbacks), log=no_log)], learning_rate=1e-9
    )
    trainer.train()


def test_transformers(tmp_path: Path) -> None:
    faults = [
        {"kind": "layer_spike", "step": 1, "layer": "model.layers.1", "factor": 64.0},
        {"kind": "token_loss", "step": 2, "token": [1, 8], "factor": 1e4},
        {"kind": "learning_rate_jump", "step": 2, "factor": 2.0},
    ]
    found, healthy = Norms(), Norms()
    trained(tmp_path / "one", DrillCallback(faults=faults, strict=True), found)
    trained(tmp_path / "two", healthy)
    first, spike, token = changes(found, healthy)
    assert first == {}
    assert spike == {"model.layers.1": pytest.approx(64.0, rel=1e-3)}
    assert set(token) == set(healthy.steps[2])
    assert min(token.values()) > 10.0


@pytest.mark.parametrize("package", PACKAGES)
def test_both_packages_of_lightning(package: str) -> None:
    found, healthy = Norms(), Norms()
    fault = {"kind": "layer_spike", "step": 1, "layer": "model.layers.1", "factor": 64.0}
    for callbacks in ([DrillCallback(faults=[fault], strict=True), found], [healthy]):
        trainer = make_lightning(package=package, callbacks=callbacks)
        trainer.fit(make_module(package=package, learning_rate=1e-9))
    assert changes(found, healthy) == [{}, {"model.layers.1": pytest.approx(64.0, rel=1e-3)}, {}]


def sharded(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    found: list[Any] = []
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        gradient: Any = distribute_tensor(whole, mesh_1d(), [placement])
        for changed in (of_token(gradient, (3, 5), 7.0, dims=2), scaled(gradient, 3.0)):
            assert changed is not None
            assert changed.placements == (placement,)  # type: ignore[attr-defined]
            found.append(changed.full_tensor())  # type: ignore[attr-defined]
        broken: Any = with_element(gradient, float("nan"), draw=random.Random(0))
        assert broken.placements == (placement,)
        found.append(int(broken.to_local().isnan().sum()))
        flipped: Any = with_flipped_bit(gradient, bit=None, draw=random.Random(0))
        found.append(int((flipped.to_local() != gradient.to_local()).sum()))
    return found


def test_gradients_that_are_dtensors() -> None:
    whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    of_one: Tensor = whole.clone()
    of_one[3, 5] *= 7.0
    for found in run_distributed(sharded):
        for token, spike, num_broken, num_flipped in zip(*[iter(found)] * 4, strict=True):
            assert torch.equal(token, of_one)
            assert torch.equal(spike, whole * 3.0)
            assert (num_broken, num_flipped) == (1, 1)
