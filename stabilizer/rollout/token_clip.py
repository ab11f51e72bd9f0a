"""Importance weights of single tokens, truncated or masked."""

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
from stabilizer.rollout.ratios import as_bool, check_shape

__all__ = ["TokenClip", "TokenMode"]

TokenMode = Literal["truncate", "icepop", "mis"]

_BOUNDS: dict[str, Bounds] = {"truncate": (None, 2.0), "icepop": (0.5, 5.0), "mis": (None, 2.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenClip:
    """Weights each token by its own importance ratio, and bounds what one token can do.

    - "truncate" sets ratios outside to the bound (truncated importance sampling, TIS; Ionides 2008, Yao et al. 2025).
    - "icepop" gives tokens outside the weight 0 (Ling Team 2025); by default outside [0.5, 5].
    - "mis" does the same with an upper bound only, unless told otherwise (masked importance sampling; Liu et al. 2025).

    A token right on a bound is inside. A token whose log-ratio is NaN counts for nothing in any mode.

    Args:
        mode: One of the three.
        bounds: Smallest and largest ratio, with None for no lower one. Without, (None, 2) for "truncate" and "mis",
            (0.5, 5) for "icepop".
        log_ratio_limit: Log-ratios are clamped to plus and minus this first, as some trainers do (20); weights alone
            feel it.

    Raises:
        ValueError: If an argument is not one of those, or out of range.

    Example:
        >>> log_ratios = torch.tensor([[0.0, 1.0, -3.0, torch.nan]])
        >>> clipped = TokenClip(mode="icepop")(log_ratios, mask=torch.tensor([[1, 1, 1, 0]]))
        >>> clipped.weights
        tensor([[1.0000, 2.7183, 0.0000, 0.0000]])
        >>> clipped.mask
        tensor([[ True,  True, False, False]])
        >>> print(f"{clipped.share_changed:.2f}")
        0.33
    """

    mode: TokenMode = "truncate"
    bounds: Bounds | None = None
    log_ratio_limit: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(TokenMode):
            raise ValueError(f"mode={self.mode!r}: expected truncate, icepop or mis")
        given = _BOUNDS[self.mode] if self.bounds is None else self.bounds
        object.__setattr__(self, "bounds", check_bounds(given))
        check_limit("log_ratio_limit", self.log_ratio_limit)

    @torch.no_grad()
    def __call__(self, log_ratios: Tensor, *, mask: Tensor) -> Clipped:
        """Weigh tokens.

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
        is_token, is_known = as_bool(mask), ~log_ratios.isnan()
        below, above = log_ratios < low, log_ratios > high
        weights = limited(log_ratios, self.log_ratio_limit).exp()
        if self.mode == "truncate":
            weights = truncated(weights, bounds=self.bounds, below=below, above=above)
            return summarize(weights, kept=is_known, mask=is_token, below=below, above=above)
        return summarize(weights, kept=is_known & ~below & ~above, mask=is_token, below=below, above=above)
