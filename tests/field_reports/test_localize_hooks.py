"""Field reports whose features meet hooks, compiled models and hidden gradients, shown with the search for tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback
from stabilizer.localize.incident import Incident
from tests.field_reports.helpers import Checkpointed, covers, fit, our_warnings
from tests.field_reports.localize_tools import LENGTH, ROWS, Batch, Language, locator, only
from tests.launcher import run_distributed
from tests.localize_loops import Plan, grad_loc, run
from tests.models import TinyTransformer

BAD = (0, 2, 1, 7)
PLAN = Plan(steps=26, faulty=24, bad=(BAD,))


def _places(incident: Incident) -> list[tuple[int, int, int, int | None]]:
    return [(token.rank, token.micro_batch, token.row, token.position) for token in incident.tokens]


def test_B037_the_token_is_found_in_a_model_that_was_compiled_and_called_before(tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        model: Any = torch.compile(TinyTransformer(num_layers=2), backend="aot_eager")
        model(torch.zeros(4, 16, dtype=torch.long))
        return model  # type: ignore[no-any-return]

    callback = grad_loc(tmp_path)
    run(PLAN, [callback], make_model=make_model)
    incident = only(callback)
    assert _places(incident) == [BAD]
    assert incident.reproducible is True
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < incident.threshold


@covers("single")
@pytest.mark.parametrize("what", ["the module", "its model"])
def test_B037_the_token_is_found_in_a_trainer_s_model_that_was_compiled_in_place(what: str, tmp_path: Path) -> None:
    row, position = 1, 5

    def ban(number: int, batch: Batch) -> None:
        batch["bias"] = torch.zeros(ROWS, LENGTH, 1)
        if number == 3:
            batch["bias"][row, position] = -torch.inf
            batch["labels"][row, position] = -100

    module, callback = Language(ban), locator(tmp_path / "incidents")
    compiled = module if what == "the module" else module.model
    compiled.compile(backend="aot_eager")
    module.model(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    fit(module, tmp_path, callbacks=[callback], max_steps=5)
    assert [place[1:] for place in _places(only(callback))] == [(0, row, position)]


def test_B037_a_loop_whose_model_was_compiled_in_place_is_told_why_there_is_no_search(tmp_path: Path) -> None:
    model: Any = TinyTransformer(num_layers=2)
    model.compile(backend="aot_eager")
    model(torch.zeros(4, 16, dtype=torch.long))
    callback = grad_loc(tmp_path)
    run(PLAN, [callback], make_model=lambda: model)
    incident = only(callback)
    assert incident.observed_norm > 10 * incident.threshold
    assert "model.compile()" in (incident.error or "")


class InPlace(TinyTransformer):
    """Blocks behind which an activation writes over its input."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        for number, layer in enumerate(self.layers):
            self.layers[number] = nn.Sequential(layer, nn.LeakyReLU(0.5, inplace=True))


def test_B038_activations_in_place_train_as_before_and_the_token_is_found(tmp_path: Path) -> None:
    callback = grad_loc(tmp_path, position_map="always")
    searched, plain = run(PLAN, [callback], make_model=InPlace), run(PLAN, [], make_model=InPlace)
    assert _places(only(callback)) == [BAD]
    for one, other in zip(searched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B110_checkpointed_blocks_change_nothing_of_an_incident(use_reentrant: bool, tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        model = TinyTransformer()
        for number in (1, 2):
            model.layers[number] = Checkpointed(model.layers[number], use_reentrant=use_reentrant)
        return model

    with_them, without = grad_loc(tmp_path / "a"), grad_loc(tmp_path / "b")
    run(PLAN, [with_them], make_model=make_model)
    run(PLAN, [without])
    one, other = only(with_them), only(without)
    assert _places(one) == _places(other) == [BAD]
    assert (one.num_passes, one.num_forwards) == (other.num_passes, other.num_forwards)
    assert one.tokens[0].grad_norm == pytest.approx(other.tokens[0].grad_norm, rel=1e-5)
    assert one.counterfactual_norm == pytest.approx(other.counterfactual_norm, rel=1e-4)
    assert [part.norm for part in one.micro_batches] == pytest.approx(
        [part.norm for part in other.micro_batches], rel=1e-5
    )


def _train(rank: int, world_size: int, folder: str, strategy: str) -> dict[str, Any]:
    callback = grad_loc(Path(folder) / strategy)
    run(Plan(strategy=strategy, steps=26, faulty=24, bad=((1, 2, 1, 7),)), [callback], rank=rank)
    incident = only(callback)
    norms = {(part.rank, part.micro_batch): part.norm for part in incident.micro_batches}
    return {"places": _places(incident), "norms": norms, "notes": incident.notes, "error": incident.error}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """A bad token on rank 1, in an accumulation without sync before its end."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return {strategy: run_distributed(_train, folder, strategy, world_size=2) for strategy in ("ddp", "fsdp2")}


def test_B076_fsdp2_gives_the_local_norms_that_ddp_gives(found: dict[str, list[dict[str, Any]]]) -> None:
    ddp, fsdp2 = found["ddp"][0], found["fsdp2"][0]
    assert ddp["norms"].keys() == {(rank, number) for rank in range(2) for number in range(4)}
    assert fsdp2["norms"] == pytest.approx(ddp["norms"], rel=1e-4)
    assert all(norm > 0 for norm in fsdp2["norms"].values())


def test_B123_a_micro_batch_whose_gradients_fsdp2_hides_is_searched(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["fsdp2"]:
        assert rank["error"] is None
        assert rank["places"] == [(1, 2, 1, 7)]


def _others(value: Any) -> set[type]:
    """Types in containers that are not plain."""
    if isinstance(value, dict):
        return set().union(*(_others(item) for pair in value.items() for item in pair))
    if isinstance(value, list):
        return set().union(*map(_others, value))
    return set() if type(value) in (str, int, float, bool, type(None), Tensor) else {type(value)}


# Two runs in one folder would warn as well.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@covers("single")
def test_B005_a_checkpoint_after_an_incident_holds_plain_types_only_and_resumes(tmp_path: Path) -> None:
    def plant(number: int, batch: Batch) -> None:
        if number == 4:
            batch["bias"] = torch.full((1, 1, 1), math.nan)

    def again(callback: GradLocCallback, *, max_steps: int, **options: Any) -> list[str]:
        saves = ModelCheckpoint(tmp_path / str(max_steps), filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [callback, saves, AdaptiveClipThreshold()]
        with our_warnings() as messages:
            fit(
                Language(plant),
                tmp_path,
                callbacks=callbacks,
                max_steps=max_steps,
                enable_checkpointing=True,
                version=f"run{max_steps}",
                **options,
            )
        return messages

    first, second = locator(tmp_path / "a"), locator(tmp_path / "b")
    again(first, max_steps=6)
    assert only(first).step == 4
    path = tmp_path / "6" / "step=6.ckpt"
    saved = torch.load(path, weights_only=True)
    [state] = [value for key, value in saved["callbacks"].items() if key.startswith("GradLocCallback")]
    assert _others(state) == set()
    # The data begin anew: their bad batch comes again, and the callback still rests from the search before.
    messages = again(second, max_steps=12, ckpt_path=path)
    assert any(message.startswith("step 10: the gradient is not finite") for message in messages), messages
    assert second.incidents == []
