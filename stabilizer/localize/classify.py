"""Which kind of spike it was."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal

from stabilizer.localize.incident import FoundToken, IncidentType, LayerReport

__all__ = ["MAX_LOG_RATIO", "MIN_LOG_RATIO", "SpikeFacts", "classify", "part_of", "spiking_layers"]

#: Importance ratios of 1e5 and of 1e-30: nothing that a policy does by itself between two updates.
MAX_LOG_RATIO, MIN_LOG_RATIO = 11.51, -69.08

_NEAR_ONE = math.log(2.0)
_FAR, _NORMAL = 3.0, 2.0
_ATTENTION = re.compile(r"(^|[._])(\w*attn\w*|\w*attention\w*|[qkv]_proj|qkv(_proj)?|o_proj)([._]|$)", re.IGNORECASE)
_MLP = re.compile(
    r"(^|[._])(\w*mlp\w*|\w*feed_?forward\w*|ffn?|experts?|\w*moe\w*|gate_(up_)?proj|up_proj|down_proj)([._]|$)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeFacts:
    """What a spike's kind is decided by.

    Attributes:
        observed_norm: Gradient norm at the spike.
        is_loss_finite: Whether every loss of the step was finite.
        reproducible: Whether a replay gave the same norm; `None` if none was tried.
        verdict: Of the search.
        tokens: What it found.
        layers: Norms against their baselines.
    """

    observed_norm: float
    is_loss_finite: bool = True
    reproducible: bool | None = None
    verdict: Literal["tokens", "no_token", "unfinished", "unexplained"] | None = None
    tokens: Sequence[FoundToken] = ()
    layers: Sequence[LayerReport] = ()


def classify(facts: SpikeFacts) -> IncidentType:
    """Name the kind of a spike.

    A.1, A.2 and B are the kinds of GradLoc (Tencent Hunyuan, "Stabilizing RLVR via Token-level Gradient Diagnosis and
    Layerwise Clipping", 2026). What did not repeat says nothing of a batch, so T comes first; a norm that is not finite
    has no size that could be compared, so N comes next.

    Args:
        facts: What is known.

    Returns:
        "T": a replay did not give it again. "N": not finite. "A.1": the importance ratio of a found token is over 1e5
        or under 1e-30. "A.2": that of its sequence is, whose log-ratio is the sum of its tokens'. "X": it does not come
        from tokens. "B": some layers are far over their baselines while the others are normal, and the found tokens'
        ratios, where they can be seen, are near 1. "D": data otherwise.

    Example:
        >>> bad = FoundToken(rank=0, micro_batch=1, row=2, position=3, log_ratio=14.0)
        >>> classify(SpikeFacts(observed_norm=80.0, reproducible=True, verdict="tokens", tokens=[bad]))
        'A.1'
    """
    if facts.reproducible is False:
        return "T"
    if not (math.isfinite(facts.observed_norm) and facts.is_loss_finite):
        return "N"
    ratios = [token.log_ratio for token in facts.tokens if token.log_ratio is not None]
    if any(_is_extreme(ratio) for ratio in ratios):
        return "A.1"
    if any(_is_extreme(token.sequence_log_ratio) for token in facts.tokens if token.sequence_log_ratio is not None):
        return "A.2"
    if facts.verdict == "no_token":
        return "X"
    if spiking_layers(facts.layers) and all(abs(ratio) <= _NEAR_ONE for ratio in ratios):
        return "B"
    return "D"


def spiking_layers(layers: Sequence[LayerReport]) -> list[LayerReport]:
    """The layers that are far over their baselines (3 times), if the others are normal.

    Layers scatter: where the whole model spikes, some are a little over the limit and some a little under it. So those
    between 2 and 3 times their baselines must be fewer than the normal ones.

    Args:
        layers: Norms and baselines; layers without a baseline do not count.

    Returns:
        Largest ratio first; empty if no layer is far over, or the others are not normal.
    """
    known = [layer for layer in layers if layer.ratio is not None]
    far = [layer for layer in known if layer.nonfinite or _ratio(layer) >= _FAR]
    num_normal = sum(not layer.nonfinite and _ratio(layer) <= _NORMAL for layer in known)
    if not far or len(known) - len(far) - num_normal >= num_normal:
        return []
    return sorted(far, key=_ratio, reverse=True)


def part_of(name: str) -> Literal["attention", "mlp"] | None:
    """Which part of a block a parameter belongs to.

    Args:
        name: Clean name of the parameter.

    Example:
        >>> part_of("model.layers.3.self_attn.q_proj.weight"), part_of("h.0.mlp.c_fc.weight"), part_of("h.0.ln_1.bias")
        ('attention', 'mlp', None)
    """
    # The first word that says so: `attention.mlp` would be a part of attention.
    attention, mlp = _ATTENTION.search(name), _MLP.search(name)
    if attention and (not mlp or attention.start() <= mlp.start()):
        return "attention"
    return "mlp" if mlp else None


def _is_extreme(log_ratio: float) -> bool:
    return log_ratio > MAX_LOG_RATIO or log_ratio < MIN_LOG_RATIO


def _ratio(layer: LayerReport) -> float:
    return math.inf if layer.nonfinite or layer.ratio is None or math.isnan(layer.ratio) else layer.ratio
