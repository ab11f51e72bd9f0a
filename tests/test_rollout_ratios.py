"""Importance ratios: right sums and means, nothing leaks from what is masked, nothing overflows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stabilizer import rollout
from tests.environments import ROOT

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, 0.0]


def _batch(num_sequences: int = 5, num_tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    train, other = -torch.rand(2, num_sequences, num_tokens, dtype=torch.float64) * 3
    lengths = torch.randint(0, num_tokens + 1, (num_sequences,))
    lengths[:2] = torch.tensor([0, num_tokens])
    return train, other, torch.arange(num_tokens) < lengths[:, None]


def test_product_and_geometric_mean_are_what_their_names_say() -> None:
    train, other, mask = _batch()
    log_ratios = rollout.token_log_ratios(train, logp_rollout=other, mask=mask)
    ratios = (train.exp() / other.exp()).tolist()
    products = rollout.sequence_log_ratios_sum(log_ratios, mask=mask).exp().tolist()
    means = rollout.sequence_log_ratios_mean(log_ratios, mask=mask).exp().tolist()
    for row, length, product, mean in zip(ratios, mask.sum(1).tolist(), products, means, strict=True):
        assert product == pytest.approx(math.prod(row[:length]), rel=1e-12)
        assert mean == pytest.approx(math.prod(row[:length]) ** (1 / max(length, 1)), rel=1e-12)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_masked_reaches_neither_values_nor_gradients(garbage: float, kind: torch.dtype) -> None:
    train, other, mask = _batch()

    def run(filling: float) -> tuple[Tensor, ...]:
        p, q = (logp.masked_fill(~mask, filling).requires_grad_() for logp in (train, other))
        ones = mask.to(kind)
        log_ratios = rollout.token_log_ratios(p, logp_rollout=q, mask=ones)
        outputs = [
            log_ratios.exp(),
            rollout.sequence_log_ratios_sum(p - q, mask=ones),
            rollout.sequence_log_ratios_mean(p - q, mask=ones),
            *(rollout.kl_estimates(p - q, mask=ones, estimator=name) for name in ("k1", "k2", "k3")),
            rollout.dual_clip_loss(p - q, advantages=p.detach(), mask=ones).loss,
        ]
        gradients = torch.autograd.grad(sum(value.sum() for value in outputs), (p, q))
        return (*(value.detach() for value in outputs), *gradients)

    for found, expected in zip(run(garbage), run(-1.0), strict=True):
        assert torch.equal(found, expected)
    assert not run(garbage)[-1][~mask].any()


def test_float32_over_1e5_tokens_of_any_size_stays_finite_with_the_gradient_of_float64() -> None:
    size = (50, 2000)
    train = -torch.rand(size) * 10
    other = train - torch.randn(size) * 0.1
    # Where exp leaves float32, under and over.
    other[:, ::500] -= 200
    other[:, 1::500] += 200
    mask = torch.rand(size) < 0.9

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        p = train.to(dtype).requires_grad_()
        log_ratios = rollout.token_log_ratios(p, logp_rollout=other.to(dtype), mask=mask)
        loss = rollout.dual_clip_loss(log_ratios, advantages=torch.linspace(-1, 1, 50, dtype=dtype), mask=mask).loss
        k3 = rollout.kl_estimates(log_ratios, mask=mask)
        means = rollout.sequence_log_ratios_mean(log_ratios, mask=mask)
        # k3 of ratios near e^80 would drown everything else in the sum.
        total = loss.sum() + k3.clamp(max=100).sum() + means.exp().sum()
        (gradient,) = torch.autograd.grad(total, p)
        clips = (rollout.TokenClip(), rollout.SeqClip(ratio="product"), rollout.SeqClip(ratio="geometric"))
        for clip in clips:
            assert clip(log_ratios, mask=mask).weights.isfinite().all()
        assert k3.isfinite().all()
        assert rollout.importance_ratios(log_ratios).isfinite().all()
        return loss.detach(), means.detach(), gradient

    for found, expected in zip(run(torch.float32), run(torch.float64), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


def test_low_precision_log_probs_are_subtracted_in_float32() -> None:
    p, q = torch.tensor([[-7.5]], dtype=torch.bfloat16), torch.tensor([[-0.0078125]], dtype=torch.bfloat16)
    found = rollout.token_log_ratios(p, logp_rollout=q, mask=torch.ones(1, 1))
    assert found.dtype == torch.float32
    assert found.item() == -7.4921875, "bfloat16 would round it to -7.5"


def test_the_example_of_the_docs_runs() -> None:
    code = (ROOT / "docs" / "guides" / "rollout.md").read_text().split("```python\n")[1].split("```")[0]
    shape = (4, 6)
    names = {name: -torch.rand(shape) / 100 for name in ("logp_old", "logp_rollout", "logp_current")}
    scope = {"mask": torch.ones(shape), "advantages": torch.ones(4), **names}
    exec(code, scope)  # noqa: S102
    assert -1.1 < scope["loss"] < 0  # type: ignore[operator]


def test_shapes_that_would_broadcast_are_refused() -> None:
    good = torch.zeros(3, 3)
    calls = (
        lambda bad: rollout.token_log_ratios(good, logp_rollout=bad, mask=good),
        lambda bad: rollout.token_log_ratios(good, logp_rollout=good, mask=bad),
        lambda bad: rollout.sequence_log_ratios_sum(good, mask=bad),
        lambda bad: rollout.sequence_log_ratios_mean(good, mask=bad),
        lambda bad: rollout.kl_estimates(good, mask=bad),
        lambda bad: rollout.mismatch_sums(good, logp_rollout=good, mask=bad),
        lambda bad: rollout.TokenClip()(good, mask=bad),
        lambda bad: rollout.SeqClip(ratio="product")(good, mask=bad),
        lambda bad: rollout.veto_mask(good, mask=bad),
        lambda bad: rollout.divergence_mask(good, mask=bad, max_divergence=1.0),
        lambda bad: rollout.off_policy_mask(good, mask=bad, advantages=torch.ones(3), max_kl=1.0),
        lambda bad: rollout.normalized_weights(good, mask=bad),
        lambda bad: rollout.dual_clip_loss(good, mask=bad, advantages=torch.ones(3)),
    )
    for call in calls:
        for shape in ((3, 1), (1, 3), (3,)):
            with pytest.raises(ValueError, match=r"has shape .*expected \(3, 3\)"):
                call(torch.ones(shape))
    with pytest.raises(ValueError, match=r"expected \(B, T\)"):
        rollout.sequence_log_ratios_sum(torch.zeros(3), mask=torch.zeros(3))
