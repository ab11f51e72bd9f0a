"""Equal to the public trainers on recorded batches: their configuration in our terms, for every recorded variant.

`tests/data/golden_rl` holds what verl, TRL, OpenRLHF, slime, ms-swift and prime-rl make of the same log-probs, in
float32. Every number of theirs is compared, or stands in `NOT_OURS` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from stabilizer import rollout
from tests.rollout_batches import Batch, Compared, leaves
from tests.rollout_trainers import ms_swift, openrlhf, prime_rl, slime, trl, trl_other
from tests.rollout_verl import verl_061, verl_091, verl_kl_penalty

BATCHES = ("mild", "extreme", "ontarget")

#: What a path matches -> why it is not compared.
NOT_OURS = {
    "^meta": "where the numbers come from",
    "^case$": "the name of the batch",
    "^input": "what all of them were given",
    "derived/type_a1_token": "of no public implementation",
    "derived/note": "text",
    "trl_1_16/version": "text",
    "trl_1_16/vespo_gamma_weights": "VESPO reshapes the ratio by a smooth function: it neither truncates nor masks",
    "/loss_type": "the configuration",
    "/threshold$": "the configuration",
    "/config": "the configuration",
    "kl_penalty/logprob": "the configuration",
    "kl_penalty/ref_logprob": "the configuration",
    "training_ppl": "means of exponentials of log-perplexities, which are compared",
    "rollout_ppl": "means of exponentials of log-perplexities, which are compared",
    "ppl_ratio": "means of exponentials of log-perplexities, which are compared",
    "rollout_is_std": "of weights or of ratios after another clip; ours are of raw ratios",
    "rollout_is_eff_sample_size": "of weights or of ratios after another clip; ours are of raw ratios",
    "rollout_is_seq_": "statistics over arithmetic means of a sequence's weights",
    "rollout_is_mean": "of weights after the clip; compared for verl 0.6.1, where it is of raw ratios",
    "rollout_is_max": "of weights after the clip in part of the cases; compared for verl 0.6.1",
    "rollout_is_min": "of weights after the clip in part of the cases; compared for verl 0.6.1",
    "rollout_rs_mean": "of geometric means, each weighted by its number of tokens",
    "rollout_rs_max": "as above",
    "rollout_rs_min": "as above",
    "rollout_rs_std": "of ratios after another clip",
    "rollout_rs_eff_sample_size": "of ratios after another clip",
    "rollout_rs_ratio_fraction": "shares of sequences; the masks are compared",
    r"rollout_rs_seq_mean(?!_k\d_(seq_)?masked)": "statistics over arithmetic means of a sequence",
    "rollout_rs_seq_std": "statistics over arithmetic means of a sequence",
    r"rollout_rs_seq_max(?!_k\d_(seq_)?masked)": "statistics over arithmetic means of a sequence",
    "rollout_rs_seq_min": "statistics over arithmetic means of a sequence",
    r"rollout_rs_seq_sum_k\d_(?!masked|seq_masked)": "statistics of what the mask is made from; the masks are compared",
    "rollout_rs_seq_fraction": "shares over arithmetic means of a sequence",
    r"rollout_rs_token_k\d_(?!masked|seq_masked)": "statistics of what the mask is made from; the masks are compared",
    "metrics/tis_weight_before_bound": "ratios; those of tokens are compared elsewhere, and their clip here",
    "metrics/tis_weight_after_bound": "the weights before they are normalized; the final ones are compared",
    "metrics/is_ratio_": "means and extremes of each sequence's weights, which are compared",
    "metrics/tis_abs": "|r - 1|, with the ratios compared",
    "metrics/rs_catastrophic_token_fraction": "which token vetoes; the masks are compared",
    "metrics/ess": "of weights after the clip",
}


def derived(batch: Batch, case: dict[str, Any], path: str) -> Compared:
    compared = Compared(case, path)
    compared.check("log_ratio", batch.log_ratios)
    compared.check("seq_log_ratio_sum", rollout.sequence_log_ratios_sum(batch.log_ratios, mask=batch.mask), atol=2e-7)
    compared.check("seq_log_ratio_mean", rollout.sequence_log_ratios_mean(batch.log_ratios, mask=batch.mask), atol=2e-7)
    return compared


Check = Callable[[Batch, Any, str], Compared]
#: Part of a file -> what compares it, or each of its variants.
WHOLE: dict[str, Check] = {"derived": derived, "prime_rl": prime_rl, "verl_0_9_1/kl_penalty": verl_kl_penalty}
VARIANTS: dict[str, Check] = {
    "verl_0_9_1/cases": verl_091,
    "verl_0_6_1": verl_061,
    "openrlhf": openrlhf,
    "slime": slime,
    "ms_swift": ms_swift,
    "trl_1_16": trl,
}


def _at(golden: Any, path: str) -> Any:
    for part in path.split("/"):
        golden = golden[part]
    return golden


def _variants(golden: dict[str, Any]) -> dict[str, tuple[Check, Any]]:
    found = {path: (check, _at(golden, path)) for path, check in WHOLE.items()}
    for path, check in VARIANTS.items():
        for name, case in _at(golden, path).items():
            is_other = path == "trl_1_16" and not isinstance(case, dict)
            found[f"{path}/{name}"] = (trl_other if is_other else check, case)
    return found


def _reason(path: str) -> str | None:
    slashed = path.replace("//", "/")
    return next((reason for part, reason in NOT_OURS.items() if re.search(part, slashed)), None)


CASES = [(batch, path) for batch in BATCHES for path in _variants(Batch(batch).golden)]


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{name}-{path}" for name, path in CASES])
def test_a_recorded_variant_is_ours(name: str, path: str) -> None:
    batch = Batch(name)
    check, case = _variants(batch.golden)[path]
    compared = check(batch, case, path)
    for leaf in leaves(case):
        whole = f"{path}//{leaf}" if leaf else path
        seen = leaf in compared.seen if leaf else path.split("/")[-1] in compared.seen
        assert seen or _reason(whole), f"{whole} is neither compared nor listed with a reason"


@pytest.mark.parametrize("name", BATCHES)
def test_no_recorded_variant_is_left_out(name: str) -> None:
    golden = Batch(name).golden
    covered = {path.split("/")[0] for path in WHOLE | VARIANTS}
    assert set(golden) == covered | {"meta", "case", "input"}
    assert {"cases", "kl_penalty"} == set(golden["verl_0_9_1"])
    paths = {path for batch, path in CASES if batch == name}
    assert len(paths) == len(WHOLE) + sum(len(_at(golden, path)) for path in VARIANTS)


def test_what_matters_has_no_reason_to_be_left_out() -> None:
    """Reasons are patterns: one that matched too much would hide what is no longer compared."""
    names = (
        r"//(weights|weights_flat|masks|modified_response_mask|loss|dloss_dlogp|importance_sampling_ratio|k[123]\+?)$"
    )
    paths = [leaf for name in BATCHES for leaf in leaves(Batch(name).golden)]
    important = [path for path in paths if re.search(names + "|masked_fraction$", path)]
    assert len(important) > 300
    assert [path for path in important if _reason(path)] == []


def test_every_reason_is_needed() -> None:
    paths = {leaf.replace("//", "/") for name in BATCHES for leaf in leaves(Batch(name).golden)}
    for part in NOT_OURS:
        assert any(re.search(part, path) for path in paths), part
