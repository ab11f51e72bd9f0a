"""Where a layer's parameters hang in a model, by whatever name one calls it."""

from __future__ import annotations

import dataclasses
import difflib
import random

from torch import nn

from stabilizer.names import layer_names, select_layers
from stabilizer.parameters import named_parameters

__all__ = ["ParameterPlace", "places_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterPlace:
    """A parameter, as an attribute of the module that uses it: what is there changes while the model runs.

    Attributes:
        module: Whose attribute it is.
        attribute: Which.
        name: Of the parameter, clean.
    """

    module: nn.Module
    attribute: str
    name: str


def places_of(model: nn.Module, layer: str | int | None, *, draw: random.Random) -> list[ParameterPlace]:
    """The trainable parameters of a layer.

    Args:
        model: As it trains, wrapped, between two steps.
        layer: A layer, a module or a parameter by its clean name, or the number of a block; `None` for a layer that is
            drawn.
        draw: Draws it.

    Raises:
        ValueError: If there is none; names the closest.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> [place.name for place in places_of(model, "0", draw=random.Random(0))]
        ['0.weight', '0.bias']
    """
    named = [(parameter, name) for parameter, name in named_parameters(model) if parameter.requires_grad]
    names = [name for _, name in named]
    if not names:
        raise ValueError("the model has no trainable parameter")
    chosen = set(_chosen(names, layer, draw=draw))
    known = {id(parameter): name for parameter, name in named if name in chosen}
    return [
        ParameterPlace(module, attribute, known[id(parameter)])
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in known
    ]


def _chosen(names: list[str], layer: str | int | None, *, draw: random.Random) -> list[str]:
    blocks = layer_names(names, "block")
    if layer is None:
        layer = draw.choice(list(dict.fromkeys(blocks)))
    if isinstance(layer, int):
        unique = list(dict.fromkeys(blocks))
        wanted = {unique[position] for position in select_layers(unique, [layer])}
        return [name for name, block in zip(names, blocks, strict=True) if block in wanted]
    known = dict.fromkeys(blocks)
    for granularity in ("block", "module", "parameter"):
        layers = layer_names(names, granularity)
        known.update(dict.fromkeys(layers))
        found = [name for name, own in zip(names, layers, strict=True) if own == layer]
        if found:
            return found
    found = [name for name in names if name.startswith(f"{layer}.")]
    if found:
        return found
    close = difflib.get_close_matches(layer, known, n=3, cutoff=0.3) or list(known)[:3]
    raise ValueError(f"layer={layer!r} is no layer, module or parameter that trains; the closest: {close}")
