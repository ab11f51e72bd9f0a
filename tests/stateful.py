"""A model that keeps state in every way a user's module can, and what all of it is worth, as plain values."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

__all__ = ["Net", "Stats", "batch_of", "differences", "fingerprint", "lightning_module", "rng_fingerprint"]


class Stats:
    """A class of the user's own."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.losses: list[float] = []
        self.nested = SimpleNamespace(total=torch.zeros(2), inner={"seen": {0}})


class Slots:
    """One that keeps nothing in `__dict__`."""

    __slots__ = ("absent", "count")
    absent: float

    def __init__(self) -> None:
        self.count = [0]


class Pair(NamedTuple):
    """A tuple whose content changes."""

    items: list[int]
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to, but holds what can change."""

    values: dict[str, int]


class Remembering(nn.Module):
    """A sub-module with Python state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.history: list[Any] = []
        self.counts: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        """Remember the call."""
        self.history.append(x.detach().mean())
        self.counts["calls"] += 1
        output: Tensor = self.linear(x)
        return output


class Net(nn.Module):
    """5 -> 6 -> 1 with dropout and batch norm; every forward pass changes all that it holds."""

    noise: Tensor
    level: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Remembering())
        self.head = nn.Linear(6, 1)
        self.teacher = nn.Linear(6, 1).requires_grad_(False)
        self.mean = MeanMetric()
        self.by_name = nn.ModuleDict({"absolute": MeanAbsoluteError(), "square": MeanSquaredError()})
        self.collection = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])
        self.hidden_metrics = [MeanMetric()]
        self.register_buffer("noise", torch.zeros(6))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("mask", torch.ones(6, 6).tril())
        self.running = torch.zeros(6)  # no buffer, changed in place
        self.newest = torch.zeros(6)  # no buffer, replaced
        self.last_loss: Tensor | None = None
        self.array = np.zeros(3)
        self.losses: list[Any] = []
        self.seen: dict[str, Any] = {"steps": {"count": 0}, "keys": OrderedDict(a=1, b=2), "sets": {1}}
        self.window: deque[float] = deque(maxlen=3)
        self.by_key: defaultdict[str, list[int]] = defaultdict(list)
        self.raw = bytearray(b"ab")
        self.stats, self.slots = Stats(), Slots()
        self.pair, self.frozen = Pair([0], torch.zeros(2)), Frozen({"n": 0})
        self.generator = torch.Generator().manual_seed(1)
        self.dice, self.numbers = random.Random(1), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 5) to (batch, 1), with noise of every kind of generator."""
        with torch.no_grad():
            # As in momentum encoders, two ways, one of which no count of changes shows.
            self.teacher.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
            self.teacher.bias.data.mul_(0.9).add_(self.head.bias.data, alpha=0.1)
        hidden = self.inner(x)
        draws = random.random() + self.dice.random() + float(np.random.rand()) + float(self.numbers.random())
        scale = 1 + 0.1 * draws + 0.1 * torch.rand(6, generator=self.generator)
        output: Tensor = self.head(hidden * scale + self.noise + self.level) + self.teacher(hidden)
        with torch.no_grad():
            self.noise += 0.01 * hidden.mean(0)
            self.level = self.level + 0.01
            self.running.lerp_(hidden.mean(0), 0.5)
            self.newest = hidden.mean(0)
        return output

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        """Mean square error; takes its batch apart."""
        target = batch.pop("target")
        x, _ = batch["inputs"].pop(), batch.pop("inputs")
        output = self(x)
        loss: Tensor = (output - target).square().mean()
        self._update(output.detach(), target, float(loss.detach()), batch_index)
        self.last_loss = loss
        return loss

    def _update(self, output: Tensor, target: Tensor, loss: float, batch_index: int) -> None:
        for mean in (self.mean, self.hidden_metrics[0]):
            mean.update(loss)
        for metric in (*self.by_name.values(), self.collection):
            metric(output, target)
        self.array[batch_index % 3] += loss
        self.losses.append(loss)
        self.seen["steps"]["count"] += 1
        self.seen["keys"].move_to_end(next(iter(self.seen["keys"])))
        self.seen["sets"].add(len(self.losses))
        self.window.append(loss)
        self.by_key[f"batch {batch_index}"].append(batch_index)
        self.raw += b"c"
        self.stats.num_calls += 1
        self.stats.losses.append(loss)
        self.stats.nested.total += loss
        self.stats.nested.inner["seen"].add(batch_index)
        self.slots.count.append(batch_index)
        self.slots.absent = loss
        self.pair.items.append(1)
        self.pair.tensor.add_(loss)
        self.frozen.values["n"] += 1
        setattr(self, f"new_{len(self.losses) % 7}", loss)


def batch_of(number: int, *, size: int = 4) -> dict[str, Any]:
    """A nested batch, always the same under its number."""
    generator = torch.Generator().manual_seed(100 + number)
    x, target = torch.randn(size, 5, generator=generator), torch.randn(size, 1, generator=generator)
    return {"inputs": [x], "target": target}


@functools.cache
def lightning_module() -> type[Any]:
    """`Net` as a LightningModule that logs."""
    from lightning.pytorch import LightningModule

    class LightningNet(Net, LightningModule):
        def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
            loss = super().training_step(batch, batch_index)
            self.log("loss", loss)
            self.log("mean", self.mean, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([batch_of(n) for n in range(40)], batch_size=None)  # type: ignore[arg-type]

    return LightningNet


def fingerprint(value: Any, *, names: tuple[str, ...] = (), seen: dict[int, int] | None = None) -> Any:
    """What an object and all that it holds are worth, as plain values; NaN and -0.0 by their bits.

    Args:
        value: Anything.
        names: Attributes of modules that are left out.
        seen: What is on the way, by identity.
    """
    if isinstance(value, Tensor | np.ndarray):
        return _bits(value)
    if isinstance(value, str | bytes | int | bool | type(None)):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Generator | random.Random | np.random.Generator):
        return _state(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    inner = functools.partial(fingerprint, names=names, seen=seen)
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque | bytearray):
        return type(value).__name__, [inner(item) for item in value]
    if isinstance(value, Slots):
        return inner(value.count), inner(getattr(value, "absent", "absent"))
    is_open = isinstance(value, nn.Module | Stats | SimpleNamespace | Frozen)
    items = value if isinstance(value, dict) else vars(value) if is_open else {}
    return type(value).__name__, [(str(key), inner(item)) for key, item in items.items() if key not in names]


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    local = value.to_local() if hasattr(value, "to_local") else value
    plain = local.detach().cpu().clone(memory_format=torch.contiguous_format)
    return str(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate() if isinstance(generator, random.Random) else repr(generator.bit_generator.state)


def differences(one: Any, other: Any, *, path: str = "") -> list[str]:
    """Where two fingerprints differ."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        name = f"{path}.{one[0]}" if one and isinstance(one[0], str) else path
        pairs = enumerate(zip(one, other, strict=True))
        return [place for n, (a, b) in pairs for place in differences(a, b, path=f"{name}.{n}")]
    return [] if one == other else [path]


def rng_fingerprint() -> Any:
    """The states of the four generators that everybody shares."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(keys).tobytes(), rest
