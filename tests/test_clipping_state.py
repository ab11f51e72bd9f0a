"""What clips leave in checkpoints: a resumed run decides as the uninterrupted one does, bit for bit."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback
from stabilizer.errors import StabilizerWarning
from tests.clip_loops import HandLoop, fixed, norms_of
from tests.contract_hosts import EPOCH, HOSTS, make_host
from tests.launcher import run_distributed
from tests.lightning_models import make_trainer
from tests.lightning_variants import Plain
from tests.models import make_transformer
from tests.states import same
from tests.tiny_loops import told

RULES = ["robust_log", "mean_multiple", "quantile", "zscore"]


def make(rule: str) -> list[StabilizerCallback]:
    """Clips that act from the third step on."""
    spec = {"name": rule, "warmup_steps": 2, **({"k": 3.0} if rule == "mean_multiple" else {})}
    options: dict[str, Any] = {"rule": spec, "every_n_steps": 1, "strict": True}
    return [
        LayerClipCallback(**options, rules={".*lm_head": fixed(0.2, schedule={4: 0.3})}),
        AdaptiveClipThreshold(**options, max_threshold=1.9),
    ]


def interrupted(rank: int, world_size: int, host_name: str, rule: str, folder: str) -> list[Any]:
    """Two epochs at once, and one after the other: weights, points of the second epoch and states."""
    found = []
    for is_whole in (True, False):
        host = make_host(host_name, rank=rank, num_ranks=world_size)
        path = Path(folder) / str(is_whole)
        path.mkdir(exist_ok=True)
        callbacks = make(rule)
        if not is_whole:
            host.train(callbacks, num_steps=EPOCH, save=path)
            callbacks = make(rule)
        weights = host.train(callbacks, num_steps=2 * EPOCH, load=None if is_whole else path)
        points = {key: value for key, value in host.points.items() if key[1] >= EPOCH and key[0].startswith("clip/")}
        found.append((weights, points, [callback.state_dict() for callback in callbacks]))
    return found


CASES = [*((host, "robust_log") for host in HOSTS), *(("plain", rule) for rule in RULES[1:])]


@pytest.mark.parametrize(("host_name", "rule"), CASES)
def test_a_resumed_run_clips_as_the_uninterrupted_one(host_name: str, rule: str, tmp_path: Path) -> None:
    _compare(interrupted(0, 1, host_name, rule, str(tmp_path)))


@pytest.mark.parametrize("host_name", ["lightning.pytorch", "accelerate", "plain"])
def test_on_two_ranks(host_name: str, tmp_path: Path) -> None:
    results = run_distributed(interrupted, host_name, "robust_log", str(tmp_path))
    for result in results:
        _compare(result, has_points=result is results[0])


def _compare(found: list[Any], *, has_points: bool = True) -> None:
    (weights, points, states), (again, points_again, states_again) = found
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert points_again == points
    assert all(map(same, states, states_again))
    clipped = [value for (tag, _), value in points.items() if "coefficient" in tag and value < 1]
    assert bool(clipped) == bool(points) == has_points, "nothing was clipped: the test says nothing"


WARM = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 3}


def test_history_survives_and_decides(tmp_path: Path) -> None:
    """The first step of the second loop is clipped by the norms of the first one."""
    first = LayerClipCallback(rule=WARM, every_n_steps=1, strict=True)
    with HandLoop(first, a=3, b=2) as loop:
        loop.steps(3, a=1.0, b=2.0)
        received = loop.step(a=9.0, b=2.0)
        torch.save(loop.handle.state_dict(), tmp_path / "state.pt")
    second = LayerClipCallback(rule=WARM, every_n_steps=1, strict=True)
    with HandLoop(second, a=3, b=2) as loop:
        loop.handle.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        again = loop.step(a=9.0, b=2.0)
    assert norms_of(received)["a"] == pytest.approx(3.0)
    assert norms_of(again)["a"] == pytest.approx(3.0, rel=1e-6)
    assert list(loop.values("clip/layer_rate/a")) == [4]
    assert loop.values("clip/layer_rate/a")[4] == pytest.approx(2 / 5)


def test_loading_does_not_change_or_share_its_argument() -> None:
    callback = LayerClipCallback(rule=WARM, strict=True)
    with HandLoop(callback, a=3) as loop:
        loop.steps(4, a=1.0)
    state = callback.state_dict()
    original = copy.deepcopy(state)
    other = LayerClipCallback(rule=WARM, strict=True)
    other.load_state_dict(state)
    with HandLoop(other, a=3) as loop:
        loop.steps(4, a=50.0)
    assert same(state, original)


def test_another_rule_is_said_and_starts_anew() -> None:
    callback = LayerClipCallback(rule=WARM, strict=True)
    with HandLoop(callback, a=3, b=2) as loop:
        loop.steps(4, a=1.0, b=1.0)
    state = callback.state_dict()
    other = LayerClipCallback(rule="robust_log", min_norm=0.1, strict=True)
    with pytest.warns(StabilizerWarning, match=r"arguments differ.*rule: 'mean_multiple.*min_norm: 0.0 -> 0.1"):
        other.load_state_dict(state)
    with told() as messages, HandLoop(other, a=3, b=2) as loop:
        received = loop.step(a=100.0, b=1.0)
    assert [("new warm-up" in message, "a, b" in message) for message in messages] == [(True, True)]
    assert norms_of(received)["a"] == pytest.approx(100.0)


def test_another_k_is_said_and_keeps_the_history() -> None:
    callback = LayerClipCallback(rule=WARM, strict=True)
    with HandLoop(callback, a=3) as loop:
        loop.steps(4, a=1.0)
    other = LayerClipCallback(rule={**WARM, "k": 5.0}, strict=True)
    with pytest.warns(StabilizerWarning, match="k=3.0.*k=5.0"):
        other.load_state_dict(callback.state_dict())
    with HandLoop(other, a=3) as loop:
        received = loop.step(a=100.0)
    assert norms_of(received)["a"] == pytest.approx(5.0)


def test_layers_that_are_gone_or_new() -> None:
    callback = LayerClipCallback(rule=WARM, strict=True)
    with HandLoop(callback, a=3, b=2, c=4) as loop:
        loop.steps(4, a=1.0, b=2.0, c=3.0)
    other = LayerClipCallback(rule=WARM, strict=True)
    other.load_state_dict(callback.state_dict())
    with HandLoop(other, c=4, d=2, a=3) as loop:
        received = loop.step(c=50.0, d=50.0, a=50.0)
    assert norms_of(received) == pytest.approx({"c": 9.0, "d": 50.0, "a": 3.0})


def test_a_layer_that_is_unfrozen_leaves_the_others_their_history() -> None:
    layers, total = LayerClipCallback(rule=WARM, strict=True), AdaptiveClipThreshold(rule=WARM, strict=True)
    with HandLoop(layers, total, a=3, b=2) as loop:
        frozen = loop.model["b"].weight
        frozen.requires_grad_(False)
        loop.steps(4, a=1.0)
        assert layers.thresholds() == pytest.approx({"a": 3.0})
        frozen.requires_grad_(True)
        received = loop.step(a=2.0, b=2.0)
        assert layers.thresholds()["b"] == math.inf
        assert layers.thresholds()["a"] == pytest.approx(3.0, rel=0.1)
        assert norms_of(received) == pytest.approx({"a": 2.0, "b": 2.0})
        received = loop.step(a=50.0, b=2.0)
        assert norms_of(received)["b"] < 2.0  # the total has a threshold: it has been seen all along
        loop.steps(2, a=1.0, b=1.0)
        assert math.isfinite(layers.thresholds()["b"])


def test_a_layer_that_is_unfrozen_in_a_trainer() -> None:
    from lightning.pytorch.callbacks import Callback

    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                embedding = pl_module.model.embed_tokens
                embedding.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(embedding.parameters())})

    model = make_transformer()
    model.embed_tokens.requires_grad_(False)
    callback = LayerClipCallback(rule=WARM, strict=True)
    make_trainer(max_steps=5, callbacks=[callback, Unfreeze()]).fit(Plain(model))
    [rule] = callback.state_dict()["extra"]["clips"]["0"]["thresholds"]["rules"]
    counts = rule["state"]["num_accepted"].tolist()
    assert counts == [2, 5, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("change", [{"version": 2}, {"extra": None}])
def test_a_state_that_cannot_be_read_is_one_clear_error(change: dict[str, Any]) -> None:
    state = {**LayerClipCallback().state_dict(), **change}
    if state["extra"] is None:
        del state["extra"]
    with pytest.raises(ValueError, match="LayerClipCallback: cannot load a state of version"):
        LayerClipCallback().load_state_dict(state)
