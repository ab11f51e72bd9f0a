"""The installed TRL beside ours: on batches by chance, with tokens that the engine gave no log-prob."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from stabilizer import rollout


@pytest.mark.parametrize("share_unknown", [0.0, 0.1])
def test_the_off_policy_mask_is_that_of_trl(share_unknown: float) -> None:
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        # What it imports is not ours to judge.
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
    current = -torch.rand(64, 12) * 3
    sampling = current + torch.randn_like(current) * 0.5
    sampling[torch.rand_like(sampling) < share_unknown] = math.nan
    mask = (torch.arange(12) < torch.randint(1, 13, (64, 1))).long()
    advantages = torch.randn(64)
    theirs = GRPOTrainer.get_off_policy_mask(advantages[:, None], current, sampling, mask, 0.1)
    log_ratios = rollout.token_log_ratios(current, logp_rollout=sampling, mask=mask)
    ours = rollout.off_policy_mask(log_ratios, mask=mask, advantages=advantages, max_kl=0.1)
    assert torch.equal(ours.any(1), theirs[:, 0].bool())
    assert 5 < (~ours.any(1)).sum() < 59
