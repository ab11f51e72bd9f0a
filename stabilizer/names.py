"""Names of parameters and layers: pure functions on strings.

A layer is a group of parameters with one name. The names come from the model alone, never from what wraps it, so that
the same model has the same layers on one device, under DDP, FSDP, `torch.compile` and activation checkpointing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

__all__ = ["Granularity", "clean_name", "layer_names", "matching", "select_layers"]

Granularity: TypeAlias = Literal["block", "module", "parameter"] | Mapping[str, str]

# Attribute names that only wrappers use. DDP's `module` is a name a model may use too, so it is not in this list:
# it is removed by prefix, where the wrapper itself is known (parameters.py).
_WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Remove what wrappers add to a parameter's name.

    Args:
        name: A dotted name as `named_parameters()` of a wrapped model gives it.

    Returns:
        The name that the unwrapped model gives the same parameter.

    Example:
        >>> clean_name("_forward_module.layers.0._checkpoint_wrapped_module._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_names(names: Sequence[str], granularity: Granularity = "block") -> list[str]:
    r"""Find the layer of every parameter.

    Args:
        names: Clean parameter names, in the model's order.
        granularity: `"block"`: each element of a repeated block container is a layer (`model.layers.3`), and so is each
            top-level module beside it (`model.embed_tokens`, `lm_head`). `"module"`: the module that owns the
            parameter. `"parameter"`: every parameter for itself. A mapping of regular expression to layer name: the
            first expression found in the parameter's name gives its layer (`\1` stands for a group of the match);
            parameters that none matches keep their block.

    Returns:
        One layer name per parameter.

    Raises:
        ValueError: If `granularity` is none of these, or an expression is none.

    Example:
        >>> layer_names(["model.embed.weight", "model.layers.0.fc.weight", "model.layers.1.fc.weight", "head.weight"])
        ['model.embed', 'model.layers.0', 'model.layers.1', 'head']
        >>> layer_names(["layers.0.attn.q", "layers.0.mlp.up"], {r"layers\.(\d+)\.attn": r"attn.\1"})
        ['attn.0', 'layers.0']
    """
    if isinstance(granularity, Mapping):
        patterns = [(_compiled(pattern), layer) for pattern, layer in granularity.items()]
        blocks = layer_names(names, "block")
        return [_mapped(name, block, patterns) for name, block in zip(names, blocks, strict=True)]
    if granularity == "parameter":
        return list(names)
    if granularity == "module":
        return [name.rpartition(".")[0] or name for name in names]
    if granularity != "block":
        raise ValueError(
            f'granularity={granularity!r}: expected "block", "module", "parameter" or a mapping of regular expression '
            "-> layer name"
        )
    containers = _block_containers(names)
    stems = _stems(names, containers)
    return [_block_of(name, containers, stems) for name in names]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"granularity: {pattern!r} is no regular expression ({error})") from None


def _mapped(name: str, block: str, patterns: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, layer in patterns:
        if match := pattern.search(name):
            return match.expand(layer)
    return block


def _block_containers(names: Sequence[str]) -> frozenset[str]:
    """Dotted paths whose children are numbered; the outermost only (experts inside a block belong to the block)."""
    containers = set()
    for name in names:
        parts = name.split(".")
        depth = next((depth for depth, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if depth is not None:
            containers.add(".".join(parts[:depth]))
    return frozenset(containers)


def _stems(names: Sequence[str], containers: frozenset[str]) -> frozenset[str]:
    """Paths that are no layer of their own but hold layers.

    These are the ancestors of block containers, and modules that are the only child of such a path (`model` in a
    LightningModule whose one attribute is the network).
    """
    stems = {""}
    for container in containers:
        parts = container.split(".")
        stems.update(".".join(parts[:depth]) for depth in range(len(parts)))
    path = ""
    while not containers:
        heads = {name[len(path) :].lstrip(".").split(".")[0] for name in names}
        if len(heads) != 1:
            break
        path = f"{path}.{heads.pop()}".lstrip(".")
        # A module with parameters of its own is a layer; so is one that has nothing but parameters.
        if any(name[len(path) + 1 :].count(".") == 0 for name in names):
            break
        stems.add(path)
    return frozenset(stems)


def _block_of(name: str, containers: frozenset[str], stems: frozenset[str]) -> str:
    parts = name.split(".")
    for depth in range(len(parts)):
        path = ".".join(parts[:depth])
        if path in containers:
            return ".".join(parts[: depth + 1]) if parts[depth].isdigit() else path or name
        if path not in stems:
            return path
    return name


def select_layers(
    names: Sequence[str], layers: Sequence[int | str] | None = None, exclude: Sequence[str] = ()
) -> list[int]:
    r"""Positions of the layers that a user asked for.

    Args:
        names: All layer names, in order.
        layers: What to keep: block numbers (of the container with most blocks; `"vision.blocks:0"` names another one;
            negative numbers count from the end; of a finer granularity, all layers of the block), exact names, or
            regular expressions that match a whole name. `None` keeps all.
        exclude: What to drop afterwards: exact names or regular expressions.

    Returns:
        Positions in `names`, ascending.

    Raises:
        ValueError: If an item matches nothing; the message gives the count of blocks or the closest names.

    Example:
        >>> select_layers(["embed", "layers.0", "layers.1", "head"], layers=[-1, "head"])
        [2, 3]
        >>> select_layers(["embed", "layers.0", "layers.1", "head"], exclude=[r"layers\..*"])
        [0, 3]
    """
    chosen = set(range(len(names)))
    if layers is not None:
        chosen = {position for item in layers for position in _matches(names, item, "layers")}
    for item in exclude:
        chosen -= set(_matches(names, item, "exclude"))
    if not chosen:
        raise ValueError(f"layers={layers!r}, exclude={list(exclude)!r} leave none of the {len(names)} layers")
    return sorted(chosen)


def matching(names: Sequence[str], pattern: str, *, argument: str = "") -> list[str]:
    r"""Layers that a pattern means.

    Args:
        names: All layer names.
        pattern: An exact name, or a regular expression that matches a whole name.
        argument: Of the user's, to complain of if there is none.

    Returns:
        Names, in order; none only without `argument`.

    Raises:
        ValueError: If there is none.

    Example:
        >>> matching(["embed", "layers.0", "layers.1"], r"layers\..*")
        ['layers.0', 'layers.1']
    """
    try:
        return [names[position] for position in _matches(names, pattern, argument)]
    except ValueError:
        if argument:
            raise
        return []


def _matches(names: Sequence[str], item: int | str, argument: str) -> list[int]:
    if isinstance(item, int):
        return _numbered_block(names, None, item, argument)
    if item in names:
        return [names.index(item)]
    container, colon, number = item.rpartition(":")
    if colon and number.lstrip("-").isdigit():
        return _numbered_block(names, container, int(number), argument)
    try:
        found = [position for position, name in enumerate(names) if re.fullmatch(item, name)]
    except re.error as error:
        raise ValueError(f"{argument}={item!r} is no layer name and no regular expression ({error})") from None
    if not found:
        close = difflib.get_close_matches(item, names, n=3, cutoff=0.3) or list(names[:3])
        raise ValueError(f"{argument}={item!r} matches none of the {len(names)} layers; the closest: {close}")
    return found


def _blocks(names: Sequence[str]) -> dict[str, dict[int, list[int]]]:
    """Container -> block number -> positions of the layers in that block (several, if layers are parts of blocks)."""
    blocks: dict[str, dict[int, list[int]]] = {}
    for position, name in enumerate(names):
        parts = name.split(".")
        depth = next((depth for depth, part in enumerate(parts) if part.isdigit()), None)
        if depth is not None:
            numbers = blocks.setdefault(".".join(parts[:depth]), {})
            numbers.setdefault(int(parts[depth]), []).append(position)
    return blocks


def _numbered_block(names: Sequence[str], container: str | None, number: int, argument: str) -> list[int]:
    blocks = _blocks(names)
    if not blocks:
        raise ValueError(
            f"{argument}={number}: a number means a repeated block, and there is none among the layers "
            f"{list(names[:5])}; give names"
        )
    if container is None:
        container = max(blocks, key=lambda candidate: len(blocks[candidate]))
    if container not in blocks:
        raise ValueError(f"{argument}: there are no blocks in {container!r}; containers: {sorted(blocks)}")
    numbers = blocks[container]
    wanted = number if number >= 0 else max(numbers) + 1 + number
    if wanted not in numbers:
        raise ValueError(
            f"{argument}={number} is out of range: {container or 'the model'} has {len(numbers)} blocks "
            f"({min(numbers)} to {max(numbers)})"
        )
    return numbers[wanted]
