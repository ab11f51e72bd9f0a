"""Clipping single elements: named layers only, with a warning, under every kind of sharding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import LayerClipCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.clip_loops import HandLoop, fixed, gradient_of
from tests.clip_reference import worst_error
from tests.launcher import run_distributed
from tests.models import make_transformer, reference_gradients, token_batch
from tests.spread import CASES, backward, spread, whole_gradients
from tests.tiny_loops import no_log, told

LIMIT = 1e-3
ABOUT_DIRECTION = "turns the direction"


def test_it_is_off_unless_asked_for() -> None:
    callback = LayerClipCallback()
    assert callback.clip_value is None
    assert not callback.clips_values


def test_named_layers_only_after_all_else() -> None:
    callback = LayerClipCallback(rule=fixed(3.0), clip_value={"b.*": 1.0}, every_n_steps=1, strict=True)
    with told() as messages, HandLoop(callback, a=3, b1=4, b2=2) as loop:
        received = loop.step(a=9.0, b1=9.0, b2=1.0)
    expected = {name: gradient_of(norm, size) for name, norm, size in (("a", 3.0, 3), ("b1", 3.0, 4), ("b2", 1.0, 2))}
    assert worst_error(received, {**expected, "b1": expected["b1"].clamp(-1, 1)}) < 1e-6
    assert [ABOUT_DIRECTION in message for message in messages] == [True]
    # What the optimizer gets, elements and all.
    assert loop.values("grad_norm/layer_after/b1")[0] == pytest.approx(float(expected["b1"].clamp(-1, 1).norm()))


def test_it_says_so_and_says_it_again() -> None:
    callback = LayerClipCallback(rule=fixed(100.0), clip_value={"a": 1.0}, strict=True)
    said: dict[int, str] = {}
    with HandLoop(callback, a=3) as loop:
        for step in range(502):
            with told() as messages:
                loop.step(a=0.1)
            if messages:
                [said[step]] = messages
    assert list(said) == [0, 500]
    assert all(ABOUT_DIRECTION in message and "{'a': 1.0}" in message for message in said.values())
    assert "is still on" in said[500]


def test_observing_cuts_nothing_and_says_nothing() -> None:
    callback = LayerClipCallback(rule=fixed(100.0), clip_value={"a": 1.0}, mode="observe", strict=True)
    with HandLoop(callback, a=3) as loop:
        loop.step(a=10.0)
    assert loop.changes == {"a": 0}


def cut(rank: int, world_size: int, strategy: str, layer: str) -> tuple[dict[str, Tensor | None], list[str]]:
    """One step with elements of one layer cut; the whole gradients and what was said."""
    model, data_rank = spread(strategy, rank)
    callback = LayerClipCallback(rule=fixed(1e6), clip_value={layer: LIMIT}, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilizerWarning)
        with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
            backward(model, strategy, data_rank)
            optimizer.step()
    return whole_gradients(model), [str(w.message) for w in caught if issubclass(w.category, StabilizerWarning)]


def _expected(strategy: str, prefix: str) -> dict[str, Tensor | None]:
    batches = [token_batch(rank) for rank in range(CASES[strategy].num_data_ranks)]
    raw = reference_gradients(make_transformer(), batches)
    return {n: g.clamp(-LIMIT, LIMIT) if n.startswith(prefix) and g is not None else g for n, g in raw.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "fsdp2_tp"])
def test_elements_of_shards(strategy: str) -> None:
    for found, messages in run_distributed(cut, strategy, "layers.1", world_size=CASES[strategy].world_size):
        assert worst_error(found, _expected(strategy, "layers.1.")) < 1e-5
        assert all(ABOUT_DIRECTION in message for message in messages), messages


def test_parts_of_sums_are_left_whole_and_named() -> None:
    """Elements of a Partial gradient are no elements of the model's: clipping them would clip something else."""
    whole = reference_gradients(make_transformer(), [token_batch()])
    results = run_distributed(cut, "sp", "norm")
    assert all(worst_error(found, whole) < 1e-5 for found, _ in results)
    # Only the first rank speaks.
    assert any(
        "['norm.weight', 'norm.bias'] (2 in all)" in message and "not clipped by value" in message
        for message in results[0][1]
    )


def test_parts_of_sums_elsewhere_do_not_matter() -> None:
    for found, messages in run_distributed(cut, "sp", "lm_head"):
        assert worst_error(found, _expected("sp", "lm_head.")) < 1e-5
        assert not any("not clipped by value" in message for message in messages)


def scaled(**options: Any) -> dict[str, Tensor | None]:
    """A step whose gradients are still multiplied by a loss scale, as a fused optimizer gets them."""
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.0, fused=True)  # noqa: E731
    callback = LayerClipCallback(rule=fixed(100.0), clip_value={"a": 1.0}, strict=True, **options)
    with told(), HandLoop(callback, make=make, a=3) as loop:
        loop.optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
        loop.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        return loop.step(a=9.0 * 1024)


def test_limits_are_in_units_without_the_loss_scale() -> None:
    assert worst_error(scaled(), {"a": gradient_of(9.0, 3).clamp(-1, 1) * 1024}) < 1e-6
