"""Rows of two gloo processes: tokens planted in steps of a small GPT, searched by GradLoc and by the published way."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import run_fresh
from benchmarks.published_search import Located, PublishedSearch, num_published_passes
from benchmarks.timing import Figure
from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.examples.gpt import GPT

__all__ = ["ddp", "fsdp2"]

_RANKS, _VOCABULARY = 2, 256
_FACTOR = 1e5
_WARMUP_STEPS = 8
#: What was planted and found: micro-batch, rank, row, position.
Place = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a step is.

    Attributes:
        micro_batches: Of a step.
        rows: Of a rank's part of a micro-batch.
        length: Of a row.
        model: Arguments of the GPT.
        faults: Places of the planted tokens; every second step after the warm-up has one. Without the last one the
            gradient is rebuilt as well.
    """

    micro_batches: int
    rows: int
    length: int
    model: dict[str, int]
    faults: tuple[Place, ...]

    def step_of(self, number: int) -> int:
        """The step of a fault.

        Args:
            number: Of the fault.
        """
        return _WARMUP_STEPS + 2 + 2 * number

    def is_rebuilt(self, number: int) -> bool:
        """Whether the gradient without a fault is made.

        Args:
            number: Of the fault.
        """
        return number == len(self.faults) - 1


_FULL = Size(4, 4, 512, {"num_layers": 4, "dim": 64, "num_heads": 4}, ((2, 1, 1, 7), (0, 0, 3, 511), (3, 1, 0, 200)))
_TINY = Size(4, 2, 16, {"num_layers": 2, "dim": 16, "num_heads": 2}, ((2, 1, 1, 7), (0, 0, 0, 15)))


@dataclasses.dataclass(frozen=True)
class Searched:
    """One planted token.

    Attributes:
        place: Where it is.
        found: What our search names.
        num_passes: Of our search.
        seconds: Of our search.
        num_rebuild_passes: To go on without the token.
        published: What the published search has found, and what it took; `None` where the gradient was rebuilt by ours.
    """

    place: Place
    found: tuple[Place, ...]
    num_passes: int
    seconds: float
    num_rebuild_passes: int
    published: Located | None


def ddp(*, tiny: bool = False) -> list[Figure]:
    """Under DDP; see `fsdp2`."""
    return _figures("ddp", "DDP", tiny=tiny)


def fsdp2(*, tiny: bool = False) -> list[Figure]:
    """Under FSDP2.

    Args:
        tiny: Try it out.

    Returns:
        Passes and time of our search beside the published one, and beside a step; with the gradient made anew as well.
    """
    return _figures("fsdp2", "FSDP2", tiny=tiny)


def _figures(row: str, title: str, *, tiny: bool) -> list[Figure]:
    size = _TINY if tiny else _FULL
    shape = f"{size.micro_batches} x {_RANKS} x {size.rows} x {size.length}"
    num_wanted = num_published_passes(size.micro_batches, _RANKS, size.rows * size.length)
    ranks = run_fresh(_search, row, size, timeout=900)
    step = statistics.median(max(seconds) for seconds in zip(*(healthy for healthy, _ in ranks), strict=True))
    # A search is over when its last rank is done.
    searches = [max(of_ranks, key=lambda one: one.seconds) for of_ranks in zip(*(s for _, s in ranks), strict=True)]
    for one in searches:
        _check(one, size, num_wanted)
    theirs = statistics.median(one.published.seconds for one in searches if one.published is not None)
    figures: list[Figure] = []
    for rebuilds in (False, True):
        chosen = [one for one in searches if bool(one.num_rebuild_passes) == rebuilds]
        passes = statistics.median(one.num_passes + one.num_rebuild_passes for one in chosen)
        ours = statistics.median(one.seconds for one in chosen)
        what = f"{title}: " + ("search and gradient without the token" if rebuilds else "search")
        how = f"{shape}, planted tokens: {len(chosen)}, two gloo processes, 1 thread"
        times = {"seconds": ours, "published_seconds": theirs, "step_seconds": step}
        details = {"passes": passes, "published_passes": num_wanted, **times}
        for other, value, target, note in (
            ("passes, ours / published", passes / num_wanted, 0.1, f"{passes:g} / {num_wanted}"),
            ("time, ours / published", ours / theirs, 1 / 8, f"{ours:.3g} s / {theirs:.3g} s"),
            ("time / that of a normal step", ours / step, 0.75, f"{ours:.3g} s / {step:.3g} s"),
        ):
            limit = None if rebuilds else target
            figures.append(Figure(row, f"{what}: {other}", value, "ratio", limit, f"{note}; {how}", details))
    return figures


def _check(one: Searched, size: Size, num_wanted: int) -> None:
    """Both have found what was planted, the published way in its own number of passes."""
    micro_batch, rank, row, position = one.place
    assert one.found == (one.place,), (one.found, one.place)
    if one.published is None:
        assert one.num_rebuild_passes == size.micro_batches, one
        return
    published = one.published
    assert one.num_rebuild_passes == 0, one
    assert (published.micro_batch, published.rank) == (micro_batch, rank), published
    assert published.token == row * size.length + position, published
    assert published.num_passes == num_wanted, (published.num_passes, num_wanted)


def _search(rank: int, strategy: str, size: Size) -> tuple[list[float], list[Searched]]:
    """Times of healthy steps, and what has become of every fault."""
    model = _wrap(GPT(context=size.length, vocab_size=_VOCABULARY, **size.model), strategy)
    # Tables in the console are none of what is measured.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        callback = GradLocCallback(
            warmup_steps=_WARMUP_STEPS,
            rule={"name": "robust_log", "warmup_steps": _WARMUP_STEPS},
            cooldown_steps=0,
            on_found="drop_tokens",
            dump_dir=folder,
            strict=True,
        )
        healthy, before = _train(model, size, callback, rank)
    searches = []
    for number, (place, incident) in enumerate(zip(size.faults, callback.incidents, strict=True)):
        assert incident.step == size.step_of(number), incident
        published = None
        if not size.is_rebuilt(number):
            _copy_(model, before[number])
            published = _search_as_published(model, size, number, rank)
        found: Any = tuple((one.micro_batch, one.rank, one.row, one.position) for one in incident.tokens)
        searches.append(
            Searched(
                place, found, incident.num_passes, incident.seconds, incident.num_rebuild_passes, published=published
            )
        )
    return healthy, searches


def _train(
    model: nn.Module, size: Size, callback: GradLocCallback, rank: int
) -> tuple[list[float], list[list[Tensor]]]:
    """Train until the last fault.

    Returns:
        Seconds of the healthy steps that a search comes after, and this rank's parameters before every faulty one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    faulty = [size.step_of(number) for number in range(len(size.faults))]
    healthy, before = [], []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, weights = batch
        return (_token_losses(model, tokens) * weights).mean() / size.micro_batches

    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=loss_fn, log=_drop) as handle:
        for step in range(faulty[-1] + 1):
            if step in faulty:
                callback.on_found = "drop_tokens" if size.is_rebuilt(faulty.index(step)) else "report"
                before.append([_local(parameter.detach()).clone() for parameter in model.parameters()])
            rows = [_batch(size, step, number, rank) for number in range(size.micro_batches)]
            dist.barrier()
            start = time.perf_counter()
            for number, batch in enumerate(rows):
                handle.record_batch(batch)
                with _sync(model, number == size.micro_batches - 1):
                    loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= _WARMUP_STEPS and step not in faulty:
                healthy.append(time.perf_counter() - start)
    return healthy, before


def _search_as_published(model: nn.Module, size: Size, number: int, rank: int) -> Located:
    step = size.step_of(number)
    rows = [_batch(size, step, micro_batch, rank) for micro_batch in range(size.micro_batches)]

    def run(micro_batch: int, mask: Tensor) -> float:
        tokens, weights = rows[micro_batch]
        model.zero_grad()
        with _sync(model, True):
            losses = _token_losses(model, tokens) * weights
            # The denominator stays: with that of the mask, halves of different sizes could not be compared.
            (torch.where(mask[rank].view(losses.shape), losses, 0.0).mean() / size.micro_batches).backward()
        return _norm(model)

    run(0, torch.ones(_RANKS, size.rows * size.length, dtype=torch.bool))  # first calls allocate
    dist.barrier()
    search = PublishedSearch(
        run, num_micro_batches=size.micro_batches, num_ranks=_RANKS, num_tokens=size.rows * size.length
    )
    return search.search()


def _norm(model: nn.Module) -> float:
    """Of the reduced gradient, the same on every rank."""
    gradients = [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).square()
    if isinstance(model, FSDPModule):
        dist.all_reduce(square)
    return float(square.sqrt())


def _token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1)


def _batch(size: Size, step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the weight of the loss of each: that of a planted one is large."""
    generator = torch.Generator().manual_seed((step * 100 + micro_batch) * 10 + rank)
    tokens = torch.randint(_VOCABULARY, (size.rows, size.length + 1), generator=generator)
    weights = torch.ones(size.rows, size.length)
    for number, (bad_micro_batch, bad_rank, row, position) in enumerate(size.faults):
        if (size.step_of(number), bad_micro_batch, bad_rank) == (step, micro_batch, rank):
            weights[row, position] = _FACTOR
    return tokens, weights


def _wrap(model: nn.Module, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sync(model: nn.Module, is_on: bool) -> Any:
    """Whether the next backward pass reduces gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_on)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if is_on else model.no_sync()  # type: ignore[operator]


@torch.no_grad()
def _copy_(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        _local(parameter.detach()).copy_(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _drop(values: dict[str, float], step: int) -> None:
    """Log nothing."""
