"""Thresholds of named layers: one rule for all, others for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.errors import warn
from stabilizer.names import matching
from stabilizer.thresholds.arguments import check_number
from stabilizer.thresholds.making import RuleSpec, make_rule
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["LayerThresholds"]


class LayerThresholds:
    r"""One threshold a layer, each from the first rule whose pattern fits its name.

    Args:
        names: Of the layers, in the order of the norms.
        rule: For layers that no pattern fits.
        rules: Layer name, or regular expression that matches a whole name -> rule. The first that fits counts.
        min_norm: No threshold is smaller: a layer's norm below it is never clipped.
        warmup_cap: The threshold of layers that have none yet; `None` leaves these alone.
        max_threshold: No threshold is larger.
        device: Where the norms are.

    Raises:
        ValueError: If a rule is none, a number out of range, or a pattern fits no layer.

    Example:
        >>> thresholds = LayerThresholds(
        ...     ["embed", "layers.0", "layers.1"],
        ...     rule={"name": "fixed", "threshold": 1.0},
        ...     rules={r"layers\..*": {"name": "mean_multiple", "warmup_steps": 1}},
        ...     warmup_cap=0.5,
        ...     device="cpu",
        ... )
        >>> norms = torch.tensor([0.2, 0.2, 0.4])
        >>> thresholds.thresholds(norms, step=0)
        tensor([1.0000, 0.5000, 0.5000])
        >>> thresholds.update(norms)
        >>> thresholds.thresholds(norms, step=1)
        tensor([1., 1., 2.])
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rule: RuleSpec,
        rules: Mapping[str, RuleSpec] | None = None,
        min_norm: float = 0.0,
        warmup_cap: float | None = None,
        max_threshold: float | None = None,
        device: torch.device | str,
    ) -> None:
        self.names = tuple(names)
        self.min_norm = check_number("min_norm", min_norm, low=0)
        self.warmup_cap = None if warmup_cap is None else check_number("warmup_cap", warmup_cap, above=0)
        self.max_threshold = None if max_threshold is None else check_number("max_threshold", max_threshold, above=0)
        if self.max_threshold is not None and self.min_norm > self.max_threshold:
            raise ValueError(f"min_norm={min_norm!r}: expected at most max_threshold, which is {max_threshold!r}")
        self.device = torch.device(device)
        self.parts = [(make_rule(spec), found) for spec, found in _assigned(self.names, rule, rules or {})]
        for part, found in self.parts:
            part.start(len(found), device=self.device)
        order = [position for _, found in self.parts for position in found]
        # One rule for all layers needs no index.
        self._indices = None
        if order != list(range(len(order))) or len(self.parts) > 1:
            self._indices = [self._index(found) for _, found in self.parts]
        self._inverse = self._index(sorted(range(len(order)), key=order.__getitem__))

    def thresholds(self, norms: Tensor, *, step: int) -> Tensor:
        """What each norm of this step is held against, and clipped to if it is larger. Changes nothing.

        Args:
            norms: Of this step, shape (layers,), float32.
            step: Its number, for schedules.

        Returns:
            Shape (layers,), float32; infinity where there is no threshold.
        """
        found = []
        for (rule, _), part in zip(self.parts, self._split(norms), strict=True):
            rule.step = step
            found.append(rule.thresholds(part))
        result = self._joined(found)
        if self.warmup_cap is not None:
            result = torch.where(self.is_warm, result, self.warmup_cap)
        if self.min_norm or self.max_threshold is not None:
            result = result.clamp(min=self.min_norm, max=self.max_threshold)
        return result

    def update(self, norms: Tensor, *, valid: Tensor | None = None, outliers: Tensor | None = None) -> None:
        """The step has happened: its norms enter.

        Args:
            norms: The same that `thresholds` was given, shape (layers,).
            valid: Whether they may enter at all, bool, shape () or (layers,); default all that are finite and not 0.
            outliers: Spikes of a step that was skipped for them, shape (layers,), bool: only rules that keep such norms
                apart from their history take them.
        """
        valids = self._by_part(valid)
        extras = self._by_part(outliers)
        for (rule, _), part, may_enter, is_outlier in zip(self.parts, self._split(norms), valids, extras, strict=True):
            if may_enter is not None and is_outlier is not None and rule.keeps_outliers_apart:
                may_enter = may_enter | is_outlier
            rule.update(part, valid=may_enter)

    @property
    def typical(self) -> Tensor:
        """A usual norm of each layer, shape (layers,), float32; NaN where it is not known."""
        return self._joined([rule.typical for rule, _ in self.parts])

    @property
    def is_warm(self) -> Tensor:
        """Whose rule has seen enough norms, shape (layers,), bool."""
        return self._joined([rule.is_warm for rule, _ in self.parts])

    @property
    def num_accepted(self) -> Tensor:
        """How many norms have entered, shape (layers,), int64."""
        return self._joined([rule.num_accepted for rule, _ in self.parts])

    def describe(self) -> str:
        """The rules, with how many layers each has if there are several."""
        if len(self.parts) == 1:
            return self.parts[0][0].describe()
        return ", ".join(f"{rule.describe()} for {len(found)} layers" for rule, found in self.parts)

    def state_dict(self) -> dict[str, Any]:
        """Names of the layers, and of each rule its description, positions and state; plain types and CPU tensors."""
        rules = [
            {
                "describe": rule.describe(),
                "warmup_steps": rule.warmup_steps,
                "positions": list(found),
                "state": rule.state_dict(),
            }
            for rule, found in self.parts
        ]
        return {"layers": list(self.names), "rules": rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, layer by layer: layers that are gone are dropped, new ones start cold.

        A layer whose rule is another one now, or remembers another number of norms, starts cold too; one warning names
        them.

        Args:
            state: What `state_dict` gave; not changed.
        """
        sources = {
            state["layers"][position]: (saved, column)
            for saved in state["rules"]
            for column, position in enumerate(saved["positions"])
        }
        misfits: list[str] = []
        for rule, found in self.parts:
            # Cold on the CPU: what this rule would be if it had never seen a norm.
            cold = make_rule(rule)
            cold.start(len(found), device="cpu")
            target = cold.state_dict()
            for column, position in enumerate(found):
                saved, source = sources.get(self.names[position], (None, 0))
                if saved is None:
                    continue
                if not _fits(saved, rule, target):
                    misfits.append(self.names[position])
                    continue
                for name, value in target.items():
                    value[..., column] = saved["state"][name][..., source]
            rule.load_state_dict(target)
        if misfits:
            more = f" and {len(misfits) - 5} more" if len(misfits) > 5 else ""
            warn(
                f"the saved thresholds of {', '.join(misfits[:5])}{more} were made by another rule than "
                f"{self.describe()}: these layers start with a new warm-up"
            )

    def _index(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor(positions, dtype=torch.int64).to(self.device, non_blocking=True)

    def _by_part(self, flags: Tensor | None) -> Sequence[Tensor | None]:
        if flags is None or not flags.ndim:
            return [flags] * len(self.parts)
        return self._split(flags)

    def _split(self, vector: Tensor) -> list[Tensor]:
        if self._indices is None:
            return [vector]
        return [vector.index_select(0, index) for index in self._indices]

    def _joined(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[0] if self._indices is None else torch.cat(list(vectors)).index_select(0, self._inverse)


def _assigned(names: Sequence[str], rule: RuleSpec, rules: Mapping[str, RuleSpec]) -> list[tuple[RuleSpec, list[int]]]:
    """Each rule with the positions of its layers; the default last, if any layer is left to it."""
    left = set(range(len(names)))
    result: list[tuple[RuleSpec, list[int]]] = []
    for pattern, spec in rules.items():
        if not isinstance(pattern, str):
            raise ValueError(f"rules: {pattern!r} is no pattern: expected a layer name or a regular expression")
        found = [names.index(name) for name in matching(names, pattern, argument="rules")]
        mine = sorted(left.intersection(found))
        left.difference_update(mine)
        result.append((spec, mine))
    result.append((rule, sorted(left)))
    return [(spec, found) for spec, found in result if found]


def _fits(saved: Mapping[str, Any], rule: ThresholdRule, target: Mapping[str, Tensor]) -> bool:
    """Whether a saved state is one of this kind of rule: the same name and warm-up, the same tensors, each as long."""
    if saved["describe"].partition("(")[0] != rule.describe().partition("(")[0]:
        return False
    # What is remembered in a warm-up may be something else than afterwards.
    if saved.get("warmup_steps", rule.warmup_steps) != rule.warmup_steps:
        return False
    shapes = {name: tuple(value.shape[:-1]) for name, value in saved["state"].items()}
    return shapes == {name: tuple(value.shape[:-1]) for name, value in target.items()}
