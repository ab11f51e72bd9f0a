"""Divergences: known numbers, and estimators whose expectation is the divergence."""

from __future__ import annotations

import math

import pytest
import torch

from stabilizer import rollout

UNIFORM = torch.tensor([0.5, 0.5]).log()


@pytest.mark.parametrize(("p", "divergence", "entropy"), [([0.8, 0.2], 0.19, 0.50), ([0.95, 0.05], 0.49, 0.20)])
def test_a_policy_that_sharpens(p: list[float], divergence: float, entropy: float) -> None:
    log_p = torch.tensor(p).log()
    assert rollout.kl_divergence(log_p, log_q=UNIFORM).item() == pytest.approx(divergence, abs=0.005)
    assert rollout.entropy(log_p).item() == pytest.approx(entropy, abs=0.005)
    # From the definition.
    assert rollout.kl_divergence(log_p, log_q=UNIFORM).item() == pytest.approx(sum(x * math.log(2 * x) for x in p))
    assert rollout.entropy(log_p).item() == pytest.approx(-sum(x * math.log(x) for x in p))


@pytest.mark.parametrize("p", [[0.8, 0.2], [0.95, 0.05], [0.1, 0.9]])
def test_expectations_of_k1_and_k3_are_the_divergence_and_k2_is_close(p: list[float]) -> None:
    """Over all tokens that the rollout policy could have sampled, weighted by how often it does."""
    log_p = torch.tensor(p).log()
    log_ratios = rollout.token_log_ratios(UNIFORM[None], logp_rollout=log_p[None], mask=torch.ones(1, 2))
    exact = rollout.kl_divergence(log_p, log_q=UNIFORM).item()
    for estimator, tolerance in (("k1", 1e-6), ("k3", 1e-6), ("k2", 0.35)):
        estimates = rollout.kl_estimates(log_ratios, mask=torch.ones(1, 2), estimator=estimator)  # type: ignore[arg-type]
        assert (estimates[0] * log_p.exp()).sum().item() == pytest.approx(exact, rel=tolerance)


def test_direction_of_the_divergence() -> None:
    """KL(p || q) and KL(q || p) differ, and so do their estimates."""
    log_p, log_q = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.3, 0.7]).log()
    one = rollout.kl_divergence(log_p, log_q=log_q).item()
    other = rollout.kl_divergence(log_q, log_q=log_p).item()
    assert abs(one - other) > 0.05
    log_ratios = rollout.token_log_ratios(log_q[None], logp_rollout=log_p[None], mask=torch.ones(1, 2))
    k1 = rollout.kl_estimates(log_ratios, mask=torch.ones(1, 2), estimator="k1")
    assert (k1[0] * log_p.exp()).sum().item() == pytest.approx(one, rel=1e-5)


def test_probabilities_of_0() -> None:
    certain = torch.tensor([1.0, 0.0]).log().requires_grad_()
    assert rollout.entropy(certain).item() == 0
    assert rollout.kl_divergence(certain, log_q=UNIFORM).item() == pytest.approx(math.log(2))
    assert rollout.kl_divergence(UNIFORM, log_q=certain).item() == math.inf
    assert rollout.kl_divergence(certain, log_q=certain).item() == 0


def test_k3_near_0_in_float32() -> None:
    """The sum r - 1 - log r cancels: float32 would be off by a tenth of 5e-7 here."""
    found = rollout.kl_estimates(torch.full((1, 1), 1e-3), mask=torch.ones(1, 1))
    assert found.item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="estimator='k4': expected k1, k2 or k3"):
        rollout.kl_estimates(torch.zeros(1, 1), mask=torch.ones(1, 1), estimator="k4")  # type: ignore[arg-type]
