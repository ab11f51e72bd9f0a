"""What verl records, in our terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stabilizer import rollout
from stabilizer.rollout import SeqClip, TokenClip
from tests.rollout_batches import LIMIT, Batch, Compared

__all__ = ["verl_061", "verl_091", "verl_kl_penalty", "verl_metrics"]


def _bounds(threshold: str | float) -> tuple[float | None, float]:
    if isinstance(threshold, str) and "_" in threshold:
        low, high = threshold.split("_")
        return float(low), float(high)
    return None, float(threshold)


def _inverse(bounds: tuple[float | None, float]) -> tuple[float | None, float]:
    """Verl bounds k1 = -log r by logarithms of its thresholds: those are bounds of 1 / r."""
    low, high = bounds
    assert low is not None
    return 1 / high, 1 / low


def verl_is(batch: Batch, config: dict[str, Any]) -> rollout.Clipped | None:
    """Weights as of `rollout_is` and `rollout_is_threshold`."""
    if config["rollout_is"] is None:
        return None
    bounds = _bounds(config["rollout_is_threshold"])
    if config["rollout_is"] == "token":
        mode = "truncate" if bounds[0] is None else "icepop"
        return TokenClip(mode=mode, bounds=bounds, log_ratio_limit=LIMIT)(batch.log_ratios, mask=batch.mask)  # type: ignore[arg-type]
    mode = "truncate" if bounds[0] is None else "mis"
    clip = SeqClip(ratio="product", mode=mode, bounds=bounds, log_ratio_limit=LIMIT)  # type: ignore[arg-type]
    return clip(batch.log_ratios, mask=batch.mask)


def verl_rs(batch: Batch, kind: str, threshold: str) -> Tensor:
    """The mask of one of the kinds of `rollout_rs`."""
    level, _, estimator = kind.rpartition("_")
    if estimator == "k1":
        bounds = _inverse(_bounds(threshold))
        if level == "token":
            return TokenClip(mode="mis", bounds=bounds)(batch.log_ratios, mask=batch.mask).mask
        ratio = {"seq_sum": "product", "seq_mean": "geometric"}[level]
        return SeqClip(ratio=ratio, bounds=bounds)(batch.log_ratios, mask=batch.mask).mask  # type: ignore[arg-type]
    return rollout.divergence_mask(
        batch.log_ratios,
        mask=batch.mask,
        max_divergence=float(threshold),
        estimator=estimator,  # type: ignore[arg-type]
        level=level.replace("seq", "sequence"),  # type: ignore[arg-type]
    )


def verl_metrics(batch: Batch, compared: Compared, prefix: str = "metrics//rollout_corr/") -> None:
    s = batch.statistics
    for name, value in {
        "training_log_ppl": s["train_log_perplexity"],
        "rollout_log_ppl": s["rollout_log_perplexity"],
        "kl": s["kl_k1"],
        "k3_kl": s["kl_k3"],
        "log_ppl_diff": s["log_perplexity_gap"],
        "log_ppl_abs_diff": s["abs_log_perplexity_gap"],
        "log_ppl_diff_max": s["max_log_perplexity_gap"],
        "log_ppl_diff_min": s["min_log_perplexity_gap"],
        "chi2_token": s["chi_square"],
        "chi2_seq": s["sequence_chi_square"],
    }.items():
        compared.check(prefix + name, value, atol=2e-7)


def verl_091(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared, config, mask = Compared(case, path), case["config"], batch.mask
    verl_metrics(batch, compared)
    clipped = verl_is(batch, config)
    metric = "metrics//rollout_corr/"
    if clipped is None:
        assert case["weights"] is None
        compared.seen.add("weights")
    else:
        weights = clipped.weights
        if config.get("rollout_is_batch_normalize"):
            over = "tokens" if config["rollout_is"] == "token" else "sequences"
            weights = rollout.normalized_weights(weights, mask=mask, over=over)  # type: ignore[arg-type]
            compared.check(metric + "rollout_is_batch_norm_factor", clipped.weights[0, 0] / weights[0, 0])
        compared.check("weights", weights)
        if config["rollout_is_threshold"] == "0.5_5.0":
            # In a batch with no token outside verl gives no share.
            compared.check(metric + "rollout_is_oob_ratio", clipped.share_changed)
        is_token = config["rollout_is"] == "token"
        # The lower threshold is the inverse of the upper one, unless there is one.
        low, high = _bounds(config["rollout_is_threshold"])
        compared.check(metric + "rollout_is_ratio_fraction_high", _share_over(batch, high, is_token))
        compared.check(metric + "rollout_is_ratio_fraction_low", _share_under(batch, low or 1 / high, is_token))
    kept = mask
    if "rollout_rs" in config:
        kinds, thresholds = config["rollout_rs"].split(","), str(config["rollout_rs_threshold"]).split(",")
        for kind, threshold in zip(kinds, thresholds, strict=True):
            one = verl_rs(batch, kind, threshold)
            kept = kept & one
            dropped = mask & ~one
            compared.check(f"{metric}rollout_rs_{kind}_masked_fraction", dropped.sum() / mask.sum())
            compared.check(f"{metric}rollout_rs_{kind}_seq_masked_fraction", dropped.any(1).float().mean())
        compared.check(metric + "rollout_rs_masked_fraction", 1 - kept.sum() / mask.sum(), atol=1e-7)
        compared.check(metric + "rollout_rs_seq_masked_fraction", (mask & ~kept).any(1).float().mean())
    compared.check("modified_response_mask", kept)
    return compared


def _share_over(batch: Batch, bound: float, is_token: bool) -> Tensor:
    bounds = (None, bound)
    if is_token:
        return TokenClip(bounds=bounds)(batch.log_ratios, mask=batch.mask).share_above
    return SeqClip(ratio="product", mode="truncate", bounds=bounds)(batch.log_ratios, mask=batch.mask).share_sequences


def _share_under(batch: Batch, bound: float, is_token: bool) -> Tensor:
    bounds = (bound, 1e30)
    if is_token:
        return TokenClip(bounds=bounds)(batch.log_ratios, mask=batch.mask).share_below
    return SeqClip(ratio="product", mode="truncate", bounds=bounds)(batch.log_ratios, mask=batch.mask).share_sequences


def verl_061(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared, config, mask = Compared(case, path), case["config"], batch.mask
    verl_metrics(batch, compared)
    metric = "metrics//rollout_corr/"
    clipped = verl_is(batch, config)
    if clipped is None:
        compared.seen.add("weights")
    else:
        compared.check("weights", clipped.weights)
        # Statistics of raw ratios, but that log-ratios are held within 20.
        compared.check(metric + "rollout_is_mean", batch.statistics["mean_ratio"])
        compared.check(metric + "rollout_is_max", batch.statistics["max_ratio"])
        compared.check(metric + "rollout_is_min", batch.statistics["min_log_ratio"].clamp(min=-LIMIT).exp())
        compared.check(metric + "rollout_is_ratio_fraction_high", _share_over(batch, 2.0, True))
        compared.check(metric + "rollout_is_ratio_fraction_low", _share_under(batch, 0.5, True))
    kept = mask
    if config.get("rollout_rs") == "geometric":
        bounds = (config["rollout_rs_threshold_lower"], config["rollout_rs_threshold"])
        found = SeqClip(ratio="geometric", bounds=bounds)(batch.log_ratios, mask=mask)
        kept = found.mask
        compared.check(metric + "rollout_rs_masked_fraction", found.share_changed)
        compared.check(metric + "rollout_rs_seq_masked_fraction", found.share_sequences)
    threshold = config.get("rollout_token_veto_threshold")
    if threshold is not None:
        unvetoed = rollout.veto_mask(batch.log_ratios, mask=mask, min_ratio=threshold)
        kept = kept & unvetoed
        compared.check(metric + "rollout_is_veto_fraction", (mask & ~unvetoed).any(1).float().mean())
        below = TokenClip(bounds=(threshold, 2.0))(batch.log_ratios, mask=mask).share_below
        compared.check(metric + "rollout_is_catastrophic_token_fraction", below)
    else:
        compared.check(metric + "rollout_is_veto_fraction", 0.0)
        compared.check(metric + "rollout_is_catastrophic_token_fraction", 0.0)
    compared.check("modified_response_mask", kept)
    return compared


def verl_kl_penalty(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    """Per token against a reference: k1, k2, k3; "k3+" has the value of k3 and the gradient of k2."""
    compared = Compared(case, path)
    current = batch.current.clone().requires_grad_()
    x = rollout.token_log_ratios(batch.old, logp_rollout=current, mask=batch.mask)
    k1, k2, k3 = (rollout.kl_estimates(x, mask=batch.mask, estimator=name) for name in ("k1", "k2", "k3"))  # type: ignore[arg-type]
    found = {"k1": k1, "abs": k1.abs(), "k2": k2, "k3": k3, "k3+": k2 - k2.detach() + k3.detach()}
    for name, value in found.items():
        compared.check(f"per_token//{name}", value.detach(), atol=2e-7)
        if name != "abs":
            (gradient,) = torch.autograd.grad(value.sum(), current, retain_graph=True)
            compared.check(f"grad_wrt_logprob_masked_sum//{name}", gradient, atol=2e-7)
    return compared
