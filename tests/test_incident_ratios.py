"""What a batch says of a found unit: its document in a packed row, its importance ratio and its advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stabilizer.localize.tokens import can_see_ratios
from tests.unit_batches import IDS, LENGTH, ROWS, Letters, described

# Documents.


def _places(batch: dict[str, Any], row: int, *, shape: Sequence[int] = (ROWS, LENGTH)) -> list[tuple[Any, Any]]:
    units: list[tuple[int, int | None]] = [(row, position) for position in range(shape[1])]
    return [(unit["document"], unit["document_position"]) for unit in described(batch, *units, shape=shape)]


PACKED = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize(
    "extra",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])},
        {"seq_idx": torch.tensor([[0] * 6, [0, 0, 1, 1, 1, 2], [0] * 6], dtype=torch.int32)},
        {"document_ids": torch.tensor([[7] * 6, [9, 9, 4, 4, 4, 5], [0] * 6])},
        {"segment_ids": torch.tensor([[1] * 6, [1, 1, 2, 2, 2, 3], [1] * 6])},
        {"cu_seqlens": torch.tensor([0, 6, 8, 11, 12, 18], dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor([[0, 6, 6, 6], [0, 2, 5, 6], [0, 6, 6, 6]])},
    ],
)
def test_packed_rows_have_documents(extra: dict[str, Any]) -> None:
    assert _places({"input_ids": IDS, **extra}, 1) == PACKED
    assert _places({"input_ids": IDS, **extra}, 2) == [(0, position) for position in range(LENGTH)]
    # The model's inputs without the last token.
    assert _places({"input_ids": IDS, **extra}, 1, shape=(ROWS, LENGTH - 1)) == PACKED[:-1]


def test_one_flat_row_of_documents() -> None:
    batch = {"input_ids": IDS.reshape(1, -1), "position_ids": torch.tensor([[*range(6), 0, 1, 0, 1, 2, 0, *range(6)]])}
    places = _places(batch, 0, shape=(1, ROWS * LENGTH))
    assert places[6:12] == [(number + 1, position) for number, position in PACKED]
    (found,) = described(batch, (9, None), shape=(ROWS * LENGTH,))
    assert (found["document"], found["document_position"]) == (2, 1)


def test_rows_that_are_not_packed_have_none() -> None:
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    assert _places({"input_ids": IDS, "position_ids": positions}, 1) == [(None, None)] * LENGTH
    padded, mask = positions.clone(), torch.ones(ROWS, LENGTH)
    padded[1, 3:], mask[1, 3:] = 0, 0
    assert _places({"input_ids": IDS, "position_ids": padded, "attention_mask": mask}, 1) == [(None, None)] * LENGTH


def test_the_context_ends_where_the_document_does() -> None:
    batch = {"input_ids": IDS, "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]] * ROWS)}
    (found,) = described(batch, (1, 4), tokenizer=Letters())
    assert found["context"] == "no>>>p<<<"


# Ratios and advantages.


def test_log_ratios_of_the_batch() -> None:
    ratios = torch.randn(ROWS, LENGTH)
    (found,) = described({"input_ids": IDS, "log_ratios": ratios}, (1, 2))
    assert found["log_ratio"] == pytest.approx(ratios[1, 2].item())
    assert found["sequence_log_ratio"] == pytest.approx(ratios[1].double().sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    "name",
    ["old_log_probs", "old_per_token_logps", "sampling_per_token_logps", "rollout_log_probs", "behavior_logprobs"],
)
def test_log_ratios_from_two_policies(name: str) -> None:
    now, old = -torch.rand(ROWS, LENGTH), -9 * torch.rand(ROWS, LENGTH)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * ROWS)
    batch = {"completion_ids": IDS, name: old, "completion_mask": mask}
    expected = (now - old)[1]
    for extra, values in (({"log_probs": now}, None), ({}, now), ({}, now.flatten()), ({"log_probs": old}, now)):
        (found,) = described({**batch, **extra}, (1, 2), values=values)
        assert found["log_ratio"] == pytest.approx(expected[2].item(), rel=1e-6)
        assert found["sequence_log_ratio"] == pytest.approx(expected[:4].double().sum().item(), rel=1e-6)


def test_of_two_earlier_policies_the_one_that_is_farther_counts() -> None:
    """A loss may divide by either; a token that one of them could not score has the other's ratio."""
    now = -torch.rand(ROWS, LENGTH)
    old, sampling = now - 0.5, now.clone()
    sampling[1, 2], sampling[1, 3] = -14.0, torch.nan
    batch = {"completion_ids": IDS, "old_log_probs": old, "sampling_per_token_logps": sampling}
    (first, second, third) = described(batch, (1, 2), (1, 3), (1, 4), values=now)
    assert first["log_ratio"] == pytest.approx(now[1, 2].item() + 14.0, rel=1e-6)
    assert [second["log_ratio"], third["log_ratio"]] == pytest.approx([0.5, 0.5], rel=1e-5)


def test_a_ratio_that_cannot_be_seen_is_none() -> None:
    old = -torch.rand(ROWS, LENGTH)
    for batch, values in (
        ({"completion_ids": IDS, "old_log_probs": old}, None),
        ({"completion_ids": IDS, "old_log_probs": old}, torch.rand(ROWS, LENGTH)),  # losses, no log-probs
        ({"completion_ids": IDS, "old_log_probs": old[:, :3]}, None),
        ({"completion_ids": IDS, "ref_log_prob": old, "log_probs": old}, None),  # a reference has sampled nothing
        ({"completion_ids": IDS}, old),
    ):
        (found,) = described(batch, (1, 2), values=values)
        assert found["log_ratio"] is found["sequence_log_ratio"] is None
        assert not can_see_ratios(((batch,), {}), (ROWS, LENGTH), values=values)
    assert can_see_ratios((({"log_ratios": old},), {}), (ROWS, LENGTH))
    assert not can_see_ratios((({"log_ratios": old},), {}), (ROWS, LENGTH), redact=["log_ratios"])


def test_one_ratio_less_than_positions() -> None:
    (first, last) = described({"input_ids": IDS, "log_ratios": torch.ones(ROWS, LENGTH - 1)}, (1, 4), (1, 5))
    assert (first["log_ratio"], last["log_ratio"]) == (1.0, None)


def test_the_sequence_of_a_packed_row_is_the_document() -> None:
    batch = {
        "input_ids": IDS,
        "log_ratios": torch.arange(18.0).reshape(3, 6),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]] * 3),
    }
    (found,) = described(batch, (1, 4))
    assert found["sequence_log_ratio"] == 9 + 10 + 11


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, LENGTH)])
def test_advantages_by_row_or_by_token(shape: tuple[int, ...]) -> None:
    advantages = torch.randn(shape)
    (found,) = described({"input_ids": IDS, "advantages": advantages}, (1, 2))
    assert found["advantage"] == advantages.reshape(ROWS, -1)[1, -1 if len(shape) == 1 or shape[1] == 1 else 2].item()
    (found,) = described({"x": torch.randn(ROWS, 4), "advantages": advantages}, (1, None), shape=(ROWS,))
    assert (found["advantage"] is None) == (shape == (ROWS, LENGTH))
