"""What a skipped step leaves in thresholds (nothing) and in counts, and when skipping comes to an end."""

from __future__ import annotations

from typing import Any

import pytest

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES
from tests.skip_tools import HOSTS, INF, NAN, train

RULE = {"name": "robust_log", "warmup_steps": 8}
BAD, SPIKE = 12, 22


def clips(**options: Any) -> list[Any]:
    """Both, with short warm-ups."""
    return [
        LayerClipCallback(rule=RULE, every_n_steps=1, **options),
        AdaptiveClipThreshold(rule=RULE, warmup_cap=None, **options),
    ]


def learned(callbacks: list[Any]) -> list[dict[str, Any]]:
    """Everything that thresholds come from."""
    return [callback.extra_state()["clips"].get("0", {}).get("thresholds", {}) for callback in callbacks]


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit by bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "numpy"):
        return bool(one.numpy().tobytes() == other.numpy().tobytes())
    return bool(one == other)


def spoil_one_layer(step: int, model: Any) -> None:
    """One element of one layer: the norms of all others are as good as ever."""
    if step == BAD:
        for name, parameter in model.named_parameters():
            if name.endswith("layers.1.attention.q.weight"):
                parameter.grad.view(-1)[0] = NAN


def run_with_a_bad_step(
    rank: int, world_size: int, host: str, strategy: str, value: float | None, bad_rank: int | None
) -> dict[str, Any]:
    """A bad step after the warm-up, and a spike ten steps later; without a value, only one layer is bad."""
    callbacks = clips()
    faults: dict[tuple[int, int | None], float] = {(SPIKE, None): 1000.0}
    if value is not None:
        faults[BAD, bad_rank] = value
    result = train(
        host,
        callbacks,
        num_steps=SPIKE + 2,
        faults=faults,
        after_backward=spoil_one_layer if value is None else lambda step, model: None,
        rank=rank,
        num_ranks=world_size,
        strategy=strategy,
        look=lambda: (learned(callbacks), [callback.thresholds() for callback in callbacks]),
    )
    states, limits = zip(*result.extra, strict=True)
    return {
        "kept": same(states[BAD], states[BAD + 1]) and limits[BAD] == limits[BAD + 1],
        "goes_on": not same(states[BAD + 1], states[BAD + 2]) and not same(states[BAD - 1], states[BAD]),
        "num_limits": [len(found) for found in limits[BAD]],
        "is_finite": all(0 < limit < 1e9 for found in limits[SPIKE] for limit in found.values()),
        "moved": [bool(result.moved(step)) for step in range(BAD - 1, SPIKE + 2)],
        "points": result.points,
        "limits": limits,
    }


def check(found: dict[str, Any], *, logs: bool = True) -> None:
    """What must be true on every rank."""
    assert found["kept"], "thresholds, bit by bit"
    assert found["goes_on"]
    assert found["is_finite"]
    assert found["moved"] == [step != BAD for step in range(BAD - 1, SPIKE + 2)]
    if not logs:
        return
    points = found["points"]
    assert points["skip/count", SPIKE] == 1
    assert [points["skip/consecutive", step] for step in (BAD - 1, BAD, BAD + 1)] == [0, 1, 0]
    layers = {tag: value for (tag, step), value in points.items() if step == SPIKE and "/layer_coefficient/" in tag}
    assert layers
    assert max(layers.values()) < 0.1, "the spike is caught in every layer"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("value", [NAN, None])
def test_a_skipped_step_enters_no_history(host: str, value: float | None) -> None:
    found = run_with_a_bad_step(0, 1, host, "single", value, None)
    assert found["num_limits"] == [5, 1]
    check(found)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("bad_rank", [1, 0])
def test_it_enters_none_on_any_rank(strategy: str, bad_rank: int) -> None:
    results = run_distributed(run_with_a_bad_step, "plain", strategy, INF, bad_rank)
    for rank, found in enumerate(results):
        check(found, logs=rank == 0)
    first, second = (found["limits"] for found in results)
    assert first == second, "all ranks have the same thresholds"


def skip_for_ever(rank: int, world_size: int, host: str, strategy: str) -> dict[str, Any]:
    """From step 6 on one rank's loss is bad; before it, a row that comes to an end."""
    bad = {(step, world_size - 1): NAN for step in (1, 2, 3, *range(6, 20))}
    callback = LayerClipCallback(max_consecutive_skips=3, every_n_steps=1)
    result = train(host, [callback], num_steps=20, faults=bad, rank=rank, num_ranks=world_size, strategy=strategy)
    return {
        "error": result.error,
        "num_done": result.num_done,
        "count": callback.extra_state()["clips"]["0"]["skips"],
        "moved": [bool(result.moved(step)) for step in range(len(result.states) - 1)],
        "is_closed": callback.driver is None,
    }


def check_end(found: dict[str, Any], *, layer: str) -> None:
    """The fourth skip in a row is one too many."""
    assert found["error"] is not None
    assert found["error"].startswith("LayerClipCallback: 4 steps in a row were skipped up to step 9, more than max_")
    assert "Total gradient norms by step: 5: " in found["error"]
    assert "9: nan; layers that are not finite: " in found["error"]
    assert layer in found["error"]
    assert found["num_done"] == 9
    assert found["moved"] == [True, False, False, False, True, True, False, False, False, False]
    assert found["count"] == {"count": 7, "consecutive": 4, "overflows": 0}
    assert found["is_closed"]


@pytest.mark.parametrize("host", HOSTS)
def test_too_many_skips_in_a_row_end_the_run(host: str) -> None:
    check_end(skip_for_ever(0, 1, host, "single"), layer="model.lm_head" if host.startswith(PACKAGES) else "lm_head")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_they_end_it_on_all_ranks_at_the_same_step(strategy: str) -> None:
    for found in run_distributed(skip_for_ever, "plain", strategy):
        check_end(found, layer="lm_head")


def test_they_end_it_on_all_ranks_of_a_trainer() -> None:
    for found in run_distributed(skip_for_ever, PACKAGES[0], "ddp"):
        check_end(found, layer="model.lm_head")


@pytest.mark.parametrize("verb", ["raise", "ignore", "zero_layer"])
def test_who_does_not_skip_counts_no_row(verb: Any) -> None:
    callback = LayerClipCallback(max_consecutive_skips=1, on_nonfinite=verb)
    result = train("plain", [callback], num_steps=5, faults={(step, None): NAN for step in range(1, 5)})
    assert callback.num_skipped() == 0
    assert callback.extra_state()["clips"]["0"]["skips"]["consecutive"] == 0
    assert (result.error is None) == (verb != "raise")


def test_a_lasting_new_level_is_accepted_although_it_is_skipped() -> None:
    """Else a run with on_spike="skip_step" would stand still for ever."""
    faults = {(step, None): 50.0 for step in range(20, 80)}
    callback = LayerClipCallback(rule=RULE, on_spike="skip_step")
    result = train("plain", [callback], num_steps=80, faults=faults)
    moved = [bool(result.moved(step)) for step in range(80)]
    assert all(moved[:20])
    assert not any(moved[20:40])
    assert any(moved[20 + 33 :]), "33 steps of the new level are enough"
    assert result.error is None


def test_a_spike_that_is_skipped_is_remembered_as_a_spike_only() -> None:
    """One layer is over its threshold: its norm alone enters, flagged; healthy layers of a skipped step do not."""

    def spoil(step: int, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if step == BAD and name.startswith("layers.1."):
                parameter.grad.mul_(1e4)

    callback = LayerClipCallback(rule=RULE, on_spike="skip_step")
    result = train(
        "plain",
        [callback],
        num_steps=BAD + 3,
        after_backward=spoil,
        look=lambda: (callback.thresholds(), learned([callback])[0].get("rules", [{}])[0].get("state")),
    )
    assert result.moved(BAD) == []
    (before, old), (after, new) = result.extra[BAD], result.extra[BAD + 1]
    assert before == after, "no threshold has moved"
    position = list(before).index("layers.1")
    differs = {key: (old[key] != new[key]).reshape(-1, len(before)).any(0) for key in old}
    for key, columns in differs.items():
        assert not any(flag for place, flag in enumerate(columns.tolist()) if place != position), key
