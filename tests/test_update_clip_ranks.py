"""UpdateClipCallback and OptimizerHealth on several ranks: one process in float64, and a rank that fails."""

from __future__ import annotations

import contextlib
import logging
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from stabilizer.callbacks import UpdateClipCallback, attach
from stabilizer.names import clean_name, layer_names
from tests.health_loops import HealthCallback
from tests.launcher import run_distributed
from tests.loggers import Points, points_of
from tests.models import make_transformer, reference_gradients, token_batch
from tests.reference_optimizer import AdamW, Array, clipped, update_rms
from tests.sharding import full
from tests.spread import CASES, backward, spread
from tests.states import same
from tests.tiny_loops import no_log

NUM_STEPS = 4
#: With this eps a step does not depend on the last bits of a gradient.
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-2}
LIMITS: dict[Any, float] = {"learning_rate": 0.4, "parameter": 0.06}
QUICK = ("single", "ddp", "fsdp1", "fsdp2", "sp")
STRATEGIES: list[Any] = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By clean name; a collective."""
    if not isinstance(model, FullyShardedDataParallel):
        return {clean_name(n.removeprefix("module.")): full(p.detach()).clone() for n, p in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {clean_name(name): p.detach().clone() for name, p in model.named_parameters()}


def _train(rank: int, world_size: int, strategy: str, relative_to: Any, mode: Any) -> tuple[Any, Any, Points, Any]:
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False, **OPTIONS)
    clip = UpdateClipCallback(
        max_rms=LIMITS[relative_to], relative_to=relative_to, mode=mode, every_n_steps=1, strict=True
    )
    health, rows = HealthCallback(), []
    with attach(None, model=model, optimizer=optimizer, callbacks=[clip, health], log=lambda *row: rows.append(row)):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(model, strategy, data_rank, step=step)
            optimizer.step()
        state = clip.state_dict(), health.state_dict()
    return whole_parameters(model), state, points_of(rows), health.findings


def _expected(num_data_ranks: int, relative_to: Any, mode: Any) -> tuple[dict[str, Array], Points]:
    model = make_transformer().double()
    oracle = AdamW(dict(model.named_parameters()), rate=0.05, **OPTIONS)
    names = list(oracle.parameters)
    layers = dict(zip(names, layer_names(names), strict=True))
    rates = dict.fromkeys(names, 0.05) if relative_to == "learning_rate" else None
    points: Points = {}
    for step in range(NUM_STEPS):
        gradients = reference_gradients(model, [token_batch(rank, step=step) for rank in range(num_data_ranks)])
        before = {name: value.copy() for name, value in oracle.parameters.items()}
        oracle.step({name: gradient for name, gradient in gradients.items() if gradient is not None})
        for layer, rms in update_rms(before, oracle.parameters, layers.__getitem__, rates=rates).items():
            points[f"update_clip/rms/{layer}", step] = rms
            points[f"update_clip/coefficient/{layer}", step] = min(1.0, LIMITS[relative_to] / rms)
        if mode == "act":
            limit = LIMITS[relative_to]
            oracle.parameters = clipped(before, oracle.parameters, layers.__getitem__, max_rms=limit, rates=rates)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(oracle.parameters[name]))
    return oracle.parameters, points


RUNS: list[Any] = [pytest.param(*one.values, "learning_rate", "act", marks=one.marks) for one in STRATEGIES]
RUNS += [("fsdp2", "parameter", "act"), ("fsdp2", "learning_rate", "observe")]


@pytest.mark.parametrize(("strategy", "relative_to", "mode"), RUNS)
def test_every_strategy_is_one_process_in_float64(strategy: str, relative_to: Any, mode: Any) -> None:
    case = CASES[strategy]
    ranks = run_distributed(_train, strategy, relative_to, mode, world_size=case.world_size)
    parameters, expected = _expected(case.num_data_ranks, relative_to, mode)
    coefficients = [value for (tag, _), value in expected.items() if "coefficient" in tag]
    assert min(coefficients) < 0.9
    assert coefficients.count(1.0) >= 2
    for found, state, _, findings in ranks:
        for name, whole in parameters.items():
            np.testing.assert_allclose(found[name].numpy(), whole, rtol=2e-5, atol=2e-6, err_msg=name)
        assert same(state[0], ranks[0][1][0])
        assert same(state[1], ranks[0][1][1]), "the ranks remember different things"
        assert findings == ranks[0][3]
    logged = ranks[0][2]
    for key, value in expected.items():
        assert logged[key] == pytest.approx(value, rel=1e-4), key


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name.values[0] != "single"])
def test_figures_of_the_optimizer_are_those_of_one_process(strategy: str) -> None:
    case = CASES[strategy]
    spread_out = run_distributed(_train, strategy, "learning_rate", "observe", world_size=case.world_size)[0][2]
    alone = run_distributed(_alone, case.num_data_ranks, world_size=1)[0]
    compared = {key: value for key, value in alone.items() if key[0].startswith("optimizer/")}
    if strategy.startswith("fsdp1") and strategy != "fsdp1_no_shard":
        # Flat shards do not keep rows together.
        compared = {key: value for key, value in compared.items() if "/row" not in key[0]}
    if strategy == "sp":
        # The gradients of norms are parts of sums there, and left out.
        known = ("optimizer/rms_g2_v/embed_tokens", "optimizer/rms_g2_v/lm_head")
        compared = {key: value for key, value in compared.items() if "rms" not in key[0] or key[0] in known}
    assert len({tag.split("/")[1] for tag, _ in compared}) >= 3
    for key, value in compared.items():
        assert spread_out[key] == pytest.approx(value, rel=2e-4, abs=1e-7), key


def _alone(rank: int, world_size: int, num_data_ranks: int) -> Points:
    """The gradient of all data ranks in one process."""
    model = make_transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False, **OPTIONS)
    rows: list[Any] = []
    with attach(
        None, model=model, optimizer=optimizer, callbacks=[HealthCallback()], log=lambda *row: rows.append(row)
    ):
        for step in range(NUM_STEPS):
            batches = [token_batch(one, step=step) for one in range(num_data_ranks)]
            gradients = reference_gradients(model.double(), batches)
            model.float()
            for name, parameter in model.named_parameters():
                gradient = gradients[name]
                parameter.grad = None if gradient is None else gradient.float()
            optimizer.step()
    return points_of(rows)


COPIES = "stabilizer.callbacks.update_meter.copies"


def _failing(rank: int, world_size: int, strategy: str) -> tuple[Any, Any, Any]:
    """Rank 1 cannot measure at step 3."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stabilizer").addHandler(handler)
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    clip = UpdateClipCallback(max_rms=1e-3, mode="act", every_n_steps=2)
    moved = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[clip], log=no_log):
        for step in range(9):
            optimizer.zero_grad()
            backward(model, strategy, data_rank, step=step)
            before = whole_parameters(model)
            is_bad = step == 3 and rank == 1
            with mock.patch(COPIES, _refuse) if is_bad else contextlib.nullcontext():
                optimizer.step()
            after = whole_parameters(model)
            moved.append(max(float((after[n] - before[n]).double().square().mean().sqrt()) / 0.05 for n in after))
    return moved, clip.has_failed, messages


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_that_fails_leaves_none_waiting_and_nobody_acts_alone(strategy: str) -> None:
    (moved, has_failed, messages), (other, other_failed, other_messages) = run_distributed(_failing, strategy)
    assert moved == pytest.approx(other, rel=1e-6)
    assert (has_failed, other_failed) == (True, True)
    # From the step on where one cannot act, none does; once all know of it, it is off.
    assert max(moved[:3]) < 4e-3
    assert min(moved[3:]) > 1e-2
    assert [text.split(" on rank")[0] for text in messages] == ["UpdateClipCallback.on_step_end failed at step 6"]
    assert [text.split(" on rank")[0] for text in other_messages] == ["UpdateClipCallback.on_step_end failed at step 6"]


def _in_bfloat16(rank: int, world_size: int) -> tuple[Points, Any, list[tuple[float, float]]]:
    """Micro-batches that ranks add up to something else each."""
    model = nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback, rows, counts = HealthCallback(), [], []
    torch.manual_seed(rank)
    with attach(None, model=wrapped, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for _ in range(3):
            optimizer.zero_grad()
            first, second = 100 * torch.randn(1, 64).bfloat16(), torch.randn(1, 64).bfloat16()
            with wrapped.no_sync():
                wrapped(first).sum().backward()
            counts.append((float((first + second == first).sum()), 64.0))
            wrapped(second).sum().backward()
            optimizer.step()
    return points_of(rows), callback.state_dict(), counts


def test_what_micro_batches_lose_is_counted_over_all_ranks() -> None:
    (points, state, counts), (_, other, others) = run_distributed(_in_bfloat16)
    assert same(state, other)
    for step, (own, theirs) in enumerate(zip(counts, others, strict=True)):
        expected = (own[0] + theirs[0]) / (own[1] + theirs[1])
        assert own != theirs
        assert points["optimizer/swallowed_gradients", step] == pytest.approx(expected)
