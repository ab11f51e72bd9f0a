"""Field reports, area token-local: which row and which token it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stabilizer.callbacks import AdaptiveClipThreshold, LossMeanVarCallback
from tests.event_files import read_run
from tests.field_reports.helpers import covers, fit, our_warnings
from tests.field_reports.localize_tools import LENGTH, ROWS, Batch, Language, locator, only
from tests.models import VOCABULARY

#: The model has learnt the rows by the first of them.
LATE, STEP = 160, 40


@covers("single")
@pytest.mark.parametrize(("micro_batch", "row"), [(1, 2), (0, 3)])
def test_B055_the_corrupted_row_of_the_step_is_listed_with_its_positions(
    micro_batch: int, row: int, tmp_path: Path
) -> None:
    def corrupt(number: int, batch: Batch) -> None:
        if number == 2 * LATE + micro_batch:
            generator = torch.Generator().manual_seed(7)
            batch["labels"][row] = torch.randint(VOCABULARY, (LENGTH,), generator=generator)

    callback = locator(tmp_path / "incidents")
    fit(Language(corrupt), tmp_path, callbacks=[callback], accumulate_grad_batches=2, max_steps=LATE + 3)
    incident = only(callback)
    assert incident.step == LATE
    assert (incident.type, incident.reproducible) == ("D", True)
    places = {(token.micro_batch, token.row) for token in incident.tokens}
    assert places == {(micro_batch, row)}
    positions = [token.position for token in incident.tokens]
    assert len(set(positions)) == len(positions) >= LENGTH // 2
    assert sum(token.share for token in incident.tokens) > 0.9
    # Read from the file, as somebody does who looks for the row after the run.
    written = json.loads((tmp_path / f"incidents/step_{LATE}/incident.json").read_text())
    first = written["tokens"][0]
    assert (first["micro_batch"], first["row"]) == (micro_batch, row)
    assert written["counterfactual_norm"] < written["threshold"] < written["observed_norm"]


@covers("single")
def test_B079_an_ignored_token_whose_logits_are_infinite_is_named(tmp_path: Path) -> None:
    row, position = 1, 5

    def ban(number: int, batch: Batch) -> None:
        batch["bias"] = torch.zeros(ROWS, LENGTH, 1)
        if number == STEP:
            # Every word is banned where nothing is to be said: the loss does not count it, its gradient is NaN.
            batch["bias"][row, position] = -torch.inf
            batch["labels"][row, position] = -100

    callback, losses = locator(tmp_path / "incidents"), LossMeanVarCallback(every_n_steps=1)
    module = Language(ban)
    with our_warnings() as messages:
        fit(module, tmp_path, callbacks=[callback, losses, AdaptiveClipThreshold()], max_steps=STEP + 3)
    incident = only(callback)
    assert (incident.step, incident.type) == (STEP, "N")
    [token] = incident.tokens
    assert (token.micro_batch, token.row, token.position) == (0, row, position)
    assert token.token_id is None, "its label counts for nothing"
    scalars = read_run(tmp_path / "run").scalars
    assert set(scalars["loss/mean_100"]) == set(range(STEP + 3))
    assert all(value == value and abs(value) < 10 for value in scalars["loss/mean_100"].values())
    assert scalars["loss/nonfinite"][STEP + 2] == 0
    # The clip beside it leaves the step out.
    assert scalars["skip/count"][STEP + 2] == 1
    assert any(f"step {STEP}: the gradient is not finite" in message for message in messages), messages
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
