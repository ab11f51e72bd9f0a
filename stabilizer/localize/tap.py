"""Tap: where the gate stands in a model that does not call `token_gate` by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from stabilizer.gate import Gate
from stabilizer.localize.taps import find_tap, tapped

__all__ = ["Tap"]


class Tap:
    """A module whose output is gated.

    It begins with the output embedding, or the module of that name. A loss that never calls it (a fused one reads the
    head's weight only) leaves the gate unused: then the final hidden state is gated, the output of the last block, and
    whatever stands between it and the loss is outside the search.

    Args:
        model: That is replayed.
        name: Of the module; `None` for the output embedding.
        blocks: Repeated blocks of the model, in their order.

    Attributes:
        name: Of what is gated, as one tells a user.
        note: What a reader of the result should know about it.

    Raises:
        ValueError: If there is no module of that name.
    """

    def __init__(self, model: nn.Module, name: str | None, *, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules: list[tuple[str, nn.Module]] = []
        chosen = find_tap(model, name)
        if chosen is not None:
            self._modules.append((name or "the output embedding", chosen))
        # Whoever names a module means that one.
        if name is None and blocks:
            self._modules.append((f"the output of {blocks[-1][0]}", blocks[-1][1]))
        self.note: str | None = None
        if chosen is None and self._modules:
            self.note = (
                f"the model has no output embedding, so that {self.name} is gated: gradients of what comes after it "
                "are outside the search (tap= names another module)"
            )

    @property
    def is_known(self) -> bool:
        """Whether there is any module to gate."""
        return bool(self._modules)

    @property
    def name(self) -> str:
        """Of what is gated, as one tells a user."""
        return self._modules[0][0] if self._modules else "nothing but token_gate"

    @contextlib.contextmanager
    def on(self, gate: Gate) -> Iterator[None]:
        """Gate one forward.

        Args:
            gate: That it is to pass.
        """
        with tapped(self._modules[0][1] if self._modules else None, gate):
            yield

    def fall_back(self) -> bool:
        """Gate something else: a forward has left the gate unused.

        Returns:
            Whether there is something else.
        """
        if len(self._modules) < 2:
            return False
        missed, _ = self._modules.pop(0)
        self.note = (
            f"{missed} was not called in the forward (a fused loss reads its weight only), so that {self.name} is "
            "gated: gradients of the LM head and of the final norm are outside the search"
        )
        return True
