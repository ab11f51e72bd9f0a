"""What a verification has found out about one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from stabilizer.checkpoints.finiteness import Nonfinite
from stabilizer.checkpoints.guard_file import Expected
from stabilizer.names import clean_name

__all__ = ["Findings"]

_MAX_REASONS = 20


class Findings:
    """Collects reasons, and the shapes of the model's tensors.

    Args:
        expected: What the run knew; `None` for a checkpoint that nobody announced.

    Example:
        >>> findings = Findings(Expected())
        >>> findings.see_nonfinite("state_dict.weight", Nonfinite(1, 0, False), num_elements=6)
        >>> findings.reasons
        ['tensor state_dict.weight: 1 of 6 elements are not finite (1 NaN)']
    """

    def __init__(self, expected: Expected | None) -> None:
        self.expected = expected
        self.reasons: list[str] = []
        self.step = -1
        self.is_full = True
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        self._num_left_out = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing speaks against the checkpoint."""
        return not self.reasons

    def blame(self, reason: str) -> None:
        """Note what is wrong.

        Args:
            reason: One line.
        """
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(reason[:500])
        else:
            self._num_left_out += 1
            self.reasons[_MAX_REASONS:] = [f"and {self._num_left_out} more"]

    def see_shape(self, name: str, shape: Sequence[int]) -> None:
        """Note a tensor of the model.

        Args:
            name: As the model calls it, with or without prefixes of wrappers.
            shape: Of the whole tensor.
        """
        for known in _names(name):
            self._shapes.setdefault(known, set()).add(tuple(shape))

    def see_nonfinite(self, name: str, count: Nonfinite, *, num_elements: int, model_name: str | None = None) -> None:
        """Note a tensor that is not finite, unless it is one that never was.

        Args:
            name: For people.
            count: Of the elements.
            num_elements: Of the tensor.
            model_name: As the model calls it, if it is the model's.
        """
        if model_name is not None and self._may_be_infinite(_names(model_name), count):
            return
        kinds = [f"{number} {kind}" for number, kind in ((count.nan, "NaN"), (count.inf, "Inf")) if number]
        self.blame(
            f"tensor {name}: {count.nan + count.inf} of {num_elements} elements are not finite ({', '.join(kinds)})"
        )

    def compare(self) -> None:
        """Hold the shapes that were seen against the model's."""
        weights = () if self.expected is None else self.expected.weights
        known = [weight for weight in weights if any(name in self._shapes for name in weight.names)]
        if not known:
            return  # a hook of the model's own saves under other names
        for weight in weights:
            found = set().union(*(self._shapes.get(name, set()) for name in weight.names))
            if not found and weight.required:
                self.blame(f"parameter {weight.names[0]} of shape {list(weight.shape)} is missing")
            elif found and weight.shape not in found:
                self.blame(
                    f"parameter {weight.names[0]} has shape {list(min(found))}, the model's has {list(weight.shape)}"
                )

    def _may_be_infinite(self, names: set[str], count: Nonfinite) -> bool:
        if self.expected is None:
            return count.is_mask
        if names & set(self.expected.nonfinite):
            return True
        return count.is_mask and not any(names & set(weight.names) for weight in self.expected.weights)


def _names(name: str) -> set[str]:
    """A name without what wrappers add. DDP's `module` may be the model's own: both are kept."""
    cleaned = clean_name(name)
    return {cleaned, cleaned.removeprefix("module.")}
