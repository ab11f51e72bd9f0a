"""Faults: what a description may hold, what each does to a tensor, and where layers are found."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.faults import KINDS, Fault, parse_faults
from stabilizer.faults.changes import corrupt_, flip_bit_, of_token, with_element, with_flipped_bit
from stabilizer.faults.places import places_of
from tests.models import make_transformer

WRONG: list[tuple[Any, str]] = [
    ({"kind": "nan_gradient"}, "faults[0]: there is no step"),
    ({"step": 3}, "faults[0]: there is no kind"),
    ({"kind": "nan_grad", "step": 3}, "kind='nan_grad': allowed are nan_gradient, .*; the closest is nan_gradient"),
    ({"kind": ["nan_gradient"], "step": 3}, "kind="),
    ({"kind": "nan_gradient", "step": -1}, "step=-1: expected a whole number of at least 0"),
    ({"kind": "nan_gradient", "step": True}, "step=True"),
    ({"kind": "nan_gradient", "step": 1.5}, "step=1.5"),
    ({"kind": "nan_gradient", "step": 3, "rnak": 1}, "'rnak' is no field; known are .*; the closest is rank"),
    ({"kind": "nan_gradient", "step": 3, "rank": -1}, "rank=-1"),
    ({"kind": "nan_gradient", "step": 3, "micro_batch": "0"}, "micro_batch='0'"),
    ({"kind": "nan_gradient", "step": 3, "num_steps": 0}, "num_steps=0"),
    ({"kind": "nan_gradient", "step": 3, "factor": 2.0}, "factor=2.0: kind='nan_gradient' takes only rank"),
    ({"kind": "nan_gradient", "step": 3, "repeats": "differently"}, "repeats='differently': allowed are always, never"),
    ({"kind": "nan_gradient", "step": 3, "layer": 1.5}, "layer=1.5: expected a name"),
    ({"kind": "layer_spike", "step": 3, "factor": float("nan")}, "factor=nan: expected a number that is finite"),
    ({"kind": "layer_spike", "step": 3, "factor": "10"}, "factor='10'"),
    ({"kind": "token_loss", "step": 3, "token": [1, 2, 3]}, "expected a row, or a row and a position"),
    ({"kind": "token_loss", "step": 3, "token": "12"}, "expected a row"),
    ({"kind": "token_loss", "step": 3, "token": [-1, 0]}, "expected a row"),
    ({"kind": "bit_flip", "step": 3, "target": "loss"}, "target='loss': allowed are gradient, weight"),
    ({"kind": "bit_flip", "step": 3, "bit": -1}, "bit=-1"),
    ({"kind": "learning_rate_jump", "step": 3, "factor": 0}, "factor=0: expected a number above 0"),
    ({"kind": "learning_rate_jump", "step": 3, "rank": 1}, "takes only factor, num_steps"),
    ({"kind": "corrupted_batch", "step": 3, "repeats": "never"}, "takes only rank"),
    ({"kind": "dead_rank", "step": 3, "num_steps": 2}, "takes only rank, micro_batch"),
    ("nan_gradient", "'nan_gradient': expected a mapping"),
    (None, "None: expected a mapping"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_no_fault_is_one_clear_error(spec: Any, message: str) -> None:
    plain = message.replace("faults[0]", r"faults\[0\]")
    with pytest.raises(ValueError, match=r"^faults\[0\]: ") as caught:
        parse_faults([spec])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=plain):
        parse_faults([spec])


@pytest.mark.parametrize("specs", ["nan_gradient", {"kind": "nan_gradient", "step": 1}, 3, None])
def test_a_list_is_asked_for(specs: Any) -> None:
    with pytest.raises(ValueError, match="expected a list"):
        parse_faults(specs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_and_a_step_are_enough(kind: str) -> None:
    [fault] = parse_faults([{"kind": kind, "step": 7}])
    assert fault == Fault(kind, 7) == parse_faults([fault])[0]
    assert parse_faults([{**fault.as_dict()}]) == (fault,)
    assert f"kind={kind!r}" in str(fault)
    assert "step=7" in str(fault)
    assert fault.repeats == {"bit_flip": "never"}.get(
        kind, None if fault.is_everywhere or kind in ("dead_rank", "corrupted_batch") else "always"
    )
    assert [step for step in range(10) if fault.is_in(step)] == [7]


def test_a_field_that_is_not_finite_is_equal_to_itself_in_a_checkpoint() -> None:
    one, other = (Fault("corrupted_batch", 1, factor=float("nan")).as_dict() for _ in range(2))
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bit", [None, 0, 3])
def test_exactly_one_exponent_bit_of_one_element_is_flipped(dtype: torch.dtype, bit: int | None) -> None:
    values = torch.tensor([[0.0, 0.3], [-0.02, 1.1], [0.0, 0.7]]).to(dtype).t()  # not contiguous
    kept = values.clone()
    put_back = flip_bit_(values, bit=bit, draw=random.Random(3))
    [place] = (values != kept).nonzero().tolist()
    before, after = (float(tensor[tuple(place)]) for tensor in (kept, values))
    assert before != 0.0
    (mantissa_before, power_before), (mantissa, power) = math.frexp(before), math.frexp(after)
    assert mantissa == mantissa_before
    # An exponent bit multiplies by a power of two.
    if bit is None:
        assert power - power_before in {2**one for one in range(11)}
    else:
        assert abs(power - power_before) == 2**bit
    put_back()
    assert torch.equal(values, kept)


def test_a_flipped_bit_of_float32_is_that_of_the_standard() -> None:
    flipped = with_flipped_bit(torch.tensor([0.15625]), bit=7, draw=random.Random(0))
    [bits] = struct.unpack("<I", struct.pack("<f", 0.15625))
    [expected] = struct.unpack("<f", struct.pack("<I", bits ^ (1 << 30)))
    assert flipped.item() == expected


def test_bits_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bit=8: torch\.float32 has 8 exponent bits, 0 to 7"):
        flip_bit_(torch.ones(1), bit=8, draw=random.Random(0))
    with pytest.raises(ValueError, match=r"torch\.int64"):
        flip_bit_(torch.ones(1, dtype=torch.int64), bit=None, draw=random.Random(0))


def test_one_element_is_not_finite_and_the_gradient_itself_stays() -> None:
    gradient = torch.ones(3, 4)
    found = with_element(gradient, float("nan"), draw=random.Random(1))
    assert int(found.isnan().sum()) == 1
    assert torch.equal(gradient, torch.ones(3, 4))
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (3, 4), check_invariants=True).coalesce()
    assert int(with_element(sparse, float("inf"), draw=random.Random(1)).to_dense().isinf().sum()) == 1


def test_a_token_is_multiplied_and_no_other() -> None:
    gradient = torch.rand(2, 3, 4)
    found = of_token(gradient, (1, 2), 7.0, dims=2)
    assert found is not None
    expected = gradient.clone()
    expected[1, 2] = expected[1, 2] * 7.0
    assert torch.equal(found, expected)
    whole_row = of_token(gradient, (1, 2), 7.0, dims=1)
    assert whole_row is not None
    assert torch.equal(whole_row[1], gradient[1] * 7.0)
    assert of_token(gradient, (1, 3), 7.0, dims=2) is None


def test_a_corrupted_batch_keeps_masks_and_what_counts_for_nothing() -> None:
    batch: dict[str, Any] = {
        "ids": torch.arange(12).view(3, 4),
        "attention_mask": torch.ones(3, 4, dtype=torch.long),
        "labels": torch.tensor([[-100, 5, 6, 7]] * 3),
        "weights": torch.full((3, 4), 2.0),
        "flags": torch.ones(3, 4, dtype=torch.bool),
        "name": "text",
    }
    kept = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    changed = corrupt_(batch, factor=5.0, row=1, seed=0)
    assert {id(tensor) for tensor, _ in changed} == {id(batch[name]) for name in ("ids", "labels", "weights")}
    for name, before in kept.items():
        now = batch[name]
        assert torch.equal(now[[0, 2]], before[[0, 2]]), name
    weights, labels, ids = batch["weights"], batch["labels"], batch["ids"]
    assert torch.equal(weights[1], torch.full((4,), 10.0))
    assert labels[1, 0] == -100
    assert not torch.equal(ids[1], kept["ids"][1])
    assert int(ids.max()) <= 11
    for tensor, before in changed:
        tensor.copy_(before)
    assert all(torch.equal(batch[name], before) for name, before in kept.items())


def test_layers_are_found_by_whatever_name() -> None:
    model = make_transformer()

    def names(layer: str | int | None, seed: int = 0) -> list[str]:
        return [place.name for place in places_of(model, layer, draw=random.Random(seed))]

    block = [name for name, _ in model.named_parameters() if name.startswith("layers.1.")]
    assert names("layers.1") == names(1) == block
    assert set(names("layers.1.feed_forward")) == {name for name in block if "feed_forward." in name}
    assert names("layers.1.attention.q") == names("layers.1.attention.q.weight") == ["layers.1.attention.q.weight"]
    assert {names(None, seed)[0].split(".")[0] for seed in range(30)} == {"embed_tokens", "layers", "norm", "lm_head"}
    with pytest.raises(ValueError, match=r"layer='layers\.9' is no layer.*layers\."):
        names("layers.9")
    with pytest.raises(ValueError, match="4 blocks"):
        names(9)
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="layer='lm_head' is no layer, module or parameter that trains"):
        names("lm_head")
    with pytest.raises(ValueError, match="no trainable parameter"):
        places_of(nn.ReLU(), None, draw=random.Random(0))


def test_a_tied_parameter_is_found_with_both_owners() -> None:
    model = make_transformer(tied=True)
    places = places_of(model, "embed_tokens", draw=random.Random(0))
    assert [place.module for place in places] == [model.embed_tokens, model.lm_head]
    assert {place.name for place in places} == {"embed_tokens.weight"}
