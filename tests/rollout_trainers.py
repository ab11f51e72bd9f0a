"""What TRL, OpenRLHF, slime, ms-swift and prime-rl record, in our terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stabilizer import rollout
from stabilizer.rollout import SeqClip, TokenClip
from tests.rollout_batches import LIMIT, Batch, Compared
from tests.rollout_verl import verl_metrics

__all__ = ["ms_swift", "openrlhf", "prime_rl", "slime", "trl", "trl_other"]


# TRL and OpenRLHF: weights, the loss of the step and its gradient.


def dapo(batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor, rollout.DualClipLoss]:
    """The mean over tokens of the weighted loss, its gradient by the current log-probs, and where it is clipped."""
    current = batch.current.clone().requires_grad_()
    drift = rollout.token_log_ratios(current, logp_rollout=batch.old, mask=batch.mask)
    found = rollout.dual_clip_loss(drift, advantages=batch.advantages, mask=batch.mask, dual_clip=None)
    loss = (found.loss * weights).sum() / batch.mask.sum()
    (gradient,) = torch.autograd.grad(loss, current)
    return loss.detach(), gradient, found


def trl(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared, mask = Compared(case, path), batch.mask
    level, mode, low, high = path.split("/")[-1].split("_")
    lower = low.removeprefix("min")
    bounds = (None if lower == "None" else float(lower), float(high.removeprefix("max")))
    if level == "token":
        clip: TokenClip | SeqClip = TokenClip(mode="mis" if mode == "mask" else "truncate", bounds=bounds)
    else:
        clip = SeqClip(ratio="product", mode="mis" if mode == "mask" else "truncate", bounds=bounds)
    found = clip(batch.log_ratios, mask=mask)
    # TRL has 1 where a token is masked, and one column for sequences.
    theirs = torch.where(mask, found.weights, 1.0) if level == "token" else found.weights[:, :1]
    compared.check("importance_sampling_ratio", theirs)
    used = found.weights[mask] if level == "token" else found.weights[:, 0]
    for name, value in (("min", used.amin()), ("mean", used.mean()), ("max", used.amax())):
        compared.check(f"metrics//sampling/importance_sampling_ratio/{name}", value)
    compared.check("metrics//sampling/sampling_logp_difference/mean", batch.log_ratios[mask].abs().mean())
    compared.check("metrics//sampling/sampling_logp_difference/max", batch.statistics["max_abs_log_ratio"])
    loss, gradient, parts = dapo(batch, found.weights)
    compared.check("loss", loss, atol=2e-7)
    compared.check("dloss_dlogp", gradient)
    low_share, high_share = ((part & mask).sum() / mask.sum() for part in (parts.is_low, parts.is_high))
    by_row = parts.is_high.sum(1) / mask.sum(1)
    compared.check("clip//clip_ratio/low_mean", low_share)
    compared.check("clip//clip_ratio/high_mean", high_share)
    compared.check("clip//clip_ratio/region_mean", low_share + high_share)
    compared.check("clip//clip_ratio/low_min", (parts.is_low.sum(1) / mask.sum(1)).amin())
    compared.check("clip//clip_ratio/high_max", by_row.amax())
    return compared


def trl_other(batch: Batch, case: Any, path: str) -> Compared:
    name = path.split("/")[-1]
    compared = Compared({name: case}, path)
    if name == "off_policy_mask_threshold_0.1":
        kept = rollout.off_policy_mask(batch.off_policy, mask=batch.mask, advantages=batch.advantages, max_kl=0.1)
        compared.check(name, kept.any(1, keepdim=True))
    elif name == "k3_ref_kl(ref=old)":
        compared.check(name, rollout.kl_estimates(batch.to_reference, mask=batch.mask), atol=2e-7)
    return compared


def openrlhf(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared, name = Compared(case, path), path.split("/")[-1]
    if name == "compute_approx_kl":
        for estimator in ("k1", "k2", "k3"):
            estimates = rollout.kl_estimates(batch.to_reference, mask=batch.mask, estimator=estimator)  # type: ignore[arg-type]
            compared.check(estimator, estimates, atol=2e-7)
        return compared
    kind, low, high = name.split("_")
    bounds = (float(low), float(high))
    clips = {
        "tis": TokenClip(bounds=bounds),
        "icepop": TokenClip(mode="icepop", bounds=bounds),
        "seq-mask-tis": SeqClip(ratio="geometric", bounds=bounds, weighting="token"),
    }
    loss, gradient, parts = dapo(batch, clips[kind](batch.log_ratios, mask=batch.mask).weights)
    compared.check("loss", loss, atol=2e-7)
    compared.check("dloss_dlogp", gradient)
    compared.check("clip_ratio", (parts.is_low | parts.is_high).sum() / batch.mask.sum())
    compared.check("ppo_kl", -batch.drift[batch.mask].mean(), atol=2e-7)
    compared.check("vllm_kl", batch.statistics["kl_k1"], atol=2e-7)
    return compared


# slime, ms-swift and prime-rl.


def slime(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared, config, mask = Compared(case, path), case["config"], batch.mask
    if "weights_flat" in case:
        low, high = config["tis_clip_low"] or None, config["tis_clip"]
        mode = "icepop" if "icepop" in path else "truncate"
        found = TokenClip(mode=mode, bounds=(low, high))(batch.log_ratios, mask=mask)  # type: ignore[arg-type]
        compared.check("weights_flat", found.weights[mask])
        compared.check("metrics//tis", rollout.importance_ratios(batch.log_ratios)[mask])
        changed = (found.weights != rollout.importance_ratios(batch.log_ratios))[mask]
        compared.check("metrics//tis_clipfrac", changed)
        return compared
    low, high = config["tis_lower_bound"], config["tis_upper_bound"]
    bounds = (None, high) if config["tis_mode"] == "truncate" else (low, high)
    mode = "mis" if config["tis_mode"] == "mask" else "truncate"
    if config["tis_level"] == "token":
        clip: TokenClip | SeqClip = TokenClip(mode=mode, bounds=bounds, log_ratio_limit=LIMIT)  # type: ignore[arg-type]
    else:
        ratio = {"sequence": "product", "geometric": "geometric"}[config["tis_level"]]
        clip = SeqClip(ratio=ratio, mode=mode, bounds=bounds, log_ratio_limit=LIMIT)  # type: ignore[arg-type]
    found = clip(batch.log_ratios, mask=mask)
    kept, weights = found.mask, found.weights
    if config["use_rs"]:
        kept = kept & TokenClip(mode="mis", bounds=(low, high))(batch.log_ratios, mask=mask).mask
        unvetoed = rollout.veto_mask(batch.log_ratios, mask=mask, min_ratio=config["rs_veto_threshold"])
        kept = kept & unvetoed
        compared.check_rows(batch, "rs_mask_fraction_low", batch.log_ratios.exp() < low)
        compared.check_rows(batch, "rs_mask_fraction_high", batch.log_ratios.exp() > high)
        compared.check_rows(batch, "rs_catastrophic_seq_fraction", mask & ~unvetoed)
    if config["tis_batch_normalize"]:
        normalized = rollout.normalized_weights(weights, mask=mask)
        compared.check_rows(
            batch, "batch_norm_factor", torch.full_like(weights, (weights[0, 0] / normalized[0, 0]).item())
        )
        weights = normalized
    # slime leaves a rejected token its weight, and takes it out by the mask.
    theirs = batch.tokens(case["masks"]).bool()
    assert torch.equal(kept, theirs), path
    torch.testing.assert_close(weights * kept, batch.tokens(case["weights"]) * theirs, rtol=1e-5, atol=0)
    compared.seen |= {"weights", "masks"}
    level = batch.log_ratios if config["tis_level"] == "token" else _whole(batch, config["tis_level"])
    for name in ("tis_truncate_fraction", "tis_clip_fraction_high", "tis_mask_fraction_high"):
        compared.check_rows(batch, name, level.exp() > high)
    for name in ("tis_clip_fraction_low", "tis_mask_fraction_low"):
        compared.check_rows(batch, name, level.exp() < low)
    slime_statistics(batch, compared)
    return compared


def _whole(batch: Batch, level: str) -> Tensor:
    aggregate = rollout.sequence_log_ratios_sum if level == "sequence" else rollout.sequence_log_ratios_mean
    return aggregate(batch.log_ratios, mask=batch.mask)[:, None].expand_as(batch.log_ratios)


def slime_statistics(batch: Batch, compared: Compared) -> None:
    """Of each sequence: ours of that sequence alone."""
    x, mask = batch.log_ratios, batch.mask
    rows = [
        rollout.rollout_mismatch(p[None], logp_rollout=q[None], mask=m[None]).as_dict()
        for p, q, m in zip(batch.old, batch.rollout, mask, strict=True)
    ]
    compared.check_rows(batch, "kl", rollout.kl_estimates(x, mask=mask, estimator="k1"))
    compared.check_rows(batch, "k3_kl", rollout.kl_estimates(x, mask=mask))
    for name, ours in {
        "training_log_ppl": "train_log_perplexity",
        "rollout_log_ppl": "rollout_log_perplexity",
        "log_ppl_diff": "log_perplexity_gap",
        "log_ppl_abs_diff": "abs_log_perplexity_gap",
        "chi2_token": "chi_square",
        "chi2_seq": "sequence_chi_square",
    }.items():
        column = torch.stack([row[ours] for row in rows])[:, None].expand_as(x)
        compared.check_rows(batch, name, column)


def ms_swift(batch: Batch, case: Any, path: str) -> Compared:
    name, mask = path.split("/")[-1], batch.mask
    if name == "off_policy_sequence_mask_keep_delta_0.1":
        compared = Compared({name: case}, path)
        kept = rollout.off_policy_mask(batch.off_policy, mask=mask, advantages=batch.advantages, max_kl=0.1)
        compared.check(name, kept.any(1))
        return compared
    compared = Compared(case, path)
    # Log-ratios of tokens are held within 20 before anything else, and "sequence" is the geometric mean.
    held = batch.log_ratios.clamp(-LIMIT, LIMIT)
    if name == "offpolicy_metrics":
        verl_like = {key: value for key, value in case.items() if key not in {"k3_kl", "chi2_seq"}}
        inner = Compared(verl_like, path)
        verl_metrics(batch, inner, prefix="")
        compared.seen |= inner.seen
        k3 = rollout.kl_estimates(batch.log_ratios, mask=mask).clamp(max=10)
        compared.check("k3_kl", k3[mask].mean(), atol=2e-7)
        geometric = rollout.sequence_log_ratios_mean(batch.log_ratios, mask=mask)
        compared.check("chi2_seq", (2 * geometric).expm1().mean(), atol=2e-7)
        return compared
    bounds = (None, case["threshold"])
    clips: dict[str, TokenClip | SeqClip] = {
        "token_truncate": TokenClip(bounds=bounds),
        "token_mask": TokenClip(mode="mis", bounds=bounds),
        "sequence_truncate": SeqClip(ratio="geometric", mode="truncate", bounds=bounds),
        "sequence_mask": SeqClip(ratio="geometric", bounds=bounds, weighting="token"),
    }
    found = clips[name](held, mask=mask)
    torch.testing.assert_close(found.weights, batch.tokens(case["weights"]), rtol=1e-5, atol=0)
    compared.seen.add("weights")
    compared.check("metrics//is_weight_mean", found.weights[mask].mean())
    clipped = found.share_above if name.startswith("token") else found.share_sequences
    compared.check("metrics//clipped_frac", clipped)
    return compared


def prime_rl(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    """The ratio of the current policy, off-policy drift and mismatch in one."""
    compared = Compared(case, path)
    compared.check("log_importance_ratio", batch.off_policy, atol=2e-7)
    compared.check("importance_ratio", rollout.importance_ratios(batch.off_policy))
    compared.check("mismatch_kl", rollout.kl_estimates(batch.off_policy, mask=batch.mask), atol=2e-7)
    found = rollout.rollout_mismatch(batch.current, logp_rollout=batch.rollout, mask=batch.mask)
    compared.check("masked_mean_mismatch_kl", found.kl_k3)
    return compared
