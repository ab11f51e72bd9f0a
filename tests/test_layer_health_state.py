"""LayerHealthCallback across checkpoints, bad steps, ranks and devices."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks import LayerHealthCallback, StabilizerCallback, StepContext, attach
from stabilizer.errors import StabilizerWarning
from stabilizer.tally import LossTally
from tests import reference_health as reference
from tests.counting import fake_cuda
from tests.fake_suites import fake_suite
from tests.launcher import run_distributed
from tests.models import loss_of, token_batch
from tests.reference_run import LEARNING_RATE, reference_run
from tests.scripted_norms import SHORT, Scripted, names_of, play
from tests.spread import spread
from tests.states import same

NAMES = names_of(6, has_parts=True)


def _script(num_steps: int = 120) -> tuple[npt.NDArray[np.float64], list[float]]:
    """A run with nearly everything in it."""
    random = np.random.default_rng(0)
    norms = np.exp(random.normal(0, 0.2, (num_steps, len(NAMES))))
    norms *= np.array([1.0, *np.repeat(0.4 ** np.arange(6), 2), 1.0])
    norms[40:] *= 4 ** np.minimum(np.arange(num_steps - 40) / 60, 1)[:, None]
    norms[[28, 63, 69]] *= 100
    norms[[35, 61, 88], 6], norms[:, 7] = 200 * norms[[35, 61, 88], 6], 0
    return norms, (2 + random.normal(0, 0.1, num_steps)).tolist()


@pytest.mark.parametrize("at", [25, 60, 69])
def test_a_resumed_run_is_the_uninterrupted_one(at: int) -> None:
    """Saved between two examinations, at one whose numbers nobody has read yet, and in a window of an explosion."""
    norms, losses = _script()
    states: dict[int, Any] = {}

    def save(step: int, handle: Any) -> None:
        if step == at:
            states[step] = copy.deepcopy(handle.state_dict())

    whole, first, second = (LayerHealthCallback(**SHORT, cooldown_steps=30) for _ in range(3))
    expected, _ = play(whole, norms, names=NAMES, losses=losses)
    before, _ = play(first, norms[: at + 1], names=NAMES, losses=losses, each=save)
    after, _ = play(second, norms, names=NAMES, losses=losses, state=states[at], first=at + 1)
    assert {**before, **after} == expected
    assert second.findings == whole.findings
    kinds = {finding.kind for finding in whole.findings}
    assert kinds >= {"exponential_decay", "vanishing", "explosion_all", "explosion_one", "no_gradient", "loss_plateau"}
    assert same(second.state_dict(), whole.state_dict())


def _all_finite(state: Any) -> bool:
    if isinstance(state, Tensor):
        return bool(state.isfinite().all())
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else []
    return all(map(_all_finite, values)) and not (isinstance(state, float) and not math.isfinite(state))


def test_what_is_not_finite_leaves_no_trace() -> None:
    """The run without these steps sees the same, and finds the spike ten steps after."""
    norms, losses = _script()
    bad = np.zeros(len(norms), dtype=bool)
    bad[[20, 21, 50, 70, 71, 105]] = True
    spoilt = norms.copy()
    spoilt[bad, 3], spoilt[70, 3] = math.nan, math.inf
    callback = LayerHealthCallback(**SHORT)
    play(callback, spoilt, names=NAMES, losses=losses)
    assert _all_finite(callback.state_dict())
    history = callback.state_dict()["extra"]["history"]["0"]
    kept = dict(zip(history["steps"], history["norms"], strict=True))
    # Nothing of such a step, not even the norms of the other layers.
    assert not kept[105].any()
    assert kept[104][0] > 0
    [spike] = [one for one in callback.findings if one.kind == "explosion_one"]
    assert (spike.step, spike.layers) == (35, ("layers.2",))


class _Skip(StabilizerCallback):
    acts = may_skip = True

    def __init__(self, steps: set[int]) -> None:
        super().__init__(strict=True)
        self.steps = steps

    def on_gradients(self, context: StepContext) -> None:
        context.plan.skip(torch.tensor(context.step in self.steps))


def test_skipped_steps_are_left_out() -> None:
    norms = np.exp(np.random.default_rng(1).normal(0, 0.2, (80, len(NAMES))))
    norms[[45, 46]] *= 100
    seen = {}
    for steps in (set(), {45, 46}):
        callback = LayerHealthCallback(**SHORT)
        play(callback, norms, names=NAMES, others=[_Skip(steps)], losses=[1.0] * 80)
        seen[len(steps)] = callback
    assert [one.kind for one in seen[0].findings if one.kind != "loss_plateau"] == ["explosion_all"]
    assert [one.kind for one in seen[2].findings if one.kind != "loss_plateau"] == []
    state = seen[2].state_dict()["extra"]["history"]["0"]
    assert int(state["losses"]["num_finite"]) == 80 - 4 - 2


def test_an_overflow_of_a_scaler_is_left_out() -> None:
    """The scaler's own business: no row of it is kept, nobody is told."""
    model = Scripted(NAMES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    callback = LayerHealthCallback(**SHORT)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms = np.exp(np.random.default_rng(1).normal(0, 0.2, (45, len(NAMES)))).tolist()
    norms[33][2] = math.inf
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: None) as handle:
        for row in norms:
            scaler.scale(model.loss(row)).backward()
            handle.measure(scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert callback.findings == []
    state = callback.state_dict()["extra"]["history"]["0"]
    assert _all_finite(state)
    # The step did not happen: the next one has its number. Norms are those without the scale.
    assert state["steps"] == list(range(24, 44))
    expected = [row[0] for row in norms[24:33] + norms[34:]]
    assert state["norms"][:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_layers_that_are_unfrozen_start_a_baseline_of_their_own() -> None:
    """The norms begin anew; the losses and what was told go on."""
    norms, losses = np.exp(np.random.default_rng(1).normal(0, 0.2, (80, len(NAMES)))), [1.0] * 80
    norms[[28, 45, 68], 5] *= 100
    callback, model = LayerHealthCallback(**SHORT, cooldown_steps=0), Scripted(NAMES)
    for cell in model.cells[:3]:
        cell.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilizerWarning)
        with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: None) as handle:
            for step, row in enumerate(norms.tolist()):
                if step == 40:
                    model.requires_grad_(True)
                loss = model.loss(row)
                loss.backward()
                handle.record_loss(torch.tensor(losses[step]), weight=1)
                optimizer.step()
                optimizer.zero_grad()
    # That of step 45 comes before there is a baseline again, and is in the window when there is one.
    assert [one.step for one in callback.findings if one.kind == "explosion_one"] == [28, 45, 68]
    history = callback.state_dict()["extra"]["history"]["0"]
    assert history["layers"][0] == "embed"
    assert history["steps"] == list(range(60, 80))
    assert int(history["losses"]["num_finite"]) == 76


@pytest.mark.parametrize("window", [10, 40])
def test_a_window_of_another_length_takes_what_it_holds(window: int) -> None:
    norms, losses = _script()
    states: list[Any] = []

    def save(step: int, handle: Any) -> None:
        if step == 59:
            states.append(copy.deepcopy(handle.state_dict()))

    play(LayerHealthCallback(**SHORT), norms[:60], names=NAMES, losses=losses, each=save)
    other = LayerHealthCallback(**{**SHORT, "window": window, "loss_window": window})
    _, said = play(other, norms[:61], names=NAMES, losses=losses, state=states[0], first=60)
    assert any(f"window: 20 -> {window}" in text for text in said)
    state = other.state_dict()["extra"]["history"]["0"]
    assert state["steps"] == list(range(61 - min(window, 21), 61))
    np.testing.assert_allclose(state["norms"][-1, 0], norms[60, 0], rtol=1e-6)


def test_two_optimizers_are_told_apart() -> None:
    model = Scripted(NAMES)
    norms = np.exp(np.random.default_rng(1).normal(0, 0.2, (60, len(NAMES))))
    norms[38, [1, 8]] *= 100
    halves = [torch.optim.SGD([cell.weight for cell in cells], lr=1e-9) for cells in (model.cells[:7], model.cells[7:])]
    callback, points = LayerHealthCallback(**SHORT), {}

    def log(values: dict[str, float], step: int) -> None:
        points.update({(tag, step): value for tag, value in values.items()})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(None, model=model, optimizer=halves, callbacks=[callback], log=log):
            for row in norms.tolist():
                model.loss(row).backward()
                for optimizer in halves:
                    optimizer.step()
                model.zero_grad()
    assert [one.layers for one in callback.findings] == [("layers.0",), ("layers.3",)]
    said = [str(one.message) for one in caught if "explosion_one" in str(one.message)]
    assert [text.startswith("optimizer 1: explosion_one") for text in said] == [False, True]
    assert points[f"opt1/{tags.FINDING}/explosion_one", 40] == 2


#: Any difference between layers is a finding, so that there is something to compare.
SENSITIVE: dict[str, Any] = {
    "window": 8,
    "warmup_steps": 0,
    "every_n_steps": 4,
    "loss_window": 8,
    "vanishing_warning": 0.999,
    "parts_ratio": 1.0001,
    "decay_r_squared": 1e-9,
    "decay_half_depth": 0.999,
    "explosion_ratio": 1.0001,
    "explosion_k": 0.5,
    "plateau_errors": 1e-9,
    "strict": True,
}
NUM_STEPS = 13


def _train(rank: int, world_size: int, strategy: str) -> tuple[list[Any], Any, Any]:
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    callback, rows = LayerHealthCallback(**SENSITIVE), []
    options: dict[str, Any] = {"callbacks": [callback], "log": lambda *row: rows.append(row)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilizerWarning)
        with attach(None, model=model, optimizer=optimizer, **options) as handle:
            for step in range(NUM_STEPS):
                loss = loss_of(model, token_batch(data_rank, step=step))
                loss.backward()
                handle.record_loss(loss, weight=3)
                optimizer.step()
                optimizer.zero_grad()
    return callback.findings, callback.state_dict(), rows


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(feature="layer health", strategy=name, host="plain"))
        for name in ("ddp", "fsdp2")
    ],
)
def test_every_rank_finds_what_one_process_in_float64_finds(strategy: str) -> None:
    (findings, state, rows), (others, other, silence) = run_distributed(_train, strategy)
    assert findings == others
    assert same(state, other)
    assert rows
    assert silence == []
    run = reference_run([[token_batch(rank, step=step) for rank in range(2)] for step in range(NUM_STEPS)])
    blocks = np.array([[row[f"layers.{block}"] for block in range(4)] for row in run.layers])
    by_kind = {finding.kind: finding for finding in findings}
    vanishing, decay = by_kind["vanishing"], by_kind["exponential_decay"]
    kept = blocks[max(0, vanishing.step - 7) : vanishing.step + 1]
    assert vanishing.evidence["ratio"] == pytest.approx(reference.deep_over_shallow(kept), rel=1e-4)
    kept = blocks[max(0, decay.step - 7) : decay.step + 1]
    slope, r_squared, _ = reference.depth_line(reference.log_medians(kept))
    assert [decay.evidence[name] for name in ("slope", "r_squared")] == pytest.approx([slope, r_squared], rel=1e-3)
    assert by_kind.keys() & {"explosion_all", "explosion_shallow", "explosion_one", "explosion_some"}
    assert "parts_apart" in by_kind


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_never_waits_for_the_device() -> None:
    callback = LayerHealthCallback(window=8, warmup_steps=2, every_n_steps=3, loss_window=8, strict=True, layers=[0, 1])
    with fake_cuda():
        suite = fake_suite([callback])
        for _ in range(1, 80):
            tally = LossTally(["auto"])
            tally.begin({"labels": torch.zeros(2, 3, dtype=torch.int64, device="cuda")})
            tally.add(torch.ones((), device="cuda"), scale=torch.full((), 2.0, device="cuda"))
            suite.run(losses=tally.take(0))
            suite.finish()
        assert suite.step == 80
        assert len(callback._readings) > 20, "it was not examined"
