"""What a batch says of a found unit: its token and its text."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.localize.incident import FoundToken
from stabilizer.localize.tokens import describe_units
from tests.unit_batches import IDS, LENGTH, NEXT, ROWS, Letters, described


@dataclasses.dataclass
class DataclassBatch:
    input_ids: Tensor
    labels: Tensor


class Encoding(collections.UserDict[str, Any]):
    """As transformers' tokenizers return it."""


def _ids(batch: Any, row: int = 1, *, shape: Sequence[int] = (ROWS, LENGTH), **options: Any) -> list[int | None]:
    units: list[tuple[int, int | None]] = [(row, position) for position in range(shape[-1])]
    return [found["token_id"] for found in described(batch, *units, shape=shape, **options)]


# Which token.


def _loss_tokens(labels: Tensor, *, is_shifted_by_the_model: bool, row: int = 1) -> list[int | None]:
    """By autograd: the one label that changes the gradient at a position's logits."""
    logits = torch.zeros(ROWS, LENGTH, 100, dtype=torch.float64, requires_grad=True)
    used, targets = (logits[:, :-1], labels[:, 1:]) if is_shifted_by_the_model else (logits, labels)
    torch.nn.functional.cross_entropy(used.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    # Of a cross entropy's gradient only the target's entry is negative.
    return [int(entry.argmin()) if bool(entry.any()) else None for entry in logits.grad[row]]


def test_labels_that_repeat_the_inputs_are_shifted_by_the_model() -> None:
    expected = _loss_tokens(IDS, is_shifted_by_the_model=True)
    assert expected == [12, 13, 14, 15, 16, None]
    assert _ids({"input_ids": IDS, "labels": IDS}) == expected
    assert _ids({"input_ids": IDS}) == expected


def test_labels_that_are_others_stay_where_they_are() -> None:
    expected = _loss_tokens(NEXT, is_shifted_by_the_model=False)
    assert expected == [12, 13, 14, 15, 16, 99]
    assert _ids({"input_ids": IDS, "labels": NEXT}) == expected
    assert _ids((IDS, NEXT)) == expected
    assert _ids([IDS, torch.ones_like(IDS), NEXT]) == expected


def test_a_mask_on_labels_does_not_change_what_they_are_shifted_by() -> None:
    copied, shifted = IDS.clone(), NEXT.clone()
    copied[:, :3], shifted[:, :2] = -100, -100
    # A position whose loss is left out may still have a gradient: its token is named where the inputs say it.
    assert _ids({"input_ids": IDS, "labels": copied}) == [12, 13, 14, 15, 16, None]
    assert _ids({"input_ids": IDS, "labels": shifted}) == [None, None, 14, 15, 16, 99]


def test_one_spoiled_label_does_not_change_what_they_are_shifted_by() -> None:
    copied, shifted = IDS.clone(), NEXT.clone()
    copied[1, 3] = shifted[1, 2] = 41
    assert _ids({"input_ids": IDS, "labels": copied}) == [12, 13, 41, 15, 16, None]
    assert _ids({"input_ids": IDS, "labels": shifted}) == [12, 13, 41, 15, 16, 99]
    assert _ids((IDS, shifted)) == [12, 13, 41, 15, 16, 99]


def test_labels_that_all_are_left_out() -> None:
    assert _ids({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}) == [12, 13, 14, 15, 16, None]


def test_a_masked_language_model() -> None:
    inputs, labels = IDS.clone(), torch.full_like(IDS, -100)
    inputs[1, 2], labels[1, 2] = 4, IDS[1, 2]
    found = described({"input_ids": inputs, "labels": labels}, (1, 2), (1, 3), tokenizer=Letters())
    assert [unit["token_id"] for unit in found] == [13, None]
    assert found[0]["context"] == "kl>>>m<<<nop"


@pytest.mark.parametrize("missing", [1, 0])
def test_rows_with_one_token_more_than_units(missing: int) -> None:
    """Inputs without the last token go into the model; or the last position's logits are cut off."""
    shape = (ROWS, LENGTH - 1)
    assert _ids({"input_ids": IDS}, shape=shape) == [12, 13, 14, 15, 16]
    assert _ids(IDS, shape=shape) == [12, 13, 14, 15, 16]
    assert _ids({"labels": IDS}, shape=shape) == [12, 13, 14, 15, 16]
    assert _ids({"inputs": IDS[:, :-1], "labels": IDS}, shape=shape) == [12, 13, 14, 15, 16]
    labels = IDS if missing else torch.where(IDS > 13, IDS, -100)
    assert _ids({"input_ids": IDS, "labels": labels}, shape=shape) == [12, 13, 14, 15, 16]


def test_rows_that_are_flat_at_the_gate() -> None:
    for length in (LENGTH, LENGTH - 1):
        unit = (1 * length + 2, None)
        (found,) = described({"input_ids": IDS}, unit, shape=(ROWS * length,))
        assert (found["row"], found["position"], found["token_id"]) == (1, 2, 14)
    (found,) = described({"input_ids": IDS.flatten()}, (8, None), shape=(ROWS * LENGTH,))
    assert (found["row"], found["position"], found["token_id"]) == (0, 8, 14)


def test_samples_have_no_token() -> None:
    (found,) = described(
        (torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS)), (2, None), shape=(ROWS,), tokenizer=Letters()
    )
    assert found == {**dict.fromkeys(found), "row": 2}
    (found,) = described({"input_ids": IDS, "labels": torch.arange(ROWS)}, (2, None), shape=(ROWS,))
    assert (found["row"], found["position"], found["token_id"]) == (2, None, None)
    (found,) = described({"x": torch.arange(ROWS), "y": torch.randn(ROWS)}, (2, None), shape=(ROWS,))
    assert (found["row"], found["position"], found["token_id"]) == (2, None, None)


def test_a_completion_that_is_gated_alone() -> None:
    batch = {"prompt_ids": IDS, "completion_ids": NEXT[:, :4], "completion_mask": torch.ones(ROWS, 4)}
    assert _ids(batch, shape=(ROWS, 4)) == [12, 13, 14, 15]
    batch = {"input_ids": torch.cat([IDS, NEXT[:, :4]], 1), "responses": NEXT[:, :4]}
    assert _ids(batch, shape=(ROWS, 4)) == [12, 13, 14, 15]
    assert _ids(batch, shape=(ROWS, LENGTH + 4))[:6] == [12, 13, 14, 15, 16, 12]


def test_the_whole_row_comes_before_a_completion_of_its_length() -> None:
    assert _ids({"prompt_ids": IDS, "input_ids": IDS, "completion_ids": IDS + 30}) == [12, 13, 14, 15, 16, None]


def test_embeddings_instead_of_tokens_have_shifted_labels() -> None:
    assert _ids({"inputs_embeds": torch.randn(ROWS, LENGTH, 4), "labels": IDS})[0] == 12
    assert _ids({"features": torch.randn(ROWS, LENGTH, 4), "labels": IDS})[0] == 11


@pytest.mark.parametrize(
    "batch",
    [
        Encoding(input_ids=IDS, labels=NEXT),
        DataclassBatch(IDS, NEXT),
        {"text": {"input_ids": IDS}, "labels": NEXT, "names": ["a"] * ROWS},
        collections.namedtuple("Pair", "x y")(IDS, NEXT),
        [{"inputs": IDS}, {"targets": NEXT}],
    ],
)
def test_containers_of_any_kind(batch: Any) -> None:
    assert _ids(batch)[-2:] == [16, 99]


def test_keyword_arguments() -> None:
    found = describe_units(((), {"input_ids": IDS, "labels": NEXT}), [(1, 0)], (ROWS, LENGTH))
    assert found[0]["token_id"] == 12
    found = describe_units(((IDS,), {"labels": NEXT}), [(1, 5)], (ROWS, LENGTH))
    assert found[0]["token_id"] == 99


@pytest.mark.parametrize(
    "batch",
    [
        None,
        {},
        7,
        {"input_ids": None},
        {"input_ids": IDS[:, :2]},
        {"input_ids": IDS[:1]},
        {"input_ids": IDS.float()},
        {"input_ids": IDS[None]},
        {"input_ids": torch.zeros((), dtype=torch.long)},
        {"input_ids": torch.zeros(0, 0, dtype=torch.long), "labels": torch.zeros(0, dtype=torch.long)},
        {"labels": "text", "position_ids": IDS[0, :2], "cu_seqlens": torch.zeros(0, dtype=torch.long)},
        {"advantages": torch.zeros(2), "log_ratios": torch.zeros(2, 2), "old_log_probs": torch.zeros(())},
        {"cu_seqlens": torch.tensor([0, 6, 8, 11])},
        {"cu_seqlens": torch.tensor([0, 8, 6, 18])},
        {"advantages": torch.zeros(()), "seq_idx": torch.zeros(ROWS, 1), "cu_seqlens": IDS},
        {"input_ids": torch.ones(ROWS, LENGTH).to_sparse(), "labels": torch.ones(ROWS, LENGTH).to_sparse().long()},
    ],
)
@pytest.mark.parametrize("shape", [(ROWS, LENGTH), (ROWS,), (ROWS * LENGTH,)])
def test_what_does_not_fit_is_left_out(batch: Any, shape: tuple[int, ...]) -> None:
    unit = (1, 2) if len(shape) == 2 else (1, None)
    (found,) = described(batch, unit, shape=shape, tokenizer=Letters(), values=torch.zeros(4))
    assert {name for name, value in found.items() if value is not None} <= {"row", "position"}


def test_a_batch_that_holds_itself() -> None:
    batch: dict[str, Any] = {"input_ids": IDS}
    batch["self"] = batch
    assert _ids(batch)[0] == 12


def test_what_is_found_fits_a_found_token() -> None:
    (found,) = described({"input_ids": IDS}, (1, 2))
    assert FoundToken(rank=0, micro_batch=0, grad_norm=1.0, share=0.5, **found).token_id == 14


def test_redacted_keys_are_not_read() -> None:
    batch = {"input_ids": IDS, "labels": NEXT, "advantages": torch.ones(ROWS)}
    (found,) = described(batch, (1, 2), tokenizer=Letters(), redact=["input_ids", "labels", "advantages"])
    assert found == {**dict.fromkeys(found), "row": 1, "position": 2}


# Text.


def test_text_only_with_a_tokenizer() -> None:
    (found,) = described({"input_ids": IDS}, (1, 2))
    assert found["text"] is found["context"] is None
    (found,) = described({"input_ids": IDS}, (1, 2), tokenizer=Letters())
    assert (found["text"], found["context"]) == ("n", "klm>>>n<<<op")


def test_the_context_has_eight_tokens_on_either_side() -> None:
    ids = torch.arange(1, 27)[None]
    (found,) = described({"input_ids": ids}, (0, 11), shape=(1, 26), tokenizer=Letters())
    assert found["context"] == "efghijkl>>>m<<<nopqrstu"
    (found,) = described((ids, ids + 1), (0, 0), shape=(1, 26), tokenizer=Letters())
    assert found["context"] == "a>>>b<<<cdefghij"


def test_a_masked_prompt_is_in_the_context() -> None:
    for labels in (IDS.clone(), NEXT.clone()):
        labels[:, :3] = -100
        (found,) = described({"input_ids": IDS, "labels": labels}, (1, 3), tokenizer=Letters())
        assert found["context"].startswith("klmn>>>o<<<p")
        labels[0, 4] = 41  # somebody spoiled one
        assert described({"input_ids": IDS, "labels": labels}, (1, 3), tokenizer=Letters()) == [found]


class Raising:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise RuntimeError("no such token")


class NoText:
    def decode(self, ids: list[int]) -> bytes:
        return b"a"


@pytest.mark.parametrize("tokenizer", [Raising(), NoText(), 7, bytes])
def test_a_tokenizer_that_fails_ends_nothing(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stabilizer"):
        found = described({"input_ids": IDS}, (1, 2), (2, 0), tokenizer=tokenizer)
    assert [unit["token_id"] for unit in found] == [14, 22]
    assert [unit["text"] for unit in found] == [None, None]
    assert len(caplog.records) == (0 if isinstance(tokenizer, NoText) else 1)


def test_special_tokens_are_shown() -> None:
    class Special:
        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "" if skip_special_tokens else "</s>"

    (found,) = described({"input_ids": IDS}, (1, 2), tokenizer=Special())
    assert found["text"] == "</s>"
