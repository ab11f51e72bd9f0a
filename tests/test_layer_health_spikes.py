"""LayerHealthCallback on norms that are written down: explosions, drifts and losses that stay."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from stabilizer import tags
from stabilizer.callbacks import LayerHealthCallback
from tests.scripted_norms import BLOCKS, NUM_BLOCKS, SHORT, kinds, names_of, noise, only, play

EXPLOSIONS = {
    "explosion_all": ([*range(NUM_BLOCKS + 2)], "info"),
    "explosion_shallow": ([0, 1, 2, 3], "warning"),
    "explosion_one": ([6], "warning"),
    "explosion_some": ([6, 7, 8], "warning"),
}


@pytest.mark.parametrize("kind", EXPLOSIONS)
def test_a_planted_explosion(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One step in the middle of an interval: its number, its layers, how many times; the rest of the run is calm."""
    places, severity = EXPLOSIONS[kind]
    names = names_of(NUM_BLOCKS)
    norms = noise(100, names)
    norms[57, places] *= 50
    norms[57, places[0]] *= 3
    norms[53, places] *= 20
    callback = LayerHealthCallback(**SHORT)
    with caplog.at_level(logging.INFO, "stabilizer"):
        points, said = play(callback, norms, names=names)
    [found] = callback.findings
    assert (found.kind, found.severity, found.step) == (kind, severity, 57)
    layers = ["embed", *BLOCKS, "head"]
    assert found.layers[0] == layers[places[0]]
    assert set(found.layers) <= {layers[place] for place in places}
    assert len(found.layers) == min(len(places), 8)
    usual = math.exp(np.median(np.log(norms[41:61, places[0]])))
    assert found.evidence["ratio"] == pytest.approx(norms[57, places[0]] / usual, rel=1e-4)
    assert found.evidence["num_layers"] == len(places)
    assert found.evidence["num_steps"] == 2
    at = {step for (tag, step), value in points.items() if tag == f"{tags.FINDING}/{kind}" and value}
    assert at == {60}
    assert bool(said) == (severity != "info")
    if severity == "info":
        assert found.text in caplog.text
    others = {tag for (tag, _), value in points.items() if value}
    assert others == {f"{tags.FINDING}/{kind}"}


def test_one_layer_alone_names_the_part_of_the_block() -> None:
    names = names_of(NUM_BLOCKS, has_parts=True)
    norms = noise(70, names)
    norms[57, names.index("layers.5.attn")] *= 80
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    found = only(callback, "explosion_one")
    assert found.layers == ("layers.5",)
    assert found.evidence["attention_ratio"] > 30
    assert found.evidence["mlp_ratio"] < 2
    assert kinds(callback) == ["explosion_one"]


def test_explosions_do_not_become_usual() -> None:
    """Thirty bad steps in a hundred, and each is seen."""
    names = names_of(NUM_BLOCKS)
    norms = noise(400, names)
    bad = np.random.default_rng(3).permutation(np.arange(200, 300))[:30]
    norms[bad, 4] *= 40
    callback = LayerHealthCallback(**{**SHORT, "window": 100, "cooldown_steps": 0})
    play(callback, norms, names=names)
    found = [finding for finding in callback.findings if finding.kind == "explosion_one"]
    assert sum(finding.evidence["num_steps"] for finding in found) == 30
    assert {finding.layers for finding in found} == {("layers.3",)}
    assert {finding.step for finding in found} <= set(bad.tolist())


@pytest.mark.parametrize(("growth", "is_found"), [(1.3, False), (3.0, True)])
def test_drift_of_the_total(growth: float, is_found: bool) -> None:
    names = names_of(NUM_BLOCKS)
    norms = noise(204, names)
    norms[104:184] *= growth ** np.linspace(0, 1, 80)[:, None]
    norms[184:] *= growth
    callback = LayerHealthCallback(**SHORT)
    points, _ = play(callback, norms, names=names)
    assert kinds(callback) == ["total_drift"] * is_found
    if is_found:
        [found] = callback.findings
        totals = np.sqrt((norms**2).sum(1))[found.step - 79 : found.step + 1].reshape(4, 20)
        medians = np.median(totals, 1)
        assert found.evidence["ratio"] == pytest.approx(medians[-1] / medians[0], rel=1e-4)
        assert 150 <= found.step <= 190
    assert points[f"{tags.FINDING}/total_drift", 100] == 0


def test_a_level_that_comes_and_goes_is_no_drift() -> None:
    """Medians of 1, 4, 2 and 3: over twice the first, but nothing that grows."""
    names = names_of(NUM_BLOCKS)
    norms = noise(201, names)
    norms[121:141] *= 4
    norms[141:161] *= 2
    norms[161:] *= 3
    callback = LayerHealthCallback(**SHORT, layers=["head"])
    points, _ = play(callback, norms, names=names)
    assert points[f"{tags.FINDING}/total_drift", 180] == 0


def test_a_spike_of_the_total_is_no_drift() -> None:
    names = names_of(NUM_BLOCKS)
    norms = noise(150, names)
    norms[100:105] *= 30
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    assert kinds(callback) == ["explosion_all"]


def test_a_loss_that_no_longer_falls() -> None:
    names, random = names_of(NUM_BLOCKS), np.random.default_rng(5)
    losses = 2 - 0.02 * np.minimum(np.arange(200), 100) + random.normal(0, 0.05, 200)
    losses[[30, 150]] = math.nan
    callback = LayerHealthCallback(**SHORT)
    points, said = play(callback, noise(200, names), names=names, losses=losses.tolist())
    found = only(callback, "loss_plateau")
    assert found.severity == "info"
    assert said == []
    assert 130 <= found.step <= 160
    finite = [(step, loss) for step, loss in enumerate(losses[: found.step + 1]) if math.isfinite(loss)]
    for number, part in enumerate((finite[-40:-20], finite[-20:])):
        x, y = np.array(part).T
        assert found.evidence[f"slope_{number}"] == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-4)
        assert found.evidence[f"slope_{number}"] > -2 * found.evidence[f"error_{number}"]
    assert points[f"{tags.FINDING}/loss_plateau", 100] == 0


def test_without_a_loss_there_is_no_plateau_and_no_complaint() -> None:
    callback = LayerHealthCallback(**SHORT)
    _, said = play(callback, noise(100, names_of(4)), names=names_of(4))
    assert (said, callback.findings) == ([], [])
    flat = LayerHealthCallback(**{**SHORT, "loss_window": None})
    play(flat, noise(100, names_of(4)), names=names_of(4), losses=[1.0] * 100)
    assert (flat.loss_weight, flat.findings) == (None, [])


def test_layers_and_exclude() -> None:
    """What is not looked at explodes unseen, has no part in depth, and may lack gradients."""
    names = names_of(NUM_BLOCKS)
    norms = noise(70, names)
    norms[57, 9] *= 500
    norms[57, 5] *= 100
    norms[:, 0] = 0
    callback = LayerHealthCallback(**SHORT, layers=[*range(NUM_BLOCKS), "head"], exclude=["head"])
    play(callback, norms, names=names)
    assert [(one.kind, one.layers) for one in callback.findings] == [("explosion_one", ("layers.4",))]
