"""Oracle of the policy's signals: completion by completion and token by token, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["policy_signals"]

_OF_TOKENS = ("entropy", "kl_ref", "clipped")


def policy_signals(micro_batches: Sequence[dict[str, Any]], *, pass_reward: float = 0.5) -> dict[str, float]:
    """Means over all tokens and completions of a step.

    Args:
        micro_batches: Of all ranks, each with a mask (B, T) and signals (B, T) or (B,), finite where they count.
        pass_reward: From what reward on a completion has passed.

    Example:
        >>> policy_signals([{"mask": [[1, 0]], "entropy": [[0.5, 9.0]], "policy_lag": [2]}])
        {'entropy': 0.5, 'policy_lag': 2.0, 'max_policy_lag': 2.0}
    """
    found: dict[str, list[float]] = {}
    same, mid = [], []
    for one in micro_batches:
        for name, signal in one.items():
            if name in _OF_TOKENS:
                rows = zip(np.asarray(one["mask"]), np.asarray(signal, np.float64), strict=True)
                values = [float(value) for mask, row in rows for chosen, value in zip(mask, row, strict=True) if chosen]
            elif name in ("mask", "logp_train", "logp_rollout", "rewards", "num_generations"):
                continue
            else:
                values = [float(value) for value in signal]
            found.setdefault(name, []).extend(values)
        if "rewards" in one:
            rewards, num = [float(value) for value in one["rewards"]], one["num_generations"]
            found.setdefault("reward", []).extend(rewards)
            for first in range(0, len(rewards), num):
                group = rewards[first : first + num]
                same.append(len(set(group)) == 1)
                passed = sum(value >= pass_reward for value in group)
                mid.append(passed * 100 >= 30 * num and passed * 100 <= 70 * num)
    result = {name: float(np.mean(values)) for name, values in found.items()}
    for name in ("policy_lag", "completion_length"):
        if name in found:
            result[f"max_{name}"] = max(found[name])
    if same:
        result |= {"zero_variance_groups": float(np.mean(same)), "mid_pass_groups": float(np.mean(mid))}
    return result
