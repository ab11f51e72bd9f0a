"""The autocast that a forward pass has begun in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

__all__ = ["AutocastState"]


@dataclasses.dataclass(frozen=True)
class AutocastState:
    """Of the CPU and of one other kind of device.

    Attributes:
        kinds: Kind of device, whether it is on, and its type.
        is_cached: Whether casts of weights are kept.
    """

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    is_cached: bool

    @classmethod
    def capture(cls, device: torch.device) -> AutocastState:
        """What holds now.

        Args:
            device: Of the model.
        """
        kinds = [kind for kind in dict.fromkeys(["cpu", device.type]) if torch.amp.is_autocast_available(kind)]
        found = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(tuple(found), torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Put it back for good, and forget casts of weights that were made meanwhile."""
        for kind, is_on, dtype in self.kinds:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.is_cached)
        # They belong to the graph of whoever has cast them.
        torch.clear_autocast_cache()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same for a block of code."""
        with contextlib.ExitStack() as stack:
            for kind, is_on, dtype in self.kinds:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=self.is_cached))
            yield
