"""Ranks that differ (a fault of one of them, a gradient of one of them) clip, skip and stop together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StepContext
from tests.clip_loops import fixed
from tests.launcher import run_distributed
from tests.skip_tools import NAN, Faults, Run, train
from tests.test_nonfinite_ranks import broken_norms

BAD = 6
#: The first step after BAD at which ranks exchange what has failed, and the one at which they read it.
TOLD, KNOWN = 8, 16
SPREAD = ("ddp", "fsdp2")


class Flaky(AdaptiveClipThreshold):
    """Fails at step BAD on rank 1."""

    def norms_of(self, context: StepContext) -> Tensor:
        """As ever, but once."""
        if context.step == BAD and torch.distributed.get_rank() == 1:
            raise RuntimeError("on one rank only")
        return super().norms_of(context)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A failure is logged with its traceback."""
    logging.getLogger("stabilizer").disabled = True
    try:
        yield
    finally:
        logging.getLogger("stabilizer").disabled = False


def squares_given(run: Run) -> list[float]:
    """This rank's part of the sum of squares that SGD was given, by step: momentum' = 0.9 momentum + gradient + decay.

    Args:
        run: With plain momentum and weight decay of 0.1.
    """
    found = []
    for old, new in zip(run.states, run.states[1:], strict=False):
        total = 0.0
        for name, momentum in new.items():
            if not name.endswith(": momentum_buffer"):
                continue
            weight = old[name.split(":")[0]].double()
            before = old.get(name)
            kept = torch.zeros_like(weight) if before is None else 0.9 * before.double()
            decay = 0.1 * weight
            # In a first step the momentum is the gradient itself.
            total += float((momentum.double() - kept - decay).square().sum())
        found.append(total)
    return found


def moved(run: Run) -> list[bool]:
    """Whether each step has changed anything."""
    return [bool(run.moved(step)) for step in range(len(run.states) - 1)]


# Plain modules on every rank: nobody averages their gradients.


def alone_in_trouble(rank: int, world_size: int, options: dict[str, Any], fault: float) -> Any:
    """Models that are not synchronised; one step of rank 1 goes wrong."""
    result = train(
        "plain",
        [AdaptiveClipThreshold(**options)],
        num_steps=BAD + 3,
        faults={(BAD, 1): fault},
        rank=rank,
        num_ranks=world_size,
    )
    return moved(result), result.error, result.warnings


def test_ranks_that_are_not_synchronised_skip_together() -> None:
    results = run_distributed(alone_in_trouble, {"rule": fixed(1e9)}, NAN, timeout=40)
    for has_moved, error, _ in results:
        assert has_moved == [step != BAD for step in range(BAD + 3)]
        assert error is None
    [message] = [text for text in results[0][2] if "not finite" in text]
    assert message.startswith(f"step {BAD}: the gradient is not finite in lm_head.weight ")
    assert "the loss is not finite on rank 1" in message
    assert all("not finite" not in text for text in results[1][2])


def test_ranks_that_are_not_synchronised_stop_together() -> None:
    options = {"on_spike": "raise", "on_nonfinite": "ignore", "rule": fixed(100.0)}
    for has_moved, error, _ in run_distributed(alone_in_trouble, options, 1e5, timeout=40):
        assert has_moved == [True] * BAD + [False]
        assert error is not None


def test_a_row_of_skips_ends_all_ranks_though_one_alone_sees_the_fault() -> None:
    for error, num_done in run_distributed(rows_of_skips, timeout=40):
        assert "3 steps in a row were skipped up to step" in error
        assert num_done == BAD + 2


def rows_of_skips(rank: int, world_size: int) -> Any:
    """From a step on all gradients of rank 1 are bad."""
    callback = AdaptiveClipThreshold(max_consecutive_skips=2, warmup_cap=None)
    faults: Faults = {(step, 1): NAN for step in range(BAD, BAD + 20)}
    result = train("plain", [callback], num_steps=BAD + 20, faults=faults, rank=rank, num_ranks=world_size)
    return result.error, result.num_done


# A fault of ours on one rank.


def cannot_measure(rank: int, world_size: int, strategy: str) -> Any:
    """Rank 1 cannot measure from a step on, at which the gradient of all ranks is not finite."""
    callback = AdaptiveClipThreshold(warmup_cap=None)
    with broken_norms(callback, is_here=rank == 1, at=BAD):
        result = train(
            "plain",
            [callback],
            num_steps=KNOWN + 4,
            faults={(BAD, None): NAN},
            rank=rank,
            num_ranks=world_size,
            strategy=strategy,
        )
    return moved(result), result.error, {n: v for n, v in result.states[-1].items() if strategy == "ddp"}


@pytest.mark.parametrize("strategy", SPREAD)
def test_what_one_rank_cannot_measure_is_left_out_by_both_ranks_or_by_none(strategy: str) -> None:
    """Whole gradients tell the other rank; of halves nobody knows the norm then."""
    (first, *rest), (second, *others) = run_distributed(cannot_measure, strategy, timeout=40)
    assert first == second == [step != BAD or strategy == "fsdp2" for step in range(KNOWN + 4)]
    assert rest[0] is None
    assert others[0] is None
    assert all(torch.equal(value, others[1][name]) for name, value in rest[1].items())


def fail_once(rank: int, world_size: int, strategy: str, verb: Any, faults: dict[Any, float]) -> Any:
    """Twenty steps; a clip fails on rank 1, another one goes on."""
    layers = LayerClipCallback(rule=fixed(1e-3), granularity={".*": "all"}, on_nonfinite="skip_step")
    total = Flaky(rule=fixed(1e-2 if verb == "clip" else 50.0), on_spike=verb)
    with quiet():
        result = train(
            "plain",
            [layers, total] if verb == "clip" else [total],
            num_steps=20,
            faults=faults,
            rank=rank,
            num_ranks=world_size,
            strategy=strategy,
            optimizer="sgd",
        )
    return {
        "moved": moved(result),
        "squares": squares_given(result),
        "weights": {name: value for name, value in result.states[-1].items() if strategy == "ddp"},
        "error": result.error,
        "skipped": total.num_skipped(),
    }


@pytest.mark.parametrize("strategy", SPREAD)
def test_nobody_clips_until_all_ranks_know_of_the_failure(strategy: str) -> None:
    first, second = run_distributed(fail_once, strategy, "clip", {}, timeout=40)
    assert first["error"] is second["error"] is None
    given = torch.tensor([first["squares"], second["squares"]], dtype=torch.float64)
    norms = (given.sum(0) if strategy == "fsdp2" else given[0]).sqrt()
    # Two clips in a row: the first leaves 1e-3, less than the second lets through. Later the first is alone.
    clipped = [step for step in range(20) if float(norms[step]) < 2e-3]
    assert clipped == [*range(BAD), *range(KNOWN, 20)]
    assert norms[clipped].tolist() == pytest.approx([1e-3] * len(clipped), rel=1e-2)
    assert all(float(norms[step]) > 0.1 for step in range(BAD, KNOWN))
    if strategy == "ddp":
        torch.testing.assert_close(*given, rtol=0, atol=0)
        assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize(("fault", "skips"), [(1e4, False), (NAN, True)])
def test_a_step_is_skipped_by_all_ranks_or_by_none(strategy: str, fault: float, skips: bool) -> None:
    """A spike cannot be judged any more when one rank has failed; what is not finite can."""
    faults = {(3, None): 1e4, (BAD + 3, None): fault}
    first, second = run_distributed(fail_once, strategy, "skip_step", faults, timeout=40)
    skipped = {3, BAD + 3} if skips else {3}
    assert first["moved"] == second["moved"] == [step not in skipped for step in range(20)]
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
