"""Importance weights of whole sequences: truncated, masked, or vetoed by one token."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from stabilizer.rollout.clipped import (
    Bounds,
    Clipped,
    check_bounds,
    check_limit,
    limited,
    log_bounds,
    summarize,
    truncated,
)
from stabilizer.rollout.masks import veto_mask
from stabilizer.rollout.ratios import (
    as_bool,
    check_shape,
    importance_ratios,
    sequence_log_ratios_mean,
    sequence_log_ratios_sum,
)

__all__ = ["SeqClip", "SeqMode", "SeqRatio", "Weighting"]

SeqMode = Literal["mis", "truncate"]
SeqRatio = Literal["product", "geometric"]
Weighting = Literal["sequence", "token", "none"]

_BOUNDS: dict[tuple[str, str], Bounds] = {
    ("mis", "product"): (0.5, 2.0),
    ("mis", "geometric"): (0.999, 1.001),
    ("truncate", "product"): (None, 2.0),
    ("truncate", "geometric"): (None, 2.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqClip:
    """Bounds what one sequence can do, by the ratio of the whole of it.

    - "mis" drops sequences whose ratio is outside (masked importance sampling, rejection; Liu et al. 2025).
    - "truncate" sets their weight to the bound.

    A sequence right on a bound is inside. One with a token whose log-ratio is NaN counts for nothing in either mode.

    Args:
        ratio: "product", the ratio of the sequence's probabilities, which drifts away with its length, or "geometric",
            the mean over its tokens, which is near 1 and needs bounds near 1. Trainers mean either by "sequence", so
            there is no default.
        mode: One of the two.
        bounds: Smallest and largest ratio, with None for no lower one. Without, (0.5, 2) for "mis" of the product,
            (0.999, 1.001) for "mis" of the geometric mean, (None, 2) for "truncate".
        veto: A sequence with one token of a smaller ratio than this is dropped; 1e-4 is usual.
        weighting: What tokens that stay are weighted by: the "sequence"'s ratio, each "token"'s own, or "none" (by 1).
            "truncate" knows the first only.
        log_ratio_limit: The logarithm of the sequence's ratio is clamped to plus and minus this first, as some trainers
            do (20); weights alone feel it.

    Raises:
        ValueError: If an argument is not one of those, or out of range, or does not go with another.

    Example:
        >>> log_ratios = torch.tensor([[0.1, 0.2], [0.5, 0.4]])
        >>> SeqClip(ratio="product")(log_ratios, mask=torch.ones(2, 2)).weights
        tensor([[1.3499, 1.3499],
                [0.0000, 0.0000]])
        >>> SeqClip(ratio="geometric", bounds=(0.5, 2.0))(log_ratios, mask=torch.ones(2, 2)).weights
        tensor([[1.1618, 1.1618],
                [1.5683, 1.5683]])
    """

    ratio: SeqRatio
    mode: SeqMode = "mis"
    bounds: Bounds | None = None
    veto: float | None = None
    weighting: Weighting = "sequence"
    log_ratio_limit: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("ratio", SeqRatio), ("mode", SeqMode), ("weighting", Weighting)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected {', '.join(allowed[:-1])} or {allowed[-1]}")
        if self.mode == "truncate" and self.weighting != "sequence":
            raise ValueError(
                f"weighting={self.weighting!r} with mode='truncate': there is no weight of the sequence to truncate; "
                "take weighting='sequence', or mode='mis'"
            )
        given = _BOUNDS[self.mode, self.ratio] if self.bounds is None else self.bounds
        object.__setattr__(self, "bounds", check_bounds(given))
        check_limit("veto", self.veto)
        check_limit("log_ratio_limit", self.log_ratio_limit)

    @torch.no_grad()
    def __call__(self, log_ratios: Tensor, *, mask: Tensor) -> Clipped:
        """Weigh the tokens of sequences.

        Args:
            log_ratios: log pi_train - log pi_rollout, as of `token_log_ratios`, shape (B, T).
            mask: Which tokens count, bool or 0 and 1, shape (B, T).

        Returns:
            Weights, mask and shares.

        Raises:
            ValueError: If the shapes differ or are not (B, T).
        """
        check_shape(log_ratios, mask=mask)
        assert self.bounds is not None
        low, high = log_bounds(self.bounds)
        is_token = as_bool(mask)
        aggregate = sequence_log_ratios_sum if self.ratio == "product" else sequence_log_ratios_mean
        sequences = aggregate(log_ratios, mask=is_token).unsqueeze(-1)
        below, above = sequences < low, sequences > high
        kept = ~sequences.isnan()
        if self.veto is not None:
            kept = kept & veto_mask(log_ratios, mask=is_token, min_ratio=self.veto).any(-1, keepdim=True)
        if self.mode == "mis":
            kept = kept & ~below & ~above
        return summarize(
            self._weights(log_ratios, sequences, below, above), kept=kept, mask=is_token, below=below, above=above
        )

    def _weights(self, log_ratios: Tensor, sequences: Tensor, below: Tensor, above: Tensor) -> Tensor:
        assert self.bounds is not None
        if self.weighting == "none":
            return torch.ones_like(log_ratios)
        if self.weighting == "token":
            return importance_ratios(limited(log_ratios, self.log_ratio_limit))
        weights = limited(sequences, self.log_ratio_limit).exp()
        return truncated(weights, bounds=self.bounds, below=below, above=above).expand_as(log_ratios)
