"""Short runs of transformers' Trainer on a CPU, under every strategy, and what they should come to in float64.

trainer = make_trainer("fsdp2", folder, callbacks=[StabilizerTrainerCallback([GradNormCallback()])])
trainer.train()
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.accelerate_loops import reset

__all__ = [
    "LEARNING_RATE",
    "VOCABULARY",
    "Rows",
    "make_llama",
    "make_trainer",
    "micro_batches",
    "pretend_fsdp",
    "reference",
]

VOCABULARY, LENGTH, LEARNING_RATE = 64, 12, 0.1
#: Samples of a micro-batch on one rank.
BATCH_SIZE = 2


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens, whose labels leave out a prompt of a length of its own.

    Args:
        num: How many samples.
        planted: Sample -> its inputs, to change in place.
    """

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, VOCABULARY, (num, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[: 1 + index % 5] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def make_llama(*, num_layers: int = 2, dropout: float = 0.0) -> LlamaForCausalLM:
    """A tiny one with the same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def make_trainer(
    strategy: str,
    folder: Path | str,
    *,
    callbacks: Sequence[Any] = (),
    model: nn.Module | None = None,
    optimizer: str = "sgd",
    kind: type[Trainer] = Trainer,
    dataset: Dataset[dict[str, Tensor]] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A trainer whose samples come in their order.

    Args:
        strategy: "single", "ddp", or "fsdp2" on two processes.
        folder: Of its output.
        callbacks: Of transformers.
        model: To train; default a tiny Llama.
        optimizer: "sgd", else a name that TrainingArguments know.
        kind: The class.
        dataset: What it trains on.
        kwargs: Of the class.
        **options: Of TrainingArguments.
    """
    reset()
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": BATCH_SIZE,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "seed": 0,
        "dataloader_pin_memory": False,
        "optim": "sgd" if optimizer == "sgd" else optimizer,
        **options,
    }
    backend = None if strategy == "single" else "gloo"
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, ddp_backend=backend, **given)
    trainer = kind(
        model=make_llama() if model is None else model,
        args=arguments,
        train_dataset=Rows(64) if dataset is None else dataset,
        callbacks=list(callbacks),
        **(kwargs or {}),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    if strategy == "fsdp2":
        pretend_fsdp(trainer)
    return trainer


def pretend_fsdp(trainer: Trainer, *, wrapped: Sequence[str] = ("LlamaDecoderLayer",)) -> None:
    """Have a trainer shard its model by FSDP2 on CPUs, where Accelerate falls back to DDP in silence.

    Args:
        trainer: Has not trained.
        wrapped: Names of the classes that are sharded by themselves.
    """
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(wrapped),
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
    )
    for kind in (AcceleratorState, PartialState):
        kind._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    trainer.is_fsdp_enabled = True
    os.environ.setdefault("ACCELERATE_USE_FSDP", "false")


def micro_batches(*, num_steps: int, accumulation: int, num_ranks: int) -> list[list[list[dict[str, Tensor]]]]:
    """What a step's micro-batches are: steps, micro-batches, ranks."""
    rows = Rows(64)
    place, steps = 0, []
    for _ in range(num_steps):
        step = []
        for _ in range(accumulation):
            ranks = []
            for _ in range(num_ranks):
                samples = [rows[(place + number) % len(rows)] for number in range(BATCH_SIZE)]
                ranks.append({key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
                place += BATCH_SIZE
            step.append(ranks)
        steps.append(step)
    return steps


def reference(
    *, num_steps: int, accumulation: int, num_ranks: int, max_norm: float = math.inf, model: nn.Module | None = None
) -> list[dict[str, Any]]:
    """The same training by hand in float64: means over all tokens of a step, SGD, a clip by the total norm.

    Returns:
        Of each step: `total`, `loss`, `after`, and `norms` by parameter.
    """
    model = copy.deepcopy(make_llama() if model is None else model).double()
    found = []
    for step in micro_batches(num_steps=num_steps, accumulation=accumulation, num_ranks=num_ranks):
        model.zero_grad()
        pieces = [piece for ranks in step for piece in ranks]
        num_tokens = sum(int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces)
        total_loss = 0.0
        for piece in pieces:
            logits = model(input_ids=piece["input_ids"]).logits[:, :-1]
            loss = nn.functional.cross_entropy(
                logits.reshape(-1, VOCABULARY), piece["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
            )
            (loss / num_tokens).backward()
            total_loss += loss.item() / num_tokens
        norms = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        coefficient = min(1.0, max_norm / total)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= LEARNING_RATE * coefficient * p.grad
        found.append({"total": total, "loss": total_loss, "after": coefficient * total, "norms": norms})
    return found
