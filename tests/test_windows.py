"""Windowed statistics: against numpy, over long runs, with values that are not finite, kept, moved and restored."""

from __future__ import annotations

import itertools
import math
import statistics as exact
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from stabilizer.windows import WindowedStatistics, mean_std, trend
from tests.counting import HostReadError, count_collectives, fake_cuda
from tests.reference import window_statistics

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
Steps = Sequence[int] | range | npt.NDArray[np.int64]
NAN, INF = math.nan, math.inf


def _expected(values: Values, steps: Steps, windows: Sequence[int]) -> dict[str, float]:
    """What `compute` should say, by name and in order."""
    result: dict[str, float] = {}
    for window in windows:
        found = window_statistics(values, steps, window)
        result |= {f"{name}_{window}": found[name] for name in ("mean", "std")}
    result |= {f"{name}_{max(windows)}": found[name] for name in ("slope", "slope_error")}
    return result | {"num_nonfinite": float((~np.isfinite(np.asarray(values, np.float64))).sum())}


def _computed(metric: WindowedStatistics) -> dict[str, float]:
    return {name: value.item() for name, value in metric.compute().items()}


def _check(metric: WindowedStatistics, values: Values, steps: Steps, *, num_nonfinite: int | None = None) -> None:
    expected = _expected(values, steps, sorted(metric.windows))
    if num_nonfinite is not None:
        expected["num_nonfinite"] = num_nonfinite
    found = _computed(metric)
    assert list(found) == list(expected)
    # No absolute tolerance: a mean or a slope near zero must be right too.
    assert found == pytest.approx(expected, rel=1e-9, abs=0, nan_ok=True)


def _feed(metric: WindowedStatistics, values: Iterable[float], *, start: int = 0) -> WindowedStatistics:
    for step, value in enumerate(values, start):
        metric.update(torch.tensor(value, dtype=torch.float64), step)
    return metric


def _same_state(one: WindowedStatistics, other: WindowedStatistics) -> bool:
    return all(torch.equal(value, other.metric_state[key]) for key, value in one.metric_state.items())  # type: ignore[arg-type]


# Against numpy.


def test_the_oracle_agrees_with_exact_arithmetic_and_a_fit() -> None:
    y, x = 1e6 + np.random.randn(50), np.arange(50) * 3.0
    found = window_statistics(y, x, 20)
    fit, covariance = np.polyfit(x[-20:] - x[-20:].mean(), y[-20:] - y[-20:].mean(), 1, cov=True)
    assert found["mean"] == pytest.approx(exact.fmean(y[-20:]), rel=1e-15)
    assert found["std"] == pytest.approx(exact.stdev(y[-20:].tolist()), rel=1e-12)
    assert found["slope"] == pytest.approx(fit[0], rel=1e-9)
    assert found["slope_error"] == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)


def test_every_step_from_the_first_until_the_ring_has_wrapped_three_times() -> None:
    metric = WindowedStatistics(windows=(2, 7))
    values = (5 + np.random.randn(25)).tolist()
    for step in range(25):
        _feed(metric, values[step : step + 1], start=step)
        _check(metric, values[: step + 1], range(step + 1))


@pytest.mark.parametrize("num", range(5))
def test_too_few_values_are_nan_and_nothing_else(num: int) -> None:
    metric = _feed(WindowedStatistics(windows=(100,)), [3.0, 5.0, 4.0, 8.0, 1.0][:num])
    if num == 0:
        with pytest.warns(UserWarning, match="before the ``update``"):
            found = _computed(metric)
    else:
        found = _computed(metric)
    finite = [math.isfinite(found[f"{name}_100"]) for name in ("mean", "std", "slope", "slope_error")]
    assert finite == [num >= 1, num >= 2, num >= 2, num >= 3]


def test_two_values_have_a_slope_without_an_error() -> None:
    for _ in range(50):
        # Residuals of two values are rounding, not always 0.
        pair = torch.randn(2, dtype=torch.float64)
        slope, error = trend(pair, steps=torch.tensor([5, 8]), mask=torch.ones(2, dtype=torch.bool))
        assert slope.item() == pytest.approx((pair[1] - pair[0]).item() / 3)
        assert error.isnan()


def test_steps_with_gaps_and_steps_that_are_all_the_same() -> None:
    steps, values = [0, 10, 11, 500, 501, 1000], [1.0, 4.0, 2.0, 9.0, 7.0, 3.0]
    metric = WindowedStatistics(windows=(3, 5))
    metric.update(torch.tensor(values[:2]), torch.tensor(steps[:2]))
    metric.update(torch.tensor(values[2:]), torch.tensor(steps[2:]))
    _check(metric, values, steps)
    metric = WindowedStatistics(windows=(3, 5))
    metric.update(torch.tensor(values[:5]), torch.full((5,), 7))
    assert math.isnan(metric.compute()["slope_5"].item())
    assert math.isnan(metric.compute()["slope_error_5"].item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_late_run_is_as_precise_as_an_early_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 stands for a device that has no float64: it cannot tell these steps from their neighbours.
    monkeypatch.setattr("stabilizer.windows.accumulation_dtype", lambda device: dtype)
    steps = torch.arange(1000) + 3_000_000_001
    values = torch.arange(1000, 0, -1) + 1_000_000
    metric = WindowedStatistics(windows=(1000,))
    metric.update(values, steps)
    found = metric.compute()
    assert found["slope_1000"].dtype == found["mean_1000"].dtype == dtype
    assert found["slope_1000"].item() == -1
    assert found["mean_1000"].item() == pytest.approx(1_000_500.5, rel=1e-7)
    assert found["std_1000"].item() == pytest.approx(exact.stdev(values.tolist()), rel=1e-6)
    assert found["slope_error_1000"].item() < 1e-6
    # The sum of these is off by hundreds in float32, and so is their mean by about its deviation.
    values = torch.arange(1000) % 3 + 16_000_000
    metric.update(values, steps + 1000)
    assert metric.compute()["std_1000"].item() == pytest.approx(exact.stdev(values.tolist()), rel=1e-6)


def test_several_selections_at_once_and_anything_outside_of_them() -> None:
    values, steps = torch.tensor([NAN, 1.0, 2.0, 4.0, INF, 1e300]), torch.tensor([9, 0, 1, 2, 5, -(10**9)])
    masks = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6], dtype=torch.bool)
    together, line = mean_std(values.double(), mask=masks), trend(values.double(), steps=steps, mask=masks)
    for number, mask in enumerate(masks):
        expected = window_statistics(values[mask], steps[mask], 6)
        found = [together.mean[number], together.std[number], line.slope[number], line.error[number]]
        assert [value.item() for value in found] == pytest.approx(list(expected.values()), rel=1e-12, nan_ok=True)


def test_functions_of_no_entries_at_all() -> None:
    nothing = torch.zeros(0)
    results = [*mean_std(nothing, mask=nothing.bool()), *trend(nothing, steps=nothing.long(), mask=nothing.bool())]
    assert all(result.shape == () and result.isnan() for result in results)


# Long runs.


def _long_run(num: int) -> Array:
    """A falling loss on a large offset, with bursts, and values that are not finite."""
    values = 1e6 - 1e-4 * np.arange(num) + np.random.randn(num)
    for start in range(num // 5, num, num // 5):
        values[start : start + 40] = 1e12 * (1 + np.random.rand(40))
        values[start + 500 : start + 530] = NAN
    values[::9973] = INF
    return values


def _chunks(num: int) -> Iterator[tuple[int, int]]:
    start = 0
    for size in itertools.cycle([1, 1000, 7, 100, 999, 512, 2]):
        if start >= num:
            return
        yield start, min(start + size, num)
        start += size


def _check_end(metric: WindowedStatistics, values: Array, end: int) -> None:
    """Compare with numpy after `end` values, of which the last 3000 hold all windows."""
    start = max(0, end - 3000)
    _check(metric, values[start:end], np.arange(start, end), num_nonfinite=int((~np.isfinite(values[:end])).sum()))


def test_a_million_values_in_chunks() -> None:
    num = 1_000_000
    values = _long_run(num)
    source, steps = torch.from_numpy(values), torch.arange(num)
    metric = WindowedStatistics()
    checked = 0
    for start, end in _chunks(num):
        metric.update(source[start:end], steps[start:end])
        # Often behind a burst, while it is in both windows, in the long one, and in none.
        if end - checked > 20_000 or end % (num // 5) < 2500:
            _check_end(metric, values, end)
            checked = end
    _check_end(metric, values, num)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_values_one_by_one() -> None:
    num = 1_000_000
    values = _long_run(num)
    metric = WindowedStatistics()
    for step, value in enumerate(torch.from_numpy(values)):
        metric.update(value, step)
        if step % 50_021 == 0:
            _check_end(metric, values, step + 1)
    _check_end(metric, values, num)


def test_a_burst_that_has_left_leaves_no_bit_behind() -> None:
    windows = (10, 50)
    values = torch.randn(50, dtype=torch.float64)
    quiet = _feed(WindowedStatistics(windows=windows), values.tolist(), start=500)
    burst = _feed(WindowedStatistics(windows=windows), [1e12] * 37 + [1e300] * 63)
    _feed(burst, values.tolist(), start=500)
    # The same entries, in other places of the ring: only the order of sums differs.
    assert _computed(burst) == pytest.approx(_computed(quiet), rel=1e-13)


# Values that are not finite.

_BAD = {
    "first": [NAN, INF, 1.0, 2.0, 4.0, 3.0],
    "last": [1.0, 2.0, 4.0, 3.0, -INF, NAN],
    "everywhere": [NAN, 1.0, INF, 2.0, NAN, 4.0, -INF, 3.0, NAN, 5.0, NAN, 7.0, 2.0, NAN],
    "30 in a row": [1.0, 2.0, 4.0, 3.0, 9.0, 1.0, *[NAN] * 30, 2.0, 5.0],
    "more than the ring": [1.0, 2.0, *[NAN] * 100, 4.0, 5.0],
}


@pytest.mark.parametrize("values", _BAD.values(), ids=_BAD.keys())
@pytest.mark.parametrize("size", [1, 2, 5], ids="{} at once".format)
def test_values_that_are_not_finite_take_no_place(values: list[float], size: int) -> None:
    metric = WindowedStatistics(windows=(3, 5))
    for start in range(0, len(values), size):
        part = torch.tensor(values[start : start + size])
        metric.update(part, torch.arange(start, start + len(part)))
        assert all(state.isfinite().all() for state in metric.metric_state.values() if isinstance(state, Tensor))
    _check(metric, values, range(len(values)))


def test_nothing_but_nan() -> None:
    metric = _feed(WindowedStatistics(windows=(3,)), [NAN] * 20)
    found = _computed(metric)
    assert found.pop("num_nonfinite") == 20
    assert all(math.isnan(value) for value in found.values())
    _feed(metric, [1.0, 2.0], start=20)
    _check(metric, [NAN] * 20 + [1.0, 2.0], range(22))


def test_several_values_at_once_leave_the_same_state_as_one_after_the_other() -> None:
    values = torch.randn(200, dtype=torch.float64)
    values[[0, 3, 50, 51, 52, 120, 199]] = torch.tensor([NAN, INF, NAN, -INF, NAN, NAN, INF], dtype=torch.float64)
    single = _feed(WindowedStatistics(windows=(5, 30)), values.tolist())
    for sizes in ([30], [1, 29, 30], [7, 13, 2]):
        metric, start, rounds = WindowedStatistics(windows=(30, 5)), 0, itertools.cycle(sizes)
        while start < 200:
            part = values[start : start + next(rounds)]
            metric.update(part, torch.arange(start, start + len(part)))
            start += len(part)
        assert _same_state(metric, single)
        assert _computed(metric) == pytest.approx(_computed(single), abs=0)


# The device.


# Metric makes a deep copy of each state, and that of a fake tensor warns.
_FAKE = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")


@_FAKE
def test_no_wait_for_the_device() -> None:
    with fake_cuda(), count_collectives() as collectives:
        # With its index: torch finds out a missing one by a copy.
        with torch.device("cuda", 0):
            metric = WindowedStatistics(windows=(3, 20))
            value, values, steps = torch.ones(()), torch.ones(4), torch.arange(4)
        for step in range(3):
            metric.update(value, step)
            metric.update(value, steps[0])
            metric.update(values, steps)
            found = metric.compute()
            assert {result.device.type for result in found.values()} == {"cuda"}
        metric.forward(value, 3)
        metric.reset()
        metric.clone().update(value, 4)
        with pytest.raises(HostReadError):
            found["mean_3"].item()
    assert len(collectives) == 0


@_FAKE
def test_a_device_that_does_not_fit_is_named() -> None:
    with fake_cuda():
        value = torch.ones((), device="cuda")
        metric = WindowedStatistics(windows=(3,))
        with pytest.raises(ValueError, match=r"value is on cuda:0, these statistics are on cpu.*\.to\('cuda:0'\)"):
            metric.update(value, 0)
