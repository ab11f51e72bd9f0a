"""Names of layers: what counts as a block, what wrappers may not change, and how layers are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from stabilizer.names import clean_name, layer_names, select_layers

LLAMA = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "model.norm", "lm_head"]


def _parameters(*layers: str) -> list[str]:
    return [f"{layer}.{part}.weight" for layer in layers for part in ("first", "second")]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (_parameters(*LLAMA), LLAMA),
        (["fc1.weight", "fc1.bias", "fc2.weight"], ["fc1", "fc2"]),
        # A LightningModule whose only attribute is the network.
        (["model.fc1.weight", "model.fc1.bias", "model.fc2.weight"], ["model.fc1", "model.fc2"]),
        (["model.net.layer.weight", "model.net.layer.bias"], ["model.net.layer"]),
        (["layer.weight", "layer.bias"], ["layer"]),
        (["weight", "bias"], ["weight", "bias"]),
        (["0.weight", "0.bias", "2.weight"], ["0", "2"]),
        (["model.layers.0.w.weight", "model.head.weight"], ["model.layers.0", "model.head"]),
        # Experts belong to their block; blocks of two towers do not mix; a parameter beside them is its own layer.
        (["m.layers.0.experts.0.w", "m.layers.0.experts.1.w", "m.layers.1.experts.0.w"], ["m.layers.0", "m.layers.1"]),
        (
            ["v.blocks.0.w", "v.blocks.1.w", "t.layers.0.w", "t.scale"],
            ["v.blocks.0", "v.blocks.1", "t.layers.0", "t.scale"],
        ),
        (["layers.w", "layers.0.w", "layers.1.w"], ["layers", "layers.0", "layers.1"]),
        ([], []),
    ],
)
def test_blocks(names: list[str], expected: list[str]) -> None:
    assert list(dict.fromkeys(layer_names(names))) == expected


def test_other_granularities() -> None:
    names = ["layers.0.attn.q.weight", "layers.0.attn.q.bias", "layers.1.mlp.up.weight", "scale"]
    assert layer_names(names, "parameter") == names
    assert layer_names(names, "module") == ["layers.0.attn.q", "layers.0.attn.q", "layers.1.mlp.up", "scale"]
    mapped = layer_names(names, {r"\.attn\.": "attention", r"layers\.(\d+)": r"rest.\1"})
    assert mapped == ["attention", "attention", "rest.1", "scale"]


@pytest.mark.parametrize(
    "wrapper", ["_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"]
)
def test_wrappers_never_show(wrapper: str) -> None:
    assert clean_name(f"{wrapper}.layers.0.{wrapper}.fc.weight") == "layers.0.fc.weight"
    assert clean_name("module.fc.weight") == "module.fc.weight", "a model may have an attribute of this name"


@pytest.mark.parametrize(
    ("layers", "exclude", "expected"),
    [
        (None, [], LLAMA),
        ([0, 3], [], ["model.layers.0", "model.layers.3"]),
        ([-1, -4], [], ["model.layers.0", "model.layers.3"]),
        (["lm_head", "model.embed_tokens"], [], ["model.embed_tokens", "lm_head"]),
        ([r"model\.layers\..*"], ["model.layers.2"], ["model.layers.0", "model.layers.1", "model.layers.3"]),
        (["model.layers:1"], [], ["model.layers.1"]),
        (None, [r".*norm", 0], [name for name in LLAMA if name not in ("model.norm", "model.layers.0")]),
    ],
)
def test_selection(layers: Any, exclude: Any, expected: list[str]) -> None:
    assert [LLAMA[position] for position in select_layers(LLAMA, layers, exclude)] == expected


def test_a_number_means_the_largest_container_and_all_of_a_block() -> None:
    names = ["v.blocks.0", "v.blocks.1", *(f"t.layers.{n}.{part}" for n in range(3) for part in ("attn", "mlp"))]
    assert [names[position] for position in select_layers(names, [2])] == ["t.layers.2.attn", "t.layers.2.mlp"]
    assert [names[position] for position in select_layers(names, ["v.blocks:-1"])] == ["v.blocks.1"]


@pytest.mark.parametrize(
    ("layers", "exclude", "message"),
    [
        ([4], [], r"layers=4 is out of range: model.layers has 4 blocks \(0 to 3\)"),
        ([-5], [], "layers=-5 is out of range"),
        (
            ["model.layer.1"],
            [],
            r"layers='model.layer.1' matches none of the 7 layers; the closest: \['model.layers.1'",
        ),
        (["*.norm"], [], "no layer name and no regular expression"),
        (["vision.blocks:0"], [], r"no blocks in 'vision.blocks'; containers: \['model.layers'\]"),
        (None, ["nothing"], "exclude='nothing' matches none"),
        (None, [".*"], "leave none of the 7 layers"),
    ],
)
def test_a_selection_that_means_nothing_is_an_error(layers: Any, exclude: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_layers(LLAMA, layers, exclude)


def test_a_number_without_blocks_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"a number means a repeated block, and there is none among the layers \['fc'\]"
    ):
        select_layers(["fc"], [0])
