"""Gradients that are not finite, on two ranks: what is said of them, and who stops."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stabilizer import measurement
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES
from tests.skip_tools import INF, NAN, SQRT, changed, train
from tests.test_failures import Raises

BAD = 2
STRATEGIES = ("ddp", "fsdp1", "fsdp2")
#: Size of the first bad gradient of a backward pass.
HEAD = 512


def one_fault(rank: int, world_size: int, host: str, strategy: str, where: Any, value: float, verb: Any) -> Any:
    """Some steps, one of which goes wrong on some ranks."""
    callback = LayerClipCallback(on_nonfinite=verb, every_n_steps=1)
    result = train(
        host,
        [callback],
        num_steps=4,
        faults={(BAD, rank): value} if where is None or rank in where else {},
        rank=rank,
        num_ranks=world_size,
        strategy=strategy,
    )
    return {
        "warnings": result.warnings,
        "error": result.error,
        "num_done": result.num_done,
        "kept": changed(result.states[BAD], result.states[BAD + 1]) == [],
        "is_finite": all(bool(torch.isfinite(value).all()) for value in result.states[-1].values()),
        "is_closed": callback.driver is None,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("where", "value", "origin"),
    [
        ([0], NAN, "the loss is not finite on rank 0; "),
        ([1], NAN, "the loss is not finite on rank 1; "),
        ([0, 1], NAN, "the loss is not finite on ranks 0, 1; "),
        ([1], SQRT, "every rank's loss is finite; the backward pass is not finite on rank 1; "),
    ],
)
def test_the_first_bad_parameter_and_the_rank_are_named(
    strategy: str, where: list[int], value: float, origin: str
) -> None:
    results = run_distributed(one_fault, "plain", strategy, where, value, "skip_step")
    [message], nothing = (found["warnings"] for found in results)
    assert nothing == [], "one rank speaks"
    named = re.match(
        rf"step {BAD}: the gradient is not finite in lm_head\.weight \((.*?)\) first in backward ", message
    )
    assert named is not None
    assert sum(int(num) for num in re.findall(r"\d+", named[1])) == HEAD, "each element once"
    assert "backward order, then norm.bias (" in message
    assert origin in message
    assert message.endswith("the step is skipped")
    assert all(found["kept"] and found["is_finite"] and found["error"] is None for found in results)


@pytest.mark.covers(feature="skipped steps")
@pytest.mark.parametrize(
    "host",
    [
        pytest.param(host, marks=pytest.mark.covers(host=host.split()[0].removesuffix(".pytorch")))
        for host in ["accelerate", *PACKAGES, f"{PACKAGES[0]} manual"]
    ],
)
@pytest.mark.parametrize("strategy", [pytest.param(s, marks=pytest.mark.covers(strategy=s)) for s in ("ddp", "fsdp2")])
def test_they_are_named_in_every_host(host: str, strategy: str) -> None:
    results = run_distributed(one_fault, host, strategy, [1], NAN, "skip_step", timeout=90)
    [message], _ = (found["warnings"] for found in results)
    assert "lm_head.weight (512 NaN) first in backward order" in message
    assert "the loss is not finite on rank 1" in message
    assert all(found["kept"] for found in results)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("host", ["plain", "accelerate", PACKAGES[0]])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_raise_ends_all_ranks_before_the_update(strategy: str, host: str, bad_rank: int) -> None:
    for found in run_distributed(one_fault, host, strategy, [bad_rank], INF, "raise", timeout=90):
        assert found["error"] is not None
        assert found["error"].startswith(f"step {BAD}: the gradient is not finite; ")
        assert f"on rank {bad_rank}" in found["error"]
        assert found["num_done"] == BAD
        assert found["kept"]
        assert found["is_finite"]
        assert found["is_closed"]


def in_one_shard(rank: int, world_size: int, strategy: str, verb: Any) -> Any:
    """Four elements of one parameter are bad, all of them in the shard of rank 1."""

    def spoil(step: int, model: nn.Module) -> None:
        if step != BAD:
            return
        for name, parameter in model.named_parameters():
            if name.endswith("feed_forward.up.weight") and "layers.1" in name and rank == 1:
                gradient = parameter.grad
                assert gradient is not None
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.view(-1)[:3] = NAN
                local.view(-1)[3] = INF

    callback = LayerClipCallback(on_nonfinite=verb, every_n_steps=1)
    result = train(
        "plain",
        [callback],
        num_steps=4,
        after_backward=spoil,
        rank=rank,
        num_ranks=world_size,
        strategy=strategy,
    )
    moved = result.moved(BAD)
    return result.warnings, result.error, [name for name in moved if "layers.1" not in name], bool(moved)


@pytest.mark.parametrize("verb", ["skip_step", "raise", "zero_layer"])
def test_what_is_bad_in_one_rank_s_shard_alone_is_bad_for_all(verb: str) -> None:
    """The counts are those of all shards, each element once."""
    for rank, (warnings, error, others, has_moved) in enumerate(run_distributed(in_one_shard, "fsdp2", verb)):
        text = (
            error if verb == "raise" else warnings[0] if rank == 0 else "layers.1.feed_forward.up.weight (3 NaN, 1 Inf)"
        )
        assert "layers.1.feed_forward.up.weight (3 NaN, 1 Inf)" in text
        assert "first in backward order" not in text, "there is only one"
        assert has_moved == (verb == "zero_layer")
        assert bool(others) == (verb == "zero_layer")


@contextlib.contextmanager
def broken_norms(counter: StabilizerCallback, *, is_here: bool, at: int) -> Iterator[None]:
    """Local norms cannot be computed from a step on."""
    original = measurement.norms

    def broken(*args: Any, **kwargs: Any) -> Any:
        if is_here and counter.next_step() >= at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    measurement.norms = broken
    logging.getLogger("stabilizer").disabled = True
    try:
        yield
    finally:
        measurement.norms = original
        logging.getLogger("stabilizer").disabled = False


def break_measuring(rank: int, world_size: int, strategy: str, verb: Any, options: dict[str, Any]) -> Any:
    """Twelve steps; rank 1 cannot measure from step 2 on."""
    callbacks = [
        LayerClipCallback(on_nonfinite=verb, every_n_steps=1, **options),
        AdaptiveClipThreshold(on_nonfinite=verb, warmup_cap=None),
    ]
    with broken_norms(callbacks[0], is_here=rank == 1, at=2):
        result = train("plain", callbacks, num_steps=12, rank=rank, num_ranks=world_size, strategy=strategy)
    return {
        "moved": [bool(result.moved(step)) for step in range(12)],
        "error": result.error,
        "warnings": [text for text in result.warnings if "clip_value=" not in text],
        "num_skipped": [callback.num_skipped() for callback in callbacks],
        "weights": {name: value for name, value in result.states[-1].items() if strategy == "ddp"},
    }


@pytest.mark.parametrize("options", [{}, {"clip_value": {".*lm_head": 1e-3}}])
@pytest.mark.parametrize("verb", ["skip_step", "raise", "zero_layer"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_measuring_that_fails_is_no_bad_gradient(strategy: str, verb: str, options: dict[str, Any]) -> None:
    results = run_distributed(break_measuring, strategy, verb, options, timeout=40)
    for found in results:
        assert found["error"] is None
        assert found["moved"] == [True] * 12
        assert found["num_skipped"] == [0, 0]
    assert len(results[0]["warnings"]) == 1
    assert "measuring gradients failed on a rank" in results[0]["warnings"][0]


def raise_inside(rank: int, world_size: int, strategy: str, on_rank: int, verb: Any) -> Any:
    """One rank's callback raises at step 1, and a loss is bad at step 10, when all ranks know of it."""
    bad = Raises(at=1, on_rank=on_rank, name="bad")
    logging.getLogger("stabilizer").disabled = True
    try:
        result = train(
            "plain",
            [bad, LayerClipCallback(on_nonfinite=verb, every_n_steps=1)],
            num_steps=12,
            faults={(10, 0): NAN},
            rank=rank,
            num_ranks=world_size,
            strategy=strategy,
        )
    finally:
        logging.getLogger("stabilizer").disabled = False
    return bad.seen[-1], result.error is None, [bool(result.moved(step)) for step in range(len(result.states) - 1)]


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize(("strategy", "verb"), [("ddp", "skip_step"), ("fsdp2", "skip_step"), ("fsdp2", "raise")])
def test_one_rank_that_fails_in_a_callback_hangs_nobody(strategy: str, verb: str, on_rank: int) -> None:
    results = run_distributed(raise_inside, strategy, on_rank, verb, timeout=40)
    assert {found[0] for found in results} == {1, 3}
    for _, goes_on, moved in results:
        assert goes_on == (verb == "skip_step")
        assert moved == [True] * 10 + [False] + [True] * goes_on
