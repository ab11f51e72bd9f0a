"""The models of `tests.models` as Lightning modules, for both import names and every strategy, on a CPU.

from tests.lightning_models import make_module, make_trainer
trainer = make_trainer("fsdp2", devices=world_size, max_steps=3)
trainer.fit(make_module("transformer"))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, Sampler

from tests import sharding
from tests.models import Batch, Block, loss_of, make_mlp, make_transformer, mlp_batch, token_batch

__all__ = ["PACKAGES", "STRATEGIES", "Samples", "expected_batches", "make_loader", "make_module", "make_trainer"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
STRATEGIES = ("single", "ddp", "fsdp1", "fsdp2", "tp", "sp")
#: Samples of one micro-batch.
BATCH_SIZE = 3


class Samples(Dataset[Batch]):
    """Sample i is always the same: (inputs, targets) without the batch dimension.

    Args:
        kind: "mlp" or "transformer".
        length: Number of samples.
    """

    def __init__(self, kind: str, *, length: int) -> None:
        self.kind = kind
        self.length = length

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def __getitem__(self, index: int) -> Batch:
        """One sample."""
        inputs, targets = (mlp_batch if self.kind == "mlp" else token_batch)(step=index, size=1)
        return inputs[0], targets[0]


class RankSampler(Sampler[int]):
    """Sample i goes to data-parallel rank i % num_ranks. Lightning's own sampler shuffles, whatever it is told."""

    def __init__(self, length: int, *, rank: int, num_ranks: int) -> None:
        self.indices = range(rank, length, num_ranks)

    def __len__(self) -> int:
        """Number of samples of this rank."""
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        """Their numbers, in order."""
        return iter(self.indices)


def make_loader(kind: str, *, length: int, rank: int = 0, num_ranks: int = 1) -> DataLoader[Batch]:
    """One rank's micro-batches of `BATCH_SIZE` samples; the last one may be short.

    Args:
        kind: "mlp" or "transformer".
        length: Number of samples of all ranks.
        rank: The data-parallel rank.
        num_ranks: Number of data-parallel ranks.
    """
    sampler = RankSampler(length, rank=rank, num_ranks=num_ranks)
    return DataLoader(Samples(kind, length=length), batch_size=BATCH_SIZE, sampler=sampler)


def expected_batches(kind: str, step: int, *, num_ranks: int = 1, num_micro_batches: int = 1) -> list[Batch]:
    """What all data-parallel ranks together see in one step of a fit, for `tests.models.reference_gradients`.

    Args:
        kind: "mlp" or "transformer".
        step: Counted from 0.
        num_ranks: Number of data-parallel ranks.
        num_micro_batches: Micro-batches accumulated in a step.
    """
    samples = Samples(kind, length=0)
    batches = []
    for micro_batch in range(step * num_micro_batches, (step + 1) * num_micro_batches):
        for rank in range(num_ranks):
            first = micro_batch * BATCH_SIZE
            drawn = [samples[(first + i) * num_ranks + rank] for i in range(BATCH_SIZE)]
            batches.append((torch.stack([x for x, _ in drawn]), torch.stack([y for _, y in drawn])))
    return batches


class _Body:
    """All of the Lightning module but its base class, of which there are two."""

    def __init__(
        self,
        kind: str,
        *,
        tensor_style: str = "sp",
        optimizer: str = "sgd",
        learning_rate: float = 0.05,
        length: int = 96,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.tensor_style = tensor_style
        self.optimizer_name = optimizer
        self.learning_rate = learning_rate
        self.length = length
        self.model: nn.Module = make_mlp() if kind == "mlp" else make_transformer(**(model_options or {}))
        self._sharded = False
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Shard over the mesh of ModelParallelStrategy; other strategies wrap by themselves."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is None or self._sharded:
            return
        self._sharded = True
        if mesh["tensor_parallel"].size() > 1:
            parallel = sharding.sequence_parallel if self.tensor_style == "sp" else sharding.tensor_parallel
            parallel(self.model, mesh=mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            sharding.shard_fsdp2(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of one micro-batch."""
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD ("sgd") or AdamW ("adamw", "fused_adamw"), over what trains."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=self.learning_rate)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, fused=self.optimizer_name == "fused_adamw")

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's data: ranks of one tensor-parallel group share it."""
        rank, num_ranks = self.data_rank()
        return make_loader(self.kind, length=self.length, rank=rank, num_ranks=num_ranks)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Two micro-batches; a Trainer of `make_trainer` runs it between epochs or at `val_check_interval`."""
        rank, num_ranks = self.data_rank()
        return make_loader(self.kind, length=2 * BATCH_SIZE * num_ranks, rank=rank, num_ranks=num_ranks)

    def data_rank(self) -> tuple[int, int]:
        """The data-parallel rank and how many there are."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None:
            return mesh["data_parallel"].get_local_rank(), mesh["data_parallel"].size()
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        return trainer.global_rank, trainer.world_size


@functools.cache
def module_class(package: str) -> type[Any]:
    """The class for one import name.

    Args:
        package: One of PACKAGES.
    """
    lightning = importlib.import_module(package)
    return type("TinyModule", (_Body, lightning.LightningModule), {"__module__": __name__})


def make_module(kind: str = "transformer", *, package: str = PACKAGES[0], **options: Any) -> Any:
    """A LightningModule around `make_mlp()` or `make_transformer()`, with its own data.

    Args:
        kind: "mlp" or "transformer".
        package: One of PACKAGES.
        **options: `tensor_style` ("sp" or "tp"), `optimizer` ("sgd", "adamw", "fused_adamw"), `learning_rate`,
            `length` (samples of all ranks), `model_options` (of `make_transformer`).
    """
    return module_class(package)(kind, **options)


@functools.cache
def cpu_fsdp_strategy(package: str) -> type[Any]:
    """FSDPStrategy for a CPU: Lightning refuses its own class there, by exact type, and passes a device index.

    Args:
        package: One of PACKAGES.
    """
    base = importlib.import_module(f"{package}.strategies").FSDPStrategy

    def setup_model(self: Any, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    return type("CPUFSDPStrategy", (base,), {"_setup_model": setup_model, "__module__": __name__})


def make_strategy(strategy: Any, *, devices: int, package: str = PACKAGES[0]) -> Any:
    """What `Trainer(strategy=...)` takes.

    Args:
        strategy: A Strategy, one of STRATEGIES, or "fsdp2_tp" (two ranks an axis); "sp" and "tp" differ in the module.
        devices: Number of ranks.
        package: One of PACKAGES.
    """
    if not isinstance(strategy, str):
        return strategy
    if strategy == "single":
        return "auto"
    if strategy == "ddp":
        return "ddp"
    if strategy == "fsdp1":
        policy = ModuleWrapPolicy({Block})
        return cpu_fsdp_strategy(package)(auto_wrap_policy=policy, use_orig_params=True, state_dict_type="sharded")
    sizes = {"fsdp2": (devices, 1), "tp": (1, devices), "sp": (1, devices), "fsdp2_tp": (devices // 2, 2)}
    if strategy not in sizes:
        raise ValueError(f"strategy={strategy!r} is none of {STRATEGIES} or 'fsdp2_tp'.")
    data, tensor = sizes[strategy]
    strategies = importlib.import_module(f"{package}.strategies")
    return strategies.ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


def make_trainer(strategy: Any = "single", *, devices: int = 1, package: str = PACKAGES[0], **options: Any) -> Any:
    """A quiet Trainer on a CPU that draws our samples in order and writes nothing unless asked to.

    Args:
        strategy: As of `make_strategy`.
        devices: Number of ranks: the world size of the launcher's call.
        package: One of PACKAGES.
        **options: Of Trainer.
    """
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "num_nodes": 1,
        "strategy": make_strategy(strategy, devices=devices, package=package),
        "use_distributed_sampler": False,
        "max_steps": 3,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return importlib.import_module(package).Trainer(**{**defaults, **options})
