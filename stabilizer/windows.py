"""Statistics of the last values of a run: mean, standard deviation and slope over windows, on the device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from stabilizer.reduction import accumulation_dtype

__all__ = ["MeanStd", "Trend", "WindowedStatistics", "mean_std", "trend"]


class MeanStd(NamedTuple):
    """What `mean_std` returns."""

    mean: Tensor
    std: Tensor


class Trend(NamedTuple):
    """What `trend` returns: a slope per step, and its standard error."""

    slope: Tensor
    error: Tensor


def mean_std(values: Tensor, *, mask: Tensor) -> MeanStd:
    """Mean and sample standard deviation (divided by n - 1) of some entries.

    Corrected two-pass: Chan, Golub, LeVeque, "Algorithms for computing the sample variance" (1983).

    Args:
        values: Shape (n,); what the mask leaves out may be anything.
        mask: Which entries count, bool, shape (n,), or (..., n) for several selections at once.

    Returns:
        Both of the mask's shape without the last dimension, float64 where the device has it; NaN for a mean of no entry
        and a deviation of fewer than two.

    Example:
        >>> mean_std(torch.tensor([1.0, 2.0, 4.0, torch.inf]), mask=torch.tensor([True, False, True, False]))
        MeanStd(mean=tensor(2.5000, dtype=torch.float64), std=tensor(2.1213, dtype=torch.float64))
    """
    count, mean, deviations = _centre(values, mask)
    variance = deviations.square().sum(-1) / (count - 1)
    return MeanStd(mean, variance.sqrt().masked_fill(count < 2, torch.nan))


def trend(values: Tensor, *, steps: Tensor, mask: Tensor) -> Trend:
    """Least-squares slope of some entries against the step, and its standard error.

    With x and y the deviations from the means, slope = sum(x y) / sum(x^2), and its error is the square root of
    sum((y - slope x)^2) / (n - 2) / sum(x^2): ordinary least squares, for errors that do not depend on each other.

    Args:
        values: Shape (n,); what the mask leaves out may be anything.
        steps: The step of each value, shape (n,).
        mask: Which entries count, bool, shape (n,), or (..., n) for several selections at once.

    Returns:
        Both in units of the values per step, of the mask's shape without the last dimension, float64 where the device
        has it; NaN for a slope where all steps are the same and an error of fewer than three entries.

    Example:
        >>> everything = torch.ones(3, dtype=torch.bool)
        >>> trend(torch.tensor([5.0, 3.0, 1.0]), steps=torch.tensor([10, 11, 12]), mask=everything)
        Trend(slope=tensor(-2., dtype=torch.float64), error=tensor(0., dtype=torch.float64))
    """
    # The middle comes off while steps are whole numbers: float32 could not tell large ones apart.
    total = torch.where(mask, steps, 0).sum(-1, keepdim=True)
    middle = total // mask.sum(-1, keepdim=True).clamp(min=1)
    count, _, x = _centre(steps - middle, mask)
    _, _, y = _centre(values, mask)
    x_squares = x.square().sum(-1)
    slope = (x * y).sum(-1) / x_squares
    residuals = y - slope.unsqueeze(-1) * x
    error = (residuals.square().sum(-1) / (count - 2) / x_squares).sqrt()
    return Trend(slope, error.masked_fill(count < 3, torch.nan))


def _centre(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many entries count, their mean, and every entry's deviation from it (0 for what does not count)."""
    values = values.to(accumulation_dtype(values.device))
    count = mask.sum(-1).to(values.dtype)
    mean = torch.where(mask, values, 0).sum(-1) / count
    deviations = torch.where(mask, values - mean.unsqueeze(-1), 0)
    # The sum of large values is rounded; that of their deviations says by how much.
    correction = deviations.sum(-1) / count
    return count, mean + correction, torch.where(mask, deviations - correction.unsqueeze(-1), 0)


class WindowedStatistics(Metric):
    """Mean, standard deviation and slope of the last finite values of a run.

    The last values are kept on the device, and everything is computed from them anew: nothing drifts, and a value
    that has left a window has left no trace. A value that is not finite never enters a window; it is counted.
    Neither `update` nor `compute` makes the host wait.

    Values are taken to be the same on every rank (a loss that has been reduced): nothing is synchronized. As with any
    metric, `forward` returns the statistics of the values that it is given, and `update` none. Casts of a module that
    holds this one (`half`, `to(torch.bfloat16)`) leave it as precise as it is; only `set_dtype` changes that.

    Args:
        windows: How many finite values each window holds, at least 2.

    Raises:
        ValueError: If there is no window, or one is no whole number of at least 2 or given twice.

    Example:
        >>> statistics = WindowedStatistics(windows=(2, 3))
        >>> for step, loss in enumerate([5.0, 4.0, float("nan"), 2.0, 0.0]):
        ...     statistics.update(torch.tensor(loss), step)
        >>> for name, value in statistics.compute().items():
        ...     print(f"{name} {value:.3f}")
        mean_2 1.000
        std_2 1.414
        mean_3 2.000
        std_3 2.000
        slope_3 -1.286
        slope_error_3 0.247
        num_nonfinite 1.000
    """

    is_differentiable = False
    higher_is_better = None
    # No sum of two rings is a ring: forward() must compute the values it is given apart, and put the ring back.
    full_state_update = True

    values: Tensor
    steps: Tensor
    num_finite: Tensor
    num_nonfinite: Tensor

    def __init__(self, *, windows: Sequence[int] = (100, 1000)) -> None:
        # A cache would outlive load_state_dict, and hand the same dict to every reader.
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.windows = _checked(windows)
        # One slot more than the longest window: what is not finite is thrown away there, without asking the host.
        num_slots = self.windows[-1] + 1
        dtype = accumulation_dtype(torch.get_default_device())
        self.add_state("values", torch.zeros(num_slots, dtype=dtype), persistent=True)
        self.add_state("steps", torch.zeros(num_slots, dtype=torch.int64), persistent=True)
        self.add_state("num_finite", torch.zeros((), dtype=torch.int64), persistent=True)
        self.add_state("num_nonfinite", torch.zeros((), dtype=torch.int64), persistent=True)

    def update(self, value: Tensor | float, step: Tensor | int) -> None:
        """Take the next value, or several in their order.

        Args:
            value: Shape () or (n,), n at most the longest window; the same on every rank.
            step: The step of each value, whole numbers of the same shape.

        Raises:
            ValueError: If a shape, the steps' type or a device does not fit.
            TypeError: If a step that is no tensor is no whole number.
        """
        values = self._vector(value, like=self.values, name="value")
        steps = self._vector(step if isinstance(step, Tensor) else operator.index(step), like=self.steps, name="step")
        size = self.windows[-1]
        if steps.numel() != values.numel():
            raise ValueError(
                f"step has {steps.numel()} elements, value has {values.numel()}: give a tensor with one step a value"
            )
        if values.numel() > size:
            raise ValueError(
                f"value has {values.numel()} elements: expected at most {size} (the longest window) a call"
            )
        is_dropped = ~values.isfinite()
        # Slots in the order of arrival, counting finite values only. The last slot takes the rest, as zeros, so that
        # the state is the same bit for bit whichever of them comes last.
        order = self.num_finite - 1 + (~is_dropped).cumsum(0)
        slots = (order % size).masked_fill(is_dropped, size)
        # Never in place: tensors that were handed out (or made in inference mode) stay what they were.
        self.values = self.values.scatter(0, slots, values.masked_fill(is_dropped, 0))
        self.steps = self.steps.scatter(0, slots, steps.masked_fill(is_dropped, 0))
        self.num_finite = self.num_finite + (~is_dropped).sum()
        self.num_nonfinite = self.num_nonfinite + is_dropped.sum()

    def compute(self) -> dict[str, Tensor]:
        """The statistics of the last finite values, as many as there are up to each window.

        Returns:
            `mean_<w>` and `std_<w>` for every window w, `slope_<w>` and `slope_error_<w>` for the longest (see
            `mean_std` and `trend`), and `num_nonfinite`, all of shape ().
        """
        size = self.windows[-1]
        values, steps = self.values[:-1], self.steps[:-1]
        slots = torch.arange(size, device=values.device)
        # 0 is the newest.
        age = (self.num_finite - 1 - slots) % size
        is_filled = slots < self.num_finite
        masks = torch.stack([is_filled & (age < window) for window in self.windows])
        means, stds = mean_std(values, mask=masks)
        result: dict[str, Tensor] = {}
        for window, mean, std in zip(self.windows, means.unbind(), stds.unbind(), strict=True):
            result |= {f"mean_{window}": mean, f"std_{window}": std}
        slope, error = trend(values, steps=steps, mask=is_filled)
        return result | {f"slope_{size}": slope, f"slope_error_{size}": error, "num_nonfinite": self.num_nonfinite}

    def __hash__(self) -> int:
        # Metric's own hash changes with each new state tensor: after an update no dict would find this metric again.
        return id(self)

    def _vector(self, value: Tensor | float, *, like: Tensor, name: str) -> Tensor:
        if not isinstance(value, Tensor):
            # A fill, not a copy from the host.
            return like.new_full((1,), value)
        if value.ndim > 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected () or (n,), one value a step")
        if value.device != like.device:
            raise ValueError(
                f"{name} is on {value.device}, these statistics are on {like.device}: move them once with "
                f".to({str(value.device)!r})"
            )
        if name == "step" and value.is_floating_point():
            raise ValueError(f"step is {value.dtype}: expected whole numbers, such as torch.int64")
        return value.detach().reshape(-1).to(like.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        # Metric takes care of half() and the like, but lets to(torch.bfloat16) of a module around it round the values.
        def move(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0, dtype=torch.float32))
            dtype = tensor.dtype
            if dtype.is_floating_point and self._dtype_convert:
                dtype = probe.dtype
            if dtype == torch.float64:
                dtype = accumulation_dtype(probe.device)
            if dtype != tensor.dtype:
                return tensor.to(probe.device, dtype)
            moved = fn(tensor)
            return moved if moved.dtype == dtype else tensor.to(probe.device)

        super()._apply(move, exclude_state)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Metric's own would keep the very tensors that it is given, wherever they are, and say nothing of a missing
        # or a misshapen one.
        loaded = {key: state_dict.pop(prefix + key) for key in self._defaults if prefix + key in state_dict}
        missing_keys += [prefix + key for key in self._defaults if self._persistent[key] and key not in loaded]
        num_slots = loaded["values"].numel() if "values" in loaded else self.windows[-1] + 1
        if num_slots != self.windows[-1] + 1:
            error_msgs.append(
                f"{prefix}values holds {num_slots - 1} values: expected {self.windows[-1]}, the longest of "
                f"windows={self.windows}; make the metric with the longest window that it was saved with"
            )
        elif len(loaded) == len(self._defaults):
            for key, value in loaded.items():
                current: Tensor = getattr(self, key)
                setattr(self, key, value.to(device=current.device, dtype=current.dtype, copy=True))
            # compute() would warn that nothing has come in yet.
            self._update_count = max(self._update_count, 1)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _checked(windows: Any) -> tuple[int, ...]:
    sizes = list(windows) if isinstance(windows, Sequence) else []
    are_whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if not sizes or not are_whole or min(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise ValueError(
            f"windows={windows!r}: expected one or more distinct whole numbers of at least 2, such as (100, 1000)"
        )
    return tuple(sorted(sizes))
