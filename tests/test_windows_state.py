"""Windowed statistics as a metric: arguments, saving, moving, casting, and what torchmetrics does around them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.windows import WindowedStatistics

NAN = float("nan")
#: More than the ring of (3, 8) holds, so that it has wrapped.
LOSSES = [5.0, 4.0, NAN, 6.0, 1e6, 3.0, 2.0, 8.0, 2.5, 1.0, NAN, 7.0]


def _metric(losses: list[float] = LOSSES) -> WindowedStatistics:
    return _feed(WindowedStatistics(windows=(3, 8)), losses)


def _feed(metric: WindowedStatistics, losses: list[float], *, start: int = 0) -> WindowedStatistics:
    for step, loss in enumerate(losses, start):
        metric.update(torch.tensor(loss), step)
    return metric


def _bits(metric: WindowedStatistics) -> dict[str, Any]:
    """State and results, for a comparison without tolerance, as text since NaN differs from itself."""
    found = {**{f"state {name}": value for name, value in metric.metric_state.items()}, **metric.compute()}
    return {name: (value.dtype, repr(value.tolist())) for name, value in found.items() if isinstance(value, Tensor)}


# Arguments.


@pytest.mark.parametrize(
    "windows",
    [(), (1, 100), (0,), (-5, 10), (100, 100), (100.0, 1000), ("100",), "100", (True, 100), 100, None, {100}],
    ids=repr,
)
def test_windows_out_of_range(windows: Any) -> None:
    with pytest.raises(ValueError, match="expected one or more distinct whole numbers of at least 2") as error:
        WindowedStatistics(windows=windows)
    assert str(error.value).startswith(f"windows={windows!r}: ")


def test_windows_come_in_any_order_and_sequence() -> None:
    assert WindowedStatistics().windows == (100, 1000)
    assert WindowedStatistics(windows=[50, 2, 7]).windows == (2, 7, 50)
    one = _feed(WindowedStatistics(windows=[4]), LOSSES).compute()
    assert list(one) == ["mean_4", "std_4", "slope_4", "slope_error_4", "num_nonfinite"]


@pytest.mark.parametrize(
    ("value", "step", "message"),
    [
        (torch.ones(2, 2), torch.ones(2, 2).long(), r"value has shape \(2, 2\): expected \(\) or \(n,\)"),
        (torch.ones(9), torch.arange(9), r"value has 9 elements: expected at most 8 \(the longest window\) a call"),
        (torch.ones(3), 5, "step has 1 elements, value has 3: give a tensor with one step a value"),
        (torch.ones(3), torch.arange(2), "step has 2 elements, value has 3"),
        (torch.ones(()), torch.tensor(5.0), "step is torch.float32: expected whole numbers"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(value: Tensor, step: Tensor | int, message: str) -> None:
    metric = _metric()
    before = _bits(metric)
    with pytest.raises(ValueError, match=message):
        metric.update(value, step)
    assert _bits(metric) == before


def test_a_step_that_is_no_whole_number() -> None:
    with pytest.raises(TypeError, match="float"):
        _metric().update(torch.ones(()), 5.5)  # type: ignore[arg-type]


def test_no_values_are_no_update_and_a_number_is_a_value() -> None:
    metric = _metric()
    before = _bits(metric)
    metric.update(torch.ones(0), torch.arange(0))
    assert _bits(metric) == before
    metric.update(2.5, 12)
    assert _bits(metric) == _bits(_metric([*LOSSES, 2.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_any_type_of_value(dtype: torch.dtype) -> None:
    metric = WindowedStatistics(windows=(3,))
    metric.update(torch.tensor([1, 2, 4, 8], dtype=dtype)[1:], torch.arange(3))
    assert metric.compute()["mean_3"].item() == pytest.approx(14 / 3, rel=1e-15)


def test_a_value_with_a_graph_keeps_none() -> None:
    metric = WindowedStatistics(windows=(3,))
    loss = torch.ones((), requires_grad=True) * 2
    metric.update(loss, 0)
    found = [*metric(loss, 1).values(), *metric.metric_state.values(), *metric.compute().values()]
    assert not any(value.requires_grad for value in found)


# Kept and taken back.


def _by_state_dict(metric: WindowedStatistics) -> WindowedStatistics:
    buffer = io.BytesIO()
    torch.save(metric.state_dict(), buffer)
    buffer.seek(0)
    loaded = WindowedStatistics(windows=metric.windows)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    return loaded


_COPIES: dict[str, Callable[[WindowedStatistics], WindowedStatistics]] = {
    "state_dict": _by_state_dict,
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
    "deepcopy": copy.deepcopy,
    "clone": lambda metric: metric.clone(),  # type: ignore[return-value, dict-item]
}


@pytest.mark.parametrize("copied", _COPIES.values(), ids=_COPIES.keys())
@pytest.mark.parametrize("num", [1, 5, 12])
def test_a_copy_goes_on_bit_by_bit(copied: Callable[[WindowedStatistics], WindowedStatistics], num: int) -> None:
    original = _metric(LOSSES[:num])
    resumed = copied(original)
    assert _bits(resumed) == _bits(original)
    _feed(original, LOSSES, start=num)
    assert _bits(resumed) != _bits(original)
    _feed(resumed, LOSSES, start=num)
    assert _bits(resumed) == _bits(original)


def test_what_was_handed_out_or_in_stays_what_it_was() -> None:
    metric = _metric()
    parts: list[dict[str, Any]] = [metric.state_dict(), metric.compute(), dict(metric.metric_state)]
    copies = copy.deepcopy(parts)
    other = WindowedStatistics(windows=(3, 8))
    other.load_state_dict(parts[0])
    _feed(other, [9.0] * 9)
    _feed(metric, [9.0] * 9)
    for now, then in zip(parts, copies, strict=True):
        assert all(torch.equal(now[name], then[name]) for name in then)
    before = _bits(other)
    other.load_state_dict(saved := other.state_dict())
    for value in saved.values():
        value.zero_()
    assert _bits(other) == before


def test_a_state_that_does_not_fit() -> None:
    state = _metric().state_dict()
    metric = _metric([1.0, 2.0, 3.0])
    before = _bits(metric)
    longer = WindowedStatistics(windows=(3, 9)).state_dict()
    with pytest.raises(RuntimeError, match=r"values holds 9 values: expected 8, the longest of windows=\(3, 8\)"):
        metric.load_state_dict(longer)
    with pytest.raises(RuntimeError, match=r"Missing.*num_finite"):
        metric.load_state_dict({name: value for name, value in state.items() if name != "num_finite"})
    with pytest.raises(RuntimeError, match=r"Unexpected.*other"):
        metric.load_state_dict({"other": torch.ones(())})
    assert metric.load_state_dict({}, strict=False).missing_keys == list(state)
    assert _bits(metric) == before


def test_a_state_is_part_of_a_model_that_holds_the_metric() -> None:
    model, other = (nn.ModuleDict({"loss": WindowedStatistics(windows=(3, 8))}) for _ in range(2))
    _feed(model["loss"], LOSSES)  # type: ignore[arg-type]
    assert set(model.state_dict()) == {f"loss.{name}" for name in ("values", "steps", "num_finite", "num_nonfinite")}
    other.load_state_dict(model.state_dict())
    assert _bits(other["loss"]) == _bits(model["loss"])  # type: ignore[arg-type]
    other["loss"].persistent(False)  # type: ignore[operator]
    assert other.state_dict() == {}
    other.load_state_dict({})


def test_reset_is_a_new_start() -> None:
    metric = _metric()
    metric.reset()
    assert _bits(_feed(metric, LOSSES[::-1])) == _bits(_metric(LOSSES[::-1]))


# What torchmetrics does around it.


def test_each_compute_is_of_now() -> None:
    metric = _metric([2.0, 4.0])
    assert metric.compute()["mean_8"].item() == 3
    metric.compute()["mean_8"].zero_()
    assert metric.compute()["mean_8"].item() == 3
    metric.load_state_dict(_metric([10.0, 20.0]).state_dict())
    assert metric.compute()["mean_8"].item() == 15


def test_forward_gives_its_own_values_and_keeps_all() -> None:
    metric = _metric()
    found = metric(torch.tensor([1.0, 3.0]), torch.tensor([12, 13]))
    assert (found["mean_3"].item(), found["slope_8"].item()) == (2, 2)
    assert found["num_nonfinite"].item() == 0
    assert _bits(metric) == _bits(_metric([*LOSSES, 1.0, 3.0]))


def test_other_ranks_are_never_asked() -> None:
    def gather(*args: Any, **kwargs: Any) -> list[Tensor]:
        raise AssertionError("compute() or forward() gathered the state of all ranks")

    metric = _metric()
    metric.distributed_available_fn, metric.dist_sync_fn = lambda: True, gather
    metric.compute()
    metric(torch.tensor(1.0), 12)


def test_inference_mode_now_and_then() -> None:
    metric = _metric()
    with torch.inference_mode():
        metric(torch.tensor(1.0), 12)
        metric.update(torch.tensor(2.0), 13)
    metric.update(torch.tensor(3.0), 14)
    assert _bits(metric) == _bits(_metric([*LOSSES, 1.0, 2.0, 3.0]))


def test_a_dict_finds_it_again() -> None:
    metric = WindowedStatistics(windows=(3, 8))
    found = {metric: "here"}
    _feed(metric, LOSSES).compute()
    metric.reset()
    assert found[metric] == "here"
    assert hash(metric) != hash(metric.clone())


@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.half(),
        lambda module: module.bfloat16(),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.float(),
        lambda module: module.share_memory(),
    ],
    ids=["half", "bfloat16", "to a type", "to a device and a type", "float", "share_memory"],
)
def test_a_cast_of_the_model_rounds_nothing(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.ModuleDict({"loss": _metric(), "head": nn.Linear(2, 2)})
    cast(model)
    metric = model["loss"]
    assert isinstance(metric, WindowedStatistics)
    assert _bits(metric) == _bits(_metric())
    metric.reset()
    assert metric.values.dtype == torch.float64


def test_only_set_dtype_changes_precision_and_never_counts() -> None:
    metric = _metric()
    metric.set_dtype(torch.float16)
    assert {name: value.dtype for name, value in metric.metric_state.items() if isinstance(value, Tensor)} == {
        "values": torch.float16,
        **dict.fromkeys(("steps", "num_finite", "num_nonfinite"), torch.int64),
    }
    # Finite as it came, but not as it would be kept.
    metric.reset()
    _feed(metric, [1.0, 2.0, 1e6])
    found = metric.compute()
    assert (found["mean_8"].item(), found["num_nonfinite"].item()) == (1.5, 1)
    assert found["mean_8"].dtype == torch.float64


def test_a_device_without_float64_gets_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = _metric([0.1, 0.2])
    monkeypatch.setattr("stabilizer.windows.accumulation_dtype", lambda device: torch.float32)
    assert metric.to("cpu").values.dtype == torch.float32
    assert WindowedStatistics().values.dtype == torch.float32
    metric.load_state_dict(_metric([0.1, 0.2]).state_dict() | {"values": torch.full((9,), 0.5, dtype=torch.float64)})
    assert metric.compute()["mean_8"].dtype == torch.float32


def test_autocast_and_another_default_type_round_nothing() -> None:
    expected = _bits(_metric())
    with torch.autocast("cpu", torch.bfloat16):
        assert _bits(_metric()) == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        losses = [torch.tensor(loss, dtype=torch.float32) for loss in LOSSES]
        metric = WindowedStatistics(windows=(3, 8))
        for step, loss in enumerate(losses):
            metric.update(loss, step)
        assert _bits(metric) == expected
    finally:
        torch.set_default_dtype(torch.float32)
