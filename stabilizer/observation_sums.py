"""Adds up what a loop observes of a micro-batch: log-probs of both policies, and signals of the policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stabilizer.observations import MAXIMA, MEANS, OF_SEQUENCES, OF_TOKENS, ObservationSums
from stabilizer.reduction import accumulation_dtype
from stabilizer.rollout.mismatch import BOUNDS, MismatchSums, mismatch_sums
from stabilizer.rollout.ratios import as_bool
from stabilizer.thresholds.arguments import closest

__all__ = ["SIGNALS", "Signal", "observation_sums"]

#: A number, or a tensor or sequence of them.
Signal: TypeAlias = Tensor | float | Sequence[float]

#: Keywords of `observation_sums` beside the log-probs and their mask.
SIGNALS = (*OF_TOKENS, *OF_SEQUENCES, "rewards", "num_generations")
# These may be given for each token.
_PER_TOKEN = (*OF_TOKENS, "policy_lag")


@torch.no_grad()
def observation_sums(
    *,
    logp_train: Tensor | None = None,
    logp_rollout: Tensor | None = None,
    mask: Tensor | None = None,
    bounds: tuple[float, float] = BOUNDS,
    pass_reward: float = 0.5,
    rewards: Signal | None = None,
    num_generations: int | None = None,
    **signals: Signal | None,
) -> dict[torch.device, ObservationSums]:
    """Add up what is told of a micro-batch, where it is; nothing waits for a device.

    Entropy, KL and the clipped share are means over tokens: given for each token (B, T), the mask chooses; given for
    each sequence (B,) or as one mean (), they weigh by the tokens of the mask, or 1 without one. Anything else is a
    mean over sequences: (B,), or one mean (), which weighs by the mask's number of sequences.

    Args:
        logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T).
        logp_rollout: The same under the policy that generated, shape (B, T).
        mask: Which tokens count, bool or 0 and 1, shape (B, T); default all.
        bounds: Ratios outside these are counted.
        pass_reward: From what reward on a completion has passed.
        rewards: Of completions in groups of `num_generations`, shape (N,); the reward too, unless that is given.
        num_generations: Completions of a prompt, one after another.
        **signals: Of `SIGNALS`.

    Returns:
        Sums on every device that something came from.

    Raises:
        ValueError: If a name is not known, or a shape does not fit.

    Example:
        >>> sums = observation_sums(rewards=[0.0, 0.0, 1.0, 0.0], num_generations=2)
        >>> from stabilizer.observations import StepObservations
        >>> StepObservations(sums[torch.device("cpu")]).means["zero_variance_groups"].item()
        0.5
    """
    _check(mask, signals)
    parts: dict[torch.device, dict[str, Tensor]] = {}
    tops: dict[torch.device, dict[str, Tensor]] = {}
    if (logp_train is None) != (logp_rollout is None):
        raise ValueError("logp_train and logp_rollout: expected both of them, or none")
    found: dict[torch.device, MismatchSums] = {}
    if logp_train is not None and logp_rollout is not None:
        mask = torch.ones_like(logp_train, dtype=torch.bool) if mask is None else mask
        train, rollout, chosen = _together(logp_train.detach(), logp_rollout.detach(), mask)
        found[train.device] = mismatch_sums(train, logp_rollout=rollout, mask=chosen, bounds=bounds)
    if num_generations is not None and rewards is None:
        raise ValueError(f"num_generations={num_generations!r} without rewards: expected both of them")
    if rewards is not None:
        values = _as_tensor("rewards", rewards)
        if signals.get("reward") is None:
            signals["reward"] = values
        if num_generations is not None:
            parts.setdefault(values.device, {}).update(_of_groups(values, num_generations, pass_reward))
    for name, signal in signals.items():
        if signal is not None:
            row, top = _row(name, signal, mask)
            parts.setdefault(row.device, {})[name] = row
            if name in MAXIMA:
                tops.setdefault(row.device, {})[name] = top
    devices = dict.fromkeys([*found, *parts])
    return {
        device: _joined(found.get(device), parts.get(device, {}), tops.get(device, {}), device, bounds, counts=not n)
        for n, device in enumerate(devices)
    }


def _check(mask: Tensor | None, signals: Mapping[str, Any]) -> None:
    for name in signals:
        if name not in SIGNALS:
            known = ("logp_train", "logp_rollout", "mask", *SIGNALS)
            raise ValueError(f"{name!r} cannot be observed; known are {', '.join(known)}{closest(name, known)}")
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected (B, T), one row a sequence")


def _joined(
    found: MismatchSums | None,
    rows: Mapping[str, Tensor],
    tops: Mapping[str, Tensor],
    device: torch.device,
    bounds: tuple[float, float],
    *,
    counts: bool,
) -> ObservationSums:
    found = MismatchSums.empty(device=device, bounds=bounds) if found is None else found
    nothing = found.sums.new_zeros(3)
    sums = [found.sums.new_full((1,), float(counts)), found.sums, *(rows.get(name, nothing) for name in MEANS)]
    lowest = found.maxima.new_full((), -torch.inf)
    maxima = torch.stack([tops.get(name, lowest) for name in MAXIMA])
    return ObservationSums(torch.cat(sums), torch.cat([found.maxima, maxima]))


def _row(name: str, signal: Signal, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum, weight and number of values that are not finite, shape (3,); and the largest value, shape ()."""
    value = _as_tensor(name, signal)
    if value.ndim > (2 if name in _PER_TOKEN else 1):
        expected = "(), (B,) or (B, T)" if name in _PER_TOKEN else "() or (B,)"
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    weight: Tensor | float = 1.0
    if mask is not None and (value.ndim == 2 or name in OF_TOKENS):
        if value.shape != mask.shape[: value.ndim]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {tuple(mask.shape[: value.ndim])}")
        value, mask = _together(value, mask)
        weight = as_bool(mask).sum(tuple(range(value.ndim, mask.ndim))) if value.ndim < 2 else as_bool(mask)
    elif mask is not None and value.ndim == 0:
        weight = float(mask.shape[0])
    value = value.to(accumulation_dtype(value.device))
    weights = weight.to(value.dtype) if isinstance(weight, Tensor) else torch.full_like(value, weight)
    is_valid = value.isfinite() & (weights > 0)
    is_bad = ~value.isfinite() & (weights > 0)
    total = torch.where(is_valid, value, 0.0) * weights
    row = torch.stack([total.sum(), (weights * is_valid).sum(), is_bad.sum().to(value.dtype)])
    # Of no value at all there is no largest one.
    return row, torch.cat([value.masked_fill(~is_valid, -torch.inf).flatten(), value.new_full((1,), -torch.inf)]).amax()


def _of_groups(rewards: Tensor, num_generations: Any, pass_reward: float) -> dict[str, Tensor]:
    """Rows of the shares of groups without variance, and with a pass rate of 30 to 70 %."""
    num = num_generations
    is_whole = isinstance(num, int) and not isinstance(num, bool) and num > 1
    if not is_whole or rewards.ndim != 1 or rewards.numel() % num:
        raise ValueError(
            f"num_generations={num!r} with rewards of shape {tuple(rewards.shape)}: expected at least 2, and whole "
            "groups of shape (N,)"
        )
    groups = rewards.to(accumulation_dtype(rewards.device)).reshape(-1, num)
    is_valid = groups.isfinite().all(-1)
    num_passed = (groups >= pass_reward).sum(-1)
    # Whole numbers: 3 of 10 is 30 %.
    is_mid = (10 * num_passed >= 3 * num) & (10 * num_passed <= 7 * num)
    is_same = (groups == groups[:, :1]).all(-1)
    num_valid = is_valid.sum()
    # A reward that is not finite is counted among the rewards, not here.
    none = torch.zeros_like(num_valid)
    shares = {"zero_variance_groups": is_same, "mid_pass_groups": is_mid}
    return {
        name: torch.stack([(share & is_valid).sum(), num_valid, none]).to(groups.dtype)
        for name, share in shares.items()
    }


def _as_tensor(name: str, signal: Any) -> Tensor:
    if isinstance(signal, Tensor):
        return signal.detach()
    try:
        return torch.as_tensor(signal, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={signal!r}: expected a number, a tensor, or a list of numbers") from None


def _together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """On one device: an accelerator's if there is one, since a copy from there would be waited for."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
