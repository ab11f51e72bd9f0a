"""Field reports, area nonfinite-skip: where in the forward or the backward pass it began."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.localize.incident import Incident
from tests.field_reports.helpers import covers, fit, our_warnings
from tests.field_reports.localize_tools import Batch, Language, Stack, locator, only, steps

STEP, ROW, POSITION = 3, 1, 2


class Piece(nn.Module):
    """A block that does something to a zero at one row and position, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = torch.tanh(self.linear(x))
        if self.function is not None:
            added = torch.zeros_like(x)
            added[ROW, POSITION] = self.function(x[ROW, POSITION] * 0)
            x = x + added
        return x


class Speaking(nn.Module):
    """A block that returns whole numbers and a tuple with the states, and takes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.piece = Piece()

    def forward(self, given: Any) -> dict[str, Any]:
        """Tokens and states."""
        states = given if isinstance(given, Tensor) else given["states"][0]
        return {"tokens": torch.zeros(3, 5, dtype=torch.long), "states": (self.piece(states), 7)}


class Model(nn.Module):
    """Six such blocks, and a head for the states."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(6, Speaking)
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Of the last block's states."""
        logits: Tensor = self.lm_head(self.stack(x)["states"][0])
        return logits


def _begins(incident: Incident) -> tuple[str, int | None, int | None]:
    assert incident.type == "N"
    assert incident.origin is not None
    return incident.origin.layer, incident.origin.row, incident.origin.position


@pytest.mark.parametrize(
    ("place", "function", "kind"),
    [(2, torch.log, "nonfinite"), (1, torch.sqrt, "nonfinite gradient")],
    ids=["log of 0 in block 2", "sqrt at 0 in block 1"],
)
def test_B057_block_row_and_position_where_it_is_born(place: int, function: Any, kind: str, tmp_path: Path) -> None:
    model, callback = Stack(4, Piece), locator(tmp_path)

    def before(step: int) -> None:
        model.blocks[place].function = function if step == STEP else None  # type: ignore[assignment]

    with our_warnings():
        steps(model, callback, num_steps=STEP + 1, before=before)
    incident = only(callback)
    assert _begins(incident) == (f"blocks.{place}", ROW, POSITION)
    assert incident.origin is not None
    assert incident.origin.kind == kind
    assert not math.isfinite(incident.origin.value)
    assert incident.num_passes <= 2
    assert incident.num_forwards == 1
    assert f"blocks.{place}" in incident.summary


def _num_hooks(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def test_B080_of_blocks_that_return_dictionaries_only_the_producer_is_named(tmp_path: Path) -> None:
    model, callback = Model(), locator(tmp_path)

    def before(step: int) -> None:
        model.stack.blocks[3].piece.function = torch.log if step == STEP else None  # type: ignore[union-attr,assignment]

    with our_warnings():
        steps(model, callback, num_steps=STEP + 1, before=before)
    assert _begins(only(callback)) == ("stack.blocks.3", ROW, POSITION)
    text = " ".join((tmp_path / f"step_{STEP}" / "incident.txt").read_text().split())
    assert "blocks.3 (nonfinite" in text
    assert not any(f"blocks.{carrier} (nonfinite" in text for carrier in (0, 1, 2, 4, 5))
    assert _num_hooks(model) == 0


@pytest.mark.parametrize("when", ["training", "search"])
def test_B080_no_hook_is_left_when_a_forward_breaks_off(when: str, tmp_path: Path) -> None:
    model, callback = Model(), locator(tmp_path)
    num_calls = 0

    def breaks_off(zero: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if when == "training" or num_calls > 1:
            raise RuntimeError("out of luck")
        return torch.log(zero)

    def before(step: int) -> None:
        model.stack.blocks[3].piece.function = breaks_off if step == STEP else None  # type: ignore[union-attr,assignment]

    def run() -> None:
        with our_warnings():
            steps(model, callback, num_steps=STEP + 2, before=before)

    if when == "training":
        with pytest.raises(RuntimeError, match="out of luck"):
            run()
        assert callback.incidents == []
    else:
        run()
        # It ends the search and not the run.
        assert "out of luck" in (only(callback).error or "")
    assert _num_hooks(model) == 0


@covers("single")
def test_B069_an_incident_knows_every_micro_batch_of_its_step_and_no_other(tmp_path: Path) -> None:
    def plant(number: int, batch: Batch) -> None:
        if number == 7:
            batch["bias"] = torch.full((1, 1, 1), math.nan)

    callback = locator(tmp_path / "incidents")
    module = Language(plant)
    with our_warnings():
        fit(module, tmp_path, callbacks=[callback], accumulate_grad_batches=3, max_steps=3)
    incident = only(callback)
    assert incident.step == 2
    reports = sorted(incident.micro_batches, key=lambda report: report.micro_batch)
    assert [report.micro_batch for report in reports] == [0, 1, 2]
    assert [report.is_suspect for report in reports] == [False, True, False]
    assert all(math.isfinite(report.norm) is not report.is_suspect for report in reports)
