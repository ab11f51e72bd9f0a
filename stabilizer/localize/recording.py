"""Recorder: what a micro-batch needs to be run again, kept at next to no cost while it runs the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.localize.autocast import AutocastState
from stabilizer.localize.buffers import Buffers, SavedBuffer, version_of
from stabilizer.localize.copying import copied, tensors_of
from stabilizer.localize.rng import RngState, is_generator, rewinder

__all__ = ["MicroBatch", "Recorder", "SavedBuffer"]


class MicroBatch:
    """A micro-batch as the step function was given it, and the state of the world then. Made by a `Recorder`.

    Attributes:
        index: In the step, from 0.
        args: Positional arguments of the step function: containers copied, tensors the same.
        kwargs: Keyword arguments, likewise.
        rng: Random states before it.
        buffers: The model's, before it.
        autocast: What the forward began in, where the host does not set it by itself.
        weight: How many tokens or samples its loss is a mean of, where the host says so.
    """

    def __init__(
        self,
        *,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: RngState,
        buffers: Sequence[SavedBuffer],
        rewinders: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.index = index
        memo: dict[int, Any] = {}
        self.args: tuple[Any, ...] = tuple(copied(value, memo=memo) for value in args)
        self.kwargs: dict[str, Any] = {key: copied(value, memo=memo) for key, value in kwargs.items()}
        self.rng, self.buffers, self._rewinders = rng, tuple(buffers), tuple(rewinders)
        self.weight: Tensor | float | None = None
        self.autocast: AutocastState | None = None
        self._versions = [(name, tensor, version_of(tensor)) for name, tensor in self._tensors()]

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments once more, in fresh containers: a step function may pop from its batch.

        Returns:
            Positional and keyword arguments.
        """
        memo: dict[int, Any] = {}
        args = tuple(copied(value, memo=memo) for value in self.args)
        return args, {key: copied(value, memo=memo) for key, value in self.kwargs.items()}

    def changed(self) -> list[str]:
        """What cannot be had again: tensors of the batch that were changed in place, and buffers that are lost.

        Returns:
            Names; of tensors of the batch: position or keyword, then keys and numbers.
        """
        names = [name for name, tensor, version in self._versions if version_of(tensor) != version]
        return names + [f"buffer {buffer.name}" for buffer in self.buffers if buffer.is_lost]

    @torch.no_grad()
    def restore(self) -> None:
        """Put random states and buffers back to before this micro-batch; for use inside a `Guard`."""
        for buffer in self.buffers:
            buffer.put_back()
        for rewind in self._rewinders:
            rewind()
        self.rng.restore()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*tensors_of(self.args), *tensors_of(self.kwargs)]


class Recorder:
    """Keeps the micro-batches of the step at hand, so that any of them can be run again.

    Random states are copied each time. A buffer is copied where it has changed since its last copy: constants (a
    causal mask, a table of rotary embeddings) are not copied again. That is known from autograd's count of changes.
    Some changes escape it (those of batch norm's kernels): values are compared after 1, 2, 4, 8 ... micro-batches,
    without a wait.

    Args:
        model: Whose buffers are kept. Its modules are looked up once; `clear` looks them up anew.
        device: Whose random state is kept.

    Attributes:
        micro_batches: Of the step at hand, or, until the next `record`, of the one that has ended.

    Example:
        >>> recorder = Recorder(nn.Dropout(), device=torch.device("cpu"))
        >>> batch = {"x": torch.ones(2, 3)}
        >>> one = recorder.record((batch, 0), {})
        >>> recorder.end_step()
        >>> batch.clear()
        >>> (again, number), _ = recorder.micro_batches[0].call()
        >>> again["x"].shape, number
        (torch.Size([2, 3]), 0)
    """

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        self.micro_batches: list[MicroBatch] = []
        self._model, self._device = model, device
        self._is_over = False
        self._buffers = Buffers(model)
        self._generators = _generators(model)

    @torch.no_grad()
    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroBatch:
        """Keep a micro-batch. To be called just before its forward pass.

        Args:
            args: Positional arguments of the step function.
            kwargs: Its keyword arguments.
        """
        if self._is_over:
            self.micro_batches, self._is_over = [], False
        micro_batch = MicroBatch(
            index=len(self.micro_batches),
            args=args,
            kwargs=kwargs,
            rng=RngState.capture(self._device),
            buffers=self._buffers.save(),
            rewinders=[rewinder(one) for one in self._generators],
        )
        micro_batch.autocast = AutocastState.capture(self._device)
        self.micro_batches.append(micro_batch)
        return micro_batch

    @torch.no_grad()
    def save_buffers_again(self) -> None:
        """The newest micro-batch begins only now, after DDP's broadcast, which does not count as a change."""
        self.micro_batches[-1].buffers = tuple(self._buffers.save(trusts_counts=False))

    @property
    def is_over(self) -> bool:
        """Whether the step of these micro-batches is over."""
        return self._is_over

    def drop(self, num: int) -> None:
        """Forget the first micro-batches: their gradients were thrown away.

        Args:
            num: How many.
        """
        self.micro_batches = self.micro_batches[num:]
        for index, micro_batch in enumerate(self.micro_batches):
            micro_batch.index = index

    def end_step(self) -> None:
        """The next micro-batch is the first of a new step. Those of this one stay until then."""
        self._is_over = True

    def clear(self) -> None:
        """Let go of everything."""
        self.micro_batches, self._is_over = [], False
        self._buffers = Buffers(self._model)
        self._generators = _generators(self._model)


def _generators(model: nn.Module) -> list[object]:
    """Generators of the user's own that hang on modules, each once."""
    found = {id(value): value for module in model.modules() for value in vars(module).values() if is_generator(value)}
    return list(found.values())
