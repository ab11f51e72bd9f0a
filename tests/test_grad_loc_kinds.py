"""Faults of every kind, planted in a loop: what GradLocCallback says of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer import token_gate
from stabilizer.localize.incident import Incident
from tests.localize_loops import Plan, grad_loc, run, written
from tests.planted_faults import (
    MICRO_BATCH,
    POSITION,
    ROW,
    STEP,
    Classifier,
    Fused,
    Headless,
    Plant,
    Planted,
    bad_token,
    batches,
    loss_of,
    losses_of,
)

pytestmark = [pytest.mark.covers(strategy="single", host="plain", feature="token localisation")]


def train(
    folder: Path,
    plant: Plant = bad_token,
    *,
    make_model: Callable[[], nn.Module] = Planted,
    loss_fn: Callable[[nn.Module, Any], Tensor] = loss_of,
    make_batches: Any = None,
    on_step: Any = None,
    **options: Any,
) -> Incident:
    """The only incident of a run."""
    plan = Plan(steps=STEP + 1, micro_batches=2)
    callback = grad_loc(folder, **options)

    def own(plan: Plan, rank: int) -> Iterator[list[Any]]:
        return batches(plan, rank, plant=plant)

    run(
        plan,
        [callback],
        make_model=make_model,
        make_batches=make_batches or own,
        loss_fn=loss_fn,
        on_step=on_step,
    )
    (incident,) = callback.incidents
    assert incident.step == STEP
    assert incident.error is None
    assert Incident.from_json((next(Path(folder).rglob("*.json"))).read_text()).type == incident.type
    return incident


def at(incident: Incident) -> list[tuple[int, int, int | None]]:
    return [(one.micro_batch, one.row, one.position) for one in incident.tokens]


def test_a_gradient_that_grows_below_the_gate(tmp_path: Path) -> None:
    def plant(batch: dict[str, Any]) -> None:
        batch["gain"] = torch.ones(4, 16)
        batch["gain"][ROW, POSITION] = 1e4

    incident = train(tmp_path, plant)
    assert incident.type == "B"
    assert incident.reproducible is True
    origin = incident.origin
    assert origin is not None
    assert (origin.layer, origin.row, origin.position, origin.kind) == ("layers.2", ROW, POSITION, "growth")
    assert (origin.rank, origin.micro_batch) == (0, MICRO_BATCH)
    assert origin.value > 100
    # Layers below are far over their baselines, and those above are not.
    ratios = {layer.name: layer.ratio or 0.0 for layer in incident.layers}
    assert min(ratios[name] for name in ("embed_tokens", "layers.0", "layers.1")) > 10
    assert max(ratios[name] for name in ("layers.3", "norm", "lm_head")) < 2
    (told,) = written(tmp_path).values()
    assert (told["origin"]["layer"], told["origin"]["row"], told["origin"]["position"]) == ("layers.2", ROW, POSITION)
    assert list(tmp_path.rglob("position_map*"))


def test_an_auxiliary_loss(tmp_path: Path) -> None:
    incident = train(tmp_path, lambda batch: batch.update(auxiliary=1e3))
    assert (incident.type, incident.reproducible, at(incident)) == ("X", True, [])
    worst = max(incident.layers, key=lambda layer: layer.ratio or 0.0)
    assert worst.name == "layers.1"
    assert "layers.1" in incident.summary
    assert incident.num_passes <= 3


def test_a_nan_from_one_token(tmp_path: Path) -> None:
    def plant(batch: dict[str, Any]) -> None:
        batch["weights"][ROW, POSITION] = math.nan

    incident = train(tmp_path, plant)
    assert (incident.type, at(incident)) == ("N", [(MICRO_BATCH, ROW, POSITION)])
    assert not math.isfinite(incident.observed_norm)
    assert incident.counterfactual_norm is not None
    assert math.isfinite(incident.counterfactual_norm)
    assert incident.counterfactual_norm < 3 * incident.threshold
    assert incident.num_passes == 2


def test_a_nan_from_a_hidden_state(tmp_path: Path) -> None:
    def plant(batch: dict[str, Any]) -> None:
        batch["added"] = torch.zeros(4, 16)
        batch["added"][ROW, POSITION] = math.nan

    incident = train(tmp_path, plant)
    assert incident.type == "N"
    origin = incident.origin
    assert origin is not None
    assert (origin.layer, origin.row, origin.position, origin.kind) == ("layers.2", ROW, POSITION, "nonfinite")
    assert incident.num_passes == 1
    assert incident.counterfactual_norm is None


def test_a_nan_from_a_weight(tmp_path: Path) -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == STEP - 1:
            # Its gradient of this step is complete: the next forward is the first one with it.
            with torch.no_grad():
                model.layers[1].feed_forward.up.weight[3, 4] = math.nan  # type: ignore[union-attr,index]

    incident = train(tmp_path, lambda batch: None, on_step=spoil)
    assert incident.type == "N"
    origin = incident.origin
    assert origin is not None
    assert origin.layer == "layers.1"
    assert "layers.1.feed_forward.up.weight" in " ".join([incident.summary, *incident.notes])


def test_a_fault_that_does_not_repeat(tmp_path: Path) -> None:
    num_calls = 0

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return loss_of(model, batch) * (1e4 if num_calls == 2 * STEP + MICRO_BATCH + 1 else 1.0)

    incident = train(tmp_path, lambda batch: None, loss_fn=loss_fn)
    assert (incident.type, incident.reproducible, at(incident)) == ("T", False, [])
    assert (incident.num_passes, incident.num_forwards) == (1, 1)
    assert incident.counterfactual_norm is None
    observed = max(one.norm for one in incident.micro_batches)
    assert incident.replayed_norm is not None
    assert observed == pytest.approx(1e4 * incident.replayed_norm, rel=1e-4)
    notes = " ".join(incident.notes)
    assert f"{observed:.6g}" in notes
    assert f"{incident.replayed_norm:.6g}" in notes


def test_a_bad_token_among_others_that_do_not_repeat_in_part(tmp_path: Path) -> None:
    """A difference of 2 % is one; of 0.5 % is none."""
    for factor, kind in ((1.02, "T"), (1.005, "D")):
        num_calls = 0

        def loss_fn(model: nn.Module, batch: dict[str, Any], factor: float = factor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return loss_of(model, batch) * (factor if num_calls > 2 * (STEP + 1) else 1.0)

        assert train(tmp_path / kind, loss_fn=loss_fn).type == kind


def test_a_bad_image(tmp_path: Path) -> None:
    def images(plan: Plan, rank: int) -> Iterator[list[Any]]:
        for step in range(plan.steps):
            generator = torch.Generator().manual_seed(step)
            rows = []
            for number in range(plan.micro_batches):
                pixels = torch.randn(8, 3, 4, 4, generator=generator)
                classes = torch.randint(5, (8,), generator=generator)
                if (step, number) == (STEP, MICRO_BATCH):
                    pixels[ROW] *= 2000.0
                rows.append((pixels, classes))
            yield rows

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        # Without a bound on the logits' gradient, as of a regression: a mislabelled huge sample is seen at the gate.
        one_hot = F.one_hot(batch[1], 5).float()
        return (model(batch[0]) - one_hot).square().mean()

    class Unbounded(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.body[2] = nn.LeakyReLU()

    incident = train(tmp_path, make_model=Unbounded, make_batches=images, loss_fn=loss_fn, tap="head")
    assert (incident.type, at(incident)) == ("D", [(MICRO_BATCH, ROW, None)])
    assert incident.num_passes <= 3
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < 3 * incident.threshold
    (told,) = written(tmp_path).values()
    assert (told["tokens"][0]["row"], told["tokens"][0]["position"]) == (ROW, None)


def test_packed_rows(tmp_path: Path) -> None:
    """Documents of 4, 3 and 9 tokens: position 5 is the second one's second."""

    def packed(plan: Plan, rank: int) -> Iterator[list[Any]]:
        positions = torch.cat([torch.arange(length) for length in (4, 3, 9)]).expand(4, -1)
        for rows in batches(plan, rank, plant=bad_token):
            yield [{**batch, "position_ids": positions} for batch in rows]

    incident = train(tmp_path, make_batches=packed)
    assert at(incident) == [(MICRO_BATCH, ROW, POSITION)]
    assert (incident.tokens[0].document, incident.tokens[0].document_position) == (1, 1)
    (told,) = written(tmp_path).values()
    assert (told["tokens"][0]["document"], told["tokens"][0]["document_position"]) == (1, 1)


@pytest.mark.parametrize("where", ["losses", "log-probs"])
@pytest.mark.parametrize("make_model", [Planted, Headless])
def test_a_gate_by_hand(make_model: Any, where: str, tmp_path: Path) -> None:
    """It wins over the output embedding, and needs none."""

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["input_ids"])
        if where == "losses":
            return token_gate(losses_of(logits, batch)).mean()
        chosen = logits.log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1)).squeeze(-1)
        return -(token_gate(chosen) * batch["weights"]).mean()

    incident = train(tmp_path, make_model=make_model, loss_fn=loss_fn, tap=None)
    assert at(incident) == [(MICRO_BATCH, ROW, POSITION)]
    assert incident.num_forwards == 1
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < 3 * incident.threshold
    assert incident.notes == ()


@pytest.mark.parametrize("on_found", ["report", "drop_tokens"])
def test_a_head_that_is_never_called(on_found: str, tmp_path: Path) -> None:
    """The final hidden state is gated instead; the head's own gradient is outside, and that is said."""
    incident = train(tmp_path, make_model=Fused, tap=None, on_found=on_found)
    assert (incident.type, at(incident)) == ("D", [(MICRO_BATCH, ROW, POSITION)])
    assert incident.num_passes <= 3
    assert incident.num_forwards <= 2
    notes = " ".join(incident.notes)
    assert "LM head" in notes
    assert "below the gate" in notes
    # The norm without it is that of what comes through the gate.
    below = [layer.norm for layer in incident.layers if layer.name not in ("norm", "lm_head")]
    usual = [layer.baseline or 0.0 for layer in incident.layers if layer.name not in ("norm", "lm_head")]
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < 2 * math.hypot(*usual) < math.hypot(*below) / 10
    # What cannot be taken out of the head is not left out of the others either.
    assert (incident.action, incident.num_rebuild_passes) == ("report", 0)


def test_a_nan_before_a_head_that_is_never_called(tmp_path: Path) -> None:
    def plant(batch: dict[str, Any]) -> None:
        batch["weights"][ROW, POSITION] = math.nan

    incident = train(tmp_path, plant, make_model=Fused, tap=None)
    assert (incident.type, at(incident)) == ("N", [(MICRO_BATCH, ROW, POSITION)])


def test_a_gate_that_nothing_passes_is_said(tmp_path: Path) -> None:
    plan = Plan(steps=STEP + 1, micro_batches=2)
    callback = grad_loc(tmp_path, tap=None)
    run(
        plan,
        [callback],
        make_model=Headless,
        make_batches=lambda plan, rank: batches(plan, rank, plant=bad_token),
        loss_fn=loss_of,
    )
    (incident,) = callback.incidents
    assert incident.error is not None
    assert "token_gate" in incident.error
    assert not incident.is_complete
    assert at(incident) == []
