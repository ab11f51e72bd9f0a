"""A model's buffers, copied where they move, so that they can be put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stabilizer.late import HostCopy
from stabilizer.localize.state import distinct
from stabilizer.names import clean_name

__all__ = ["Buffers", "SavedBuffer", "version_of"]

#: Up to this size a buffer is copied before anything is known of it; larger ones (quantised weights) once they move.
_SMALL = 1 << 20


@dataclasses.dataclass(eq=False, slots=True)
class SavedBuffer:
    """One buffer as it was before a micro-batch.

    Attributes:
        name: Clean, dotted.
        module: That it is registered on.
        key: Its name there.
        tensor: The buffer itself; `None` where the module had none under this name.
        version: Its count of changes; -1 where it has none.
        value: A copy (flat, unless it is of a class of its own); `None` while it is a constant too large to copy.
    """

    name: str
    module: nn.Module
    key: str
    tensor: Tensor | None
    version: int
    value: Tensor | None

    @property
    def is_lost(self) -> bool:
        """Whether its value is gone: it has changed for the first time, and was too large to copy until then."""
        tensor = self.tensor
        if tensor is None or self.value is not None:
            return False
        return self.module._buffers.get(self.key) is not tensor or version_of(tensor) != self.version

    def put_back(self) -> None:
        """Make the buffer what it was."""
        current = self.module._buffers.get(self.key)
        if self.tensor is None:
            self.module._buffers[self.key] = None
        elif self.value is not None:
            value = self.value if self.value.shape == self.tensor.shape else self.value.view(self.tensor.shape)
            if current is not self.tensor:
                self.module._buffers[self.key] = value.clone()
            else:
                with torch.inference_mode(current.is_inference()):
                    distinct(current).copy_(distinct(value, like=current))


class Buffers:
    """The model's buffers, copied where they move."""

    def __init__(self, model: nn.Module) -> None:
        # All modules: a buffer may be registered late.
        self._modules = [(clean_name(name), module, dict[str, SavedBuffer]()) for name, module in model.named_modules()]
        self._num_saved = 0
        # Buffers that change although their count does not, by name, and, until it is known, those that may.
        self._unseen: set[str] = set()
        self._asked: set[str] = set()
        self._answers: list[tuple[list[str], HostCopy]] = []

    def save(self, *, trusts_counts: bool = True) -> list[SavedBuffer]:
        """All buffers, as they are; those that have no more changes than before are only copied again in doubt."""
        self._look_at_answers()
        saved: list[SavedBuffer] = []
        moved: list[tuple[SavedBuffer, Tensor]] = []
        unmoved: list[SavedBuffer] = []
        # After 1, 2, 4, 8 ... micro-batches, unless the last answer is still on its way.
        is_asking = self._num_saved.bit_count() == 1 and not self._answers
        for path, module, last in self._modules:
            is_norm = isinstance(module, _NormBase) and module.training
            for key, tensor in module._buffers.items():
                known = last.get(key)
                version = -1 if tensor is None else version_of(tensor)
                is_moved = known is None or known.tensor is not tensor or known.version != version or version < 0
                if known is not None and not is_moved:
                    unmoved.append(known)
                    # One that moves unseen may have done so since the last time.
                    is_doubtful = is_asking or is_norm or known.name in self._unseen or not trusts_counts
                    if known.value is None or not is_doubtful:
                        saved.append(known)
                        continue
                name = known.name if known is not None else f"{path}.{key}" if path else key
                last[key] = one = SavedBuffer(name, module, key, tensor, version, None)
                saved.append(one)
                if tensor is not None and not is_lazy(tensor) and (known is not None or _num_bytes(tensor) <= _SMALL):
                    moved.append((one, tensor))
        for (one, _), value in zip(moved, _copies([tensor for _, tensor in moved]), strict=True):
            one.value = value
        if is_asking:
            self._compare(unmoved)
        self._num_saved += 1
        return saved

    def _compare(self, unmoved: Sequence[SavedBuffer]) -> None:
        """Ask which buffers hold other values although their count has not moved; nobody waits for the answer."""
        groups: dict[torch.device, dict[str, Tensor]] = {}
        for one in unmoved:
            if one.value is not None and one.tensor is not None and _is_plain(one.tensor):
                is_other = (one.tensor.detach().reshape(-1) != one.value).any()
                groups.setdefault(one.tensor.device, {})[one.name] = is_other
        self._answers = [(list(group), HostCopy(torch.stack(list(group.values())))) for group in groups.values()]
        self._asked = {name for names, _ in self._answers for name in names} - self._unseen
        self._unseen |= self._asked

    def _look_at_answers(self) -> None:
        if self._answers and all(answer.is_ready for _, answer in self._answers):
            for names, answer in self._answers:
                still = {name for name, is_other in zip(names, answer.read().tolist(), strict=True) if not is_other}
                # One that was seen to move once stays under suspicion.
                self._unseen -= still & self._asked
            self._answers = []


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, plain tensors flat: a few operations in all, since a network may have hundreds of running means."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    copies: dict[int, Tensor] = {}
    for number, tensor in enumerate(tensors):
        if _is_plain(tensor):
            groups.setdefault((tensor.device, tensor.dtype), []).append(number)
        else:
            copies[number] = tensor.detach().clone()
    for numbers in groups.values():
        flat = [tensors[number].detach().reshape(-1) for number in numbers]
        pieces = torch.cat(flat).split([one.numel() for one in flat])
        copies |= dict(zip(numbers, pieces, strict=True))
    return [copies[number] for number in range(len(tensors))]


def _is_plain(tensor: Tensor) -> bool:
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    return not is_wrapper and tensor.layout == torch.strided and not tensor.is_quantized


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where nobody counts.

    Args:
        tensor: Any.
    """
    # Tensors of inference mode have no count, lazy ones nothing at all.
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
