"""Raw statistics of importance ratios, from sums that add up over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype
from stabilizer.rollout.ratios import as_bool, check_shape
from stabilizer.rollout.statistics import MismatchStatistics

__all__ = ["BOUNDS", "MismatchSums", "mismatch_statistics", "mismatch_sums", "rollout_mismatch"]

#: Between which ratios count as inside, unless said: those of IcePop.
BOUNDS = (0.5, 5.0)

_SUMS = (
    "num_tokens",
    "num_sequences",
    "num_nonfinite",
    "ratio",
    "ratio_squared",
    "excess",
    "excess_squared",
    "log_ratio",
    "log_ratio_squared",
    "k3",
    "num_below",
    "num_above",
    "num_far",
    "sequence_ratio",
    "sequence_ratio_squared",
    "sequence_excess",
    "sequence_excess_squared",
    "train_log_perplexity",
    "rollout_log_perplexity",
    "abs_gap",
)
_MAXIMA = ("log_ratio", "minus_log_ratio", "abs_delta_p", "gap", "minus_gap")


@dataclasses.dataclass(frozen=True, eq=False)
class MismatchSums:
    """What statistics are made of, for some tokens. `a + b` is that of both, in any order.

    Over ranks: one `all_reduce` of `sums` with SUM and one of `maxima` with MAX.

    Attributes:
        sums: Counts and sums, shape (20,), float64 where the device has it; always finite.
        maxima: Largest values, shape (5,); minus infinity for no token.
        bounds: Outside which ratios were counted.
    """

    sums: Tensor
    maxima: Tensor
    bounds: tuple[float, float] = BOUNDS

    @classmethod
    def empty(cls, *, device: torch.device | str = "cpu", bounds: tuple[float, float] = BOUNDS) -> MismatchSums:
        """Those of no token, to start with.

        Args:
            device: Where they are wanted.
            bounds: Of ratios, as of `mismatch_sums`.

        Returns:
            Sums of 0 and maxima of minus infinity.

        Example:
            >>> MismatchSums.empty().maxima.shape
            torch.Size([5])
        """
        device = torch.device(device)
        sums = torch.zeros(len(_SUMS), dtype=accumulation_dtype(device), device=device)
        return cls(sums, torch.full_like(sums[: len(_MAXIMA)], -torch.inf), _checked(bounds))

    def __add__(self, other: MismatchSums) -> MismatchSums:
        if self.bounds != other.bounds:
            raise ValueError(f"bounds={self.bounds} and {other.bounds} were counted: give mismatch_sums the same ones")
        return MismatchSums(self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.bounds)


@torch.no_grad()
def mismatch_sums(
    logp_train: Tensor, *, logp_rollout: Tensor, mask: Tensor, bounds: tuple[float, float] = BOUNDS
) -> MismatchSums:
    """Counts, sums and largest values over the tokens of a micro-batch.

    Log-ratios are exact, their differences taken in float64. In sums of ratios an exponent counts as 300 at most, where
    their squares would leave float64 (35 where a device has float32 only). Tokens whose log-prob is not finite are
    counted and left out, of their sequences too.

    Args:
        logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T).
        logp_rollout: The same under the policy that generated, shape (B, T).
        mask: Which tokens count, bool or 0 and 1, shape (B, T); what the others hold may be anything.
        bounds: Ratios outside these are counted; 1 is between them.

    Returns:
        To be added up, and read by `mismatch_statistics`; on the device, without gradients.

    Raises:
        ValueError: If the shapes differ or are not (B, T), or the bounds are no two with 1 between them.

    Example:
        >>> zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> sums = mismatch_sums(torch.tensor([[0.0, -1.0]]), logp_rollout=zeros, mask=mask)
        >>> sums += mismatch_sums(torch.tensor([[0.5, 0.0]]), logp_rollout=zeros, mask=mask)
        >>> print(f"{mismatch_statistics(sums).mean_log_ratio:.3f}")
        -0.125
    """
    check_shape(logp_train, logp_rollout=logp_rollout, mask=mask)
    bounds = _checked(bounds)
    low, high = math.log(bounds[0]), math.log(bounds[1])
    dtype = accumulation_dtype(logp_train.device)
    is_token = as_bool(mask)
    is_valid = is_token & logp_train.isfinite() & logp_rollout.isfinite()
    train, rollout = (torch.where(is_valid, logp, 0.0).to(dtype) for logp in (logp_train, logp_rollout))
    x = train - rollout
    distance = x.abs()
    limited = x.clamp(max=_max_exponent(dtype))
    ratio, excess = limited.exp(), limited.expm1()
    # What the mask leaves out is 0 here: it adds nothing to any of these sums but those of ratios.
    ratio = ratio * is_valid
    num_by_row = is_valid.sum(-1)
    tokens = {
        "num_tokens": num_by_row,
        "num_sequences": num_by_row > 0,
        "num_nonfinite": is_token ^ is_valid,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "excess": excess,
        "excess_squared": excess.square(),
        "log_ratio": x,
        "log_ratio_squared": x.square(),
        "k3": excess - limited,
        "num_below": x < low,
        "num_above": x > high,
        "num_far": distance > math.log(2),
    }
    sequences, gap = _of_sequences(x, train, rollout, num_by_row)
    columns = tokens | sequences
    maxima = {
        "log_ratio": x.masked_fill(~is_valid, -torch.inf),
        "minus_log_ratio": (-x).masked_fill(~is_valid, -torch.inf),
        # A probability is 1 at most, whatever a log-prob says.
        "abs_delta_p": (train.clamp(max=0).exp() - rollout.clamp(max=0).exp()).abs().masked_fill(~is_valid, -torch.inf),
        "gap": gap.masked_fill(num_by_row == 0, -torch.inf),
        "minus_gap": (-gap).masked_fill(num_by_row == 0, -torch.inf),
    }
    nothing = x.new_full((1,), -torch.inf)
    return MismatchSums(
        torch.stack([columns[name].sum(dtype=dtype) for name in _SUMS]),
        # Of a batch without tokens there is no largest one.
        torch.stack([torch.cat([maxima[name].flatten(), nothing]).amax() for name in _MAXIMA]),
        bounds,
    )


def _of_sequences(x: Tensor, train: Tensor, rollout: Tensor, num_by_row: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is summed over sequences, and the gap of each one's log-perplexities."""
    num = num_by_row.clamp(min=1)
    product = x.sum(-1).clamp(max=_max_exponent(x.dtype))
    ratio, excess = product.exp() * (num_by_row > 0), product.expm1()
    train_log_perplexity, rollout_log_perplexity = -train.sum(-1) / num, -rollout.sum(-1) / num
    gap = -x.sum(-1) / num
    sums = {
        "sequence_ratio": ratio,
        "sequence_ratio_squared": ratio.square(),
        "sequence_excess": excess,
        "sequence_excess_squared": excess.square(),
        "train_log_perplexity": train_log_perplexity,
        "rollout_log_perplexity": rollout_log_perplexity,
        "abs_gap": gap.abs(),
    }
    return sums, gap


def mismatch_statistics(sums: MismatchSums) -> MismatchStatistics:
    """Read what `mismatch_sums` has summed, possibly over micro-batches and ranks.

    Args:
        sums: Of the tokens.

    Returns:
        Tensors of shape () on the device; everything but the counts is NaN if there was no token.

    Example:
        >>> train, rollout = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-0.7, -1.0]])
        >>> sums = mismatch_sums(train, logp_rollout=rollout, mask=torch.ones(1, 2))
        >>> print(f"{mismatch_statistics(sums).max_ratio:.4f}")
        1.2214
    """
    s: dict[str, Tensor] = dict(zip(_SUMS, sums.sums.unbind(), strict=True))
    top: dict[str, Tensor] = dict(zip(_MAXIMA, sums.maxima.unbind(), strict=True))
    n, num_sequences = s["num_tokens"], s["num_sequences"]
    # 0 / 0 makes all means of nothing NaN; largest values of nothing are infinite, and become so here.
    top = {name: torch.where(n > 0, value, torch.nan) for name, value in top.items()}
    limit = _max_exponent(sums.sums.dtype)
    log_ratio, excess = s["log_ratio"] / n, s["excess"] / n
    below, above = s["num_below"] / n, s["num_above"] / n
    return MismatchStatistics(
        num_tokens=n,
        num_sequences=num_sequences,
        num_nonfinite=s["num_nonfinite"],
        min_ratio=(-top["minus_log_ratio"]).clamp(max=limit).exp(),
        max_ratio=top["log_ratio"].clamp(max=limit).exp(),
        mean_ratio=s["ratio"] / n,
        std_ratio=(s["excess_squared"] / n - excess.square()).clamp(min=0).sqrt(),
        mean_log_ratio=log_ratio,
        std_log_ratio=(s["log_ratio_squared"] / n - log_ratio.square()).clamp(min=0).sqrt(),
        min_log_ratio=-top["minus_log_ratio"],
        max_log_ratio=top["log_ratio"],
        max_abs_log_ratio=torch.maximum(top["log_ratio"], top["minus_log_ratio"]),
        effective_sample_size=_sample_size(s["ratio"], s["ratio_squared"], n),
        sequence_effective_sample_size=_sample_size(s["sequence_ratio"], s["sequence_ratio_squared"], num_sequences),
        share_below=below,
        share_above=above,
        share_outside=below + above,
        share_beyond_factor_2=s["num_far"] / n,
        kl_k1=-log_ratio,
        kl_k2=s["log_ratio_squared"] / n / 2,
        kl_k3=s["k3"] / n,
        # r^2 - 1 = 2 (r - 1) + (r - 1)^2, which does not cancel near 1.
        chi_square=(2 * s["excess"] + s["excess_squared"]) / n,
        sequence_chi_square=(2 * s["sequence_excess"] + s["sequence_excess_squared"]) / num_sequences,
        train_log_perplexity=s["train_log_perplexity"] / num_sequences,
        rollout_log_perplexity=s["rollout_log_perplexity"] / num_sequences,
        log_perplexity_gap=(s["train_log_perplexity"] - s["rollout_log_perplexity"]) / num_sequences,
        abs_log_perplexity_gap=s["abs_gap"] / num_sequences,
        min_log_perplexity_gap=-top["minus_gap"],
        max_log_perplexity_gap=top["gap"],
        max_abs_delta_p=top["abs_delta_p"],
    )


def rollout_mismatch(
    logp_train: Tensor, *, logp_rollout: Tensor, mask: Tensor, bounds: tuple[float, float] = BOUNDS
) -> MismatchStatistics:
    """The statistics of one batch: `mismatch_sums`, read at once.

    Args:
        logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T).
        logp_rollout: The same under the policy that generated, shape (B, T).
        mask: Which tokens count, bool or 0 and 1, shape (B, T); what the others hold may be anything.
        bounds: Ratios outside these are counted.

    Returns:
        Tensors of shape () on the device.

    Raises:
        ValueError: If the shapes differ or are not (B, T), or the bounds are no two with 1 between them.

    Example:
        >>> train, rollout = torch.full((4, 8), -1.19), torch.full((4, 8), -1.0)
        >>> found = rollout_mismatch(train, logp_rollout=rollout, mask=torch.ones(4, 8))
        >>> print(f"{found.mean_log_ratio:.2f} {found.effective_sample_size:.2f} {found.kl_k3:.4f}")
        -0.19 1.00 0.0170
    """
    return mismatch_statistics(mismatch_sums(logp_train, logp_rollout=logp_rollout, mask=mask, bounds=bounds))


def _sample_size(total: Tensor, total_squared: Tensor, num: Tensor) -> Tensor:
    """Kish: (sum r)^2 / (n sum r^2). The root comes first, since the square of a sum may not be finite."""
    share = (total / total_squared.sqrt()).square() / num
    # Where every ratio has faded to 0 no sample is left.
    return torch.where((total_squared == 0) & (num > 0), 0.0, share)


def _max_exponent(dtype: torch.dtype) -> float:
    return 300.0 if dtype == torch.float64 else 35.0


def _checked(bounds: Any) -> tuple[float, float]:
    if len(bounds) != 2 or not 0 < bounds[0] <= 1 <= bounds[1] < math.inf:
        raise ValueError(f"bounds={bounds!r}: expected two ratios with 1 between them, such as (0.5, 5.0)")
    return float(bounds[0]), float(bounds[1])
