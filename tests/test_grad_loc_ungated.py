"""A gradient that is not finite in a model without any gate: the block is named, and that no token can be."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stabilizer.localize.incident import Incident
from tests.launcher import run_distributed
from tests.localize_loops import Plan, grad_loc, run, written
from tests.models import VOCABULARY, initialise_
from tests.planted_faults import MICRO_BATCH, POSITION, ROW, STEP, Planted, batches, loss_of

DIM = 16


class Plain(nn.Module):
    """Nothing in it is repeated, and no name says where its output comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.mixer = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.out_projection = nn.Linear(DIM, VOCABULARY)
        initialise_(self)

    def forward(self, tokens: Tensor, added: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        """Map inputs to outputs; the planted value is added between encoder and mixer."""
        x = self.encoder(self.embed(tokens)).tanh()
        if added is not None:
            x = x + added.unsqueeze(-1)
        x = self.mixer(x)
        if factor is not None:
            # As a norm without an epsilon: all is well but the derivative at nought.
            x = x + (x * factor.unsqueeze(-1)).abs().sqrt()
        output: Tensor = self.out_projection(x)
        return output


class Bypassed(Planted):
    """It has blocks, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Identity()


def plant_value(batch: dict[str, Any]) -> None:
    batch["added"] = torch.zeros(4, 16)
    batch["added"][ROW, POSITION] = math.nan


def plant_derivative(batch: dict[str, Any]) -> None:
    batch["factor"] = torch.ones(4, 16)
    batch["factor"][ROW, POSITION] = 0.0


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    if "factor" not in batch:
        return loss_of(model, batch)
    bound = functools.partial(model, factor=batch["factor"])
    return loss_of(bound, batch)  # type: ignore[arg-type]


def train(folder: Path | str, plant: Any, make_model: Any = Plain, *, strategy: str = "single", **options: Any) -> Any:
    """A run with one fault, on the last rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    callback = grad_loc(folder, **{"tap": None, **options})

    def own(plan: Plan, rank: int) -> Iterator[list[Any]]:
        return batches(plan, rank, plant=plant if rank == world_size - 1 else lambda batch: None)

    plan = Plan(strategy, steps=STEP + 1, micro_batches=2)
    run(plan, [callback], rank=rank, make_model=make_model, make_batches=own, loss_fn=loss_fn)
    return callback.incidents


def check(incident: Incident, *, rank: int = 0) -> None:
    """It is complete, and says what it cannot say."""
    assert (incident.type, incident.step, incident.error, incident.is_complete) == ("N", STEP, None, True)
    assert (incident.reproducible, incident.tokens, incident.counterfactual_norm) == (True, (), None)
    assert incident.num_passes == 1
    (note,) = [note for note in incident.notes if "tokens cannot be told" in note]
    assert "token_gate" in note
    assert "is gated" not in " ".join(incident.notes)
    origin = incident.origin
    assert origin is not None
    assert (origin.rank, origin.micro_batch, origin.row, origin.position) == (rank, MICRO_BATCH, ROW, POSITION)
    assert origin.layer in incident.summary


@pytest.mark.covers(feature="token localisation", host="plain", strategy="single")
def test_a_nan_in_a_hidden_state_of_a_model_without_blocks(tmp_path: Path) -> None:
    (incident,) = train(tmp_path, plant_value)
    check(incident)
    # What a module is given and the one before has not made lies between the two.
    assert (incident.origin.layer, incident.origin.kind) == ("input of mixer", "nonfinite")
    (told,) = written(tmp_path).values()
    assert told["origin"]["layer"] == "input of mixer"


def test_a_derivative_that_is_not_finite(tmp_path: Path) -> None:
    (incident,) = train(tmp_path, plant_derivative)
    check(incident)
    # What lies between the outputs of two modules counts as the later one.
    assert (incident.origin.layer, incident.origin.kind) == ("out_projection", "nonfinite gradient")


def test_a_tap_that_is_never_called(tmp_path: Path) -> None:
    (incident,) = train(tmp_path, plant_value, Bypassed, tap="unused")
    check(incident)
    assert (incident.origin.layer, incident.origin.kind) == ("layers.2", "nonfinite")
    assert "unused" in " ".join(incident.notes)


@pytest.mark.parametrize("on_found", ["drop_tokens", "skip_step"])
def test_nothing_is_dropped_of_what_cannot_be_told(on_found: str, tmp_path: Path) -> None:
    (incident,) = train(tmp_path, plant_value, on_found=on_found)
    check(incident)
    assert incident.num_rebuild_passes == 0
    assert incident.action == ("skip_step" if on_found == "skip_step" else "report")


def test_a_finite_spike_is_still_an_error(tmp_path: Path) -> None:
    def plant(batch: dict[str, Any]) -> None:
        batch["weights"][ROW, POSITION] = 3000.0

    (incident,) = train(tmp_path, plant)
    assert incident.error is not None
    assert "no gate was passed" in incident.error
    assert (incident.origin, incident.is_complete) == (None, False)


def _spread(rank: int, world_size: int, strategy: str, folder: str) -> list[str]:
    make_model: Any = functools.partial(Bypassed) if strategy == "fsdp2" else Plain
    options = {"tap": "unused"} if strategy == "fsdp2" else {}
    return [one.to_json() for one in train(folder, plant_value, make_model, strategy=strategy, **options)]


@pytest.mark.parametrize(
    ("strategy", "layer"),
    [
        pytest.param("ddp", "input of mixer", marks=pytest.mark.covers(strategy="ddp")),
        pytest.param("fsdp2", "layers.2", marks=pytest.mark.covers(strategy="fsdp2")),
    ],
)
@pytest.mark.covers(feature="token localisation", host="plain")
def test_one_bad_rank_of_two(strategy: str, layer: str, tmp_path: Path) -> None:
    for found in run_distributed(_spread, strategy, str(tmp_path), world_size=2, timeout=60):
        (incident,) = map(Incident.from_json, found)
        check(incident, rank=1)
        assert incident.origin is not None
        assert incident.origin.layer == layer
