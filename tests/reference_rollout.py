"""Oracles of importance ratios: token by token, in float64, written like the papers.

They know nothing of the package and of padding: every sequence is a list of the pairs of log-probs that count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Pairs", "dual_clip", "mismatch", "pairs", "sequence_weights", "token_weights"]

#: Of each sequence: (log pi_train, log pi_rollout) of each token.
Pairs = list[list[tuple[float, float]]]


def pairs(train: npt.ArrayLike, rollout: npt.ArrayLike, mask: npt.ArrayLike) -> Pairs:
    """Take the padding off.

    Args:
        train: Shape (B, T).
        rollout: Shape (B, T).
        mask: Shape (B, T).

    Example:
        >>> pairs([[-1.0, 9.0]], [[-2.0, 9.0]], [[1, 0]])
        [[(-1.0, -2.0)]]
    """
    rows = zip(np.asarray(train, np.float64), np.asarray(rollout, np.float64), np.asarray(mask), strict=True)
    return [[(float(p), float(q)) for p, q, m in zip(*row, strict=True) if m] for row in rows]


def mismatch(sequences: Pairs, bounds: tuple[float, float]) -> dict[str, float]:
    """All statistics of r = pi_train / pi_rollout.

    Args:
        sequences: At least one with a token.
        bounds: Outside which ratios are counted.

    Example:
        >>> float(mismatch([[(-1.0, -1.0)]], (0.5, 5.0))["mean_ratio"])
        1.0
    """
    filled = [np.array(sequence) for sequence in sequences if sequence]
    tokens = np.concatenate(filled)
    log_r = tokens[:, 0] - tokens[:, 1]
    r = np.exp(log_r)
    products = np.exp([(s[:, 0] - s[:, 1]).sum() for s in filled])
    train, rollout = (np.array([-s[:, side].mean() for s in filled]) for side in (0, 1))
    gaps = train - rollout
    low, high = bounds
    return {
        "num_tokens": len(r),
        "num_sequences": len(filled),
        "num_nonfinite": 0,
        "min_ratio": r.min(),
        "max_ratio": r.max(),
        "mean_ratio": r.mean(),
        "std_ratio": r.std(),
        "mean_log_ratio": log_r.mean(),
        "std_log_ratio": log_r.std(),
        "min_log_ratio": log_r.min(),
        "max_log_ratio": log_r.max(),
        "max_abs_log_ratio": np.abs(log_r).max(),
        "effective_sample_size": r.sum() ** 2 / (r**2).sum() / len(r),
        "sequence_effective_sample_size": products.sum() ** 2 / (products**2).sum() / len(products),
        "share_below": (r < low).mean(),
        "share_above": (r > high).mean(),
        "share_outside": ((r < low) | (r > high)).mean(),
        "share_beyond_factor_2": ((r > 2) | (r < 1 / 2)).mean(),
        "kl_k1": -log_r.mean(),
        "kl_k2": (log_r**2 / 2).mean(),
        "kl_k3": (r - 1 - log_r).mean(),
        "chi_square": (r**2).mean() - 1,
        "sequence_chi_square": (products**2).mean() - 1,
        "train_log_perplexity": train.mean(),
        "rollout_log_perplexity": rollout.mean(),
        "log_perplexity_gap": gaps.mean(),
        "abs_log_perplexity_gap": np.abs(gaps).mean(),
        "min_log_perplexity_gap": gaps.min(),
        "max_log_perplexity_gap": gaps.max(),
        "max_abs_delta_p": np.abs(np.exp(tokens[:, 0]) - np.exp(tokens[:, 1])).max(),
    }


def token_weights(ratios: Sequence[float], mode: str, bounds: tuple[float | None, float]) -> list[float]:
    """Truncated or masked importance sampling of tokens.

    Args:
        ratios: Of tokens.
        mode: "truncate", "icepop" or "mis".
        bounds: Lower, upper.

    Example:
        >>> token_weights([0.1, 1.0, 9.0], "icepop", (0.5, 5.0))
        [0.0, 1.0, 0.0]
    """
    low, high = bounds[0] or 0.0, bounds[1]
    if mode == "truncate":
        return [min(max(r, low), high) for r in ratios]
    return [r if low <= r <= high else 0.0 for r in ratios]


def sequence_weights(
    ratios: list[list[float]], *, ratio: str, mode: str, bounds: tuple[float | None, float], veto: float, weighting: str
) -> list[list[float]]:
    """Truncated or masked importance sampling of sequences.

    Args:
        ratios: Of tokens, by sequence, none empty.
        ratio: "product" or "geometric".
        mode: "truncate" or "mis".
        bounds: Lower, upper.
        veto: Of one token; 0 for none.
        weighting: "sequence", "token" or "none".

    Example:
        >>> sequence_weights([[2.0, 2.0]], ratio="product", mode="truncate", bounds=(None, 3.0), veto=0.0,
        ...                  weighting="sequence")
        [[3.0, 3.0]]
    """
    result = []
    for tokens in ratios:
        whole = math.prod(tokens)
        if ratio == "geometric":
            whole **= 1 / len(tokens)
        (weight,) = token_weights([whole], mode, bounds)
        is_dropped = min(tokens) < veto or (mode == "mis" and weight == 0.0)
        kept = {"sequence": [weight] * len(tokens), "token": tokens, "none": [1.0] * len(tokens)}[weighting]
        result.append([0.0] * len(tokens) if is_dropped else kept)
    return result


def dual_clip(log_ratio: float, advantage: float, low: float, high: float, c: float | None) -> tuple[float, float]:
    """Loss of one token and its derivative by the log-ratio; Ye et al. 2020, equation 5, with the sign of a loss.

    Args:
        log_ratio: log pi_current - log pi_old.
        advantage: A.
        low: How far a ratio may fall under 1.
        high: How far it may rise over 1.
        c: The bound for negative advantages, or none.

    Example:
        >>> dual_clip(math.log(5.0), -1.0, 0.2, 0.2, 3.0)
        (3.0, -0.0)
    """
    r = math.exp(log_ratio)
    objective = min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    # The derivative of r by its logarithm is r; that of what is clipped is 0.
    slope = r * advantage if objective == r * advantage else 0.0
    if c is not None and advantage < 0 and objective < c * advantage:
        objective, slope = c * advantage, 0.0
    return -objective, -slope
