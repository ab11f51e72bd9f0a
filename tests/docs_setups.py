"""What is given to the code blocks of the pages: a reader's own model, data and arguments, small enough for a test.

Each setup is a function of no arguments that makes everything anew and returns names for the blocks that follow.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SETUPS", "TRAINER", "CausalLM", "make_loader"]

VOCABULARY, LENGTH = 32, 8
#: Defaults of a Lightning Trainer, as it reads them from the environment; arguments of a block come first.
TRAINER = {
    "PL_TRAINER_ACCELERATOR": "cpu",
    "PL_TRAINER_DEVICES": "1",
    "PL_TRAINER_MAX_STEPS": "4",
    "PL_TRAINER_LOG_EVERY_N_STEPS": "1",
    "PL_TRAINER_ENABLE_PROGRESS_BAR": "false",
    "PL_TRAINER_ENABLE_MODEL_SUMMARY": "false",
}


class Block(nn.Module):
    """Attention over what came before, and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        x = x + self.attn(mean)
        result: Tensor = x + self.mlp(torch.tanh(x))
        return result


class Body(nn.Module):
    """Embedding, blocks and norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(4))
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.norm(x)
        return result


class CausalLM(nn.Module):
    """Has names and answers like a model of transformers; `labels` are the tokens themselves."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = Body(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return types.SimpleNamespace(loss=loss, logits=logits)


def make_loader(num_batches: int = 8, *, rank: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of four rows.

    Args:
        num_batches: How many.
        rank: Whose.
    """
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (num_batches, 4, LENGTH), generator=generator)
    return [{"input_ids": batch, "labels": batch.clone()} for batch in ids]


def default() -> dict[str, Any]:
    """A loop of one's own."""
    from torch.utils.tensorboard import SummaryWriter

    model = CausalLM()
    return {
        "torch": torch,
        "device": torch.device("cpu"),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        "loader": make_loader(),
        "writer": SummaryWriter("runs"),
    }


def lightning() -> dict[str, Any]:
    """A LightningModule that brings its data."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = CausalLM()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(make_loader(), batch_size=None)  # type: ignore[arg-type]

    return {"torch": torch, "model": Module(), "loader": make_loader()}


def accelerate() -> dict[str, Any]:
    """What `prepare` returned."""
    from tests.accelerate_loops import make_accelerator

    accelerator = make_accelerator(log_with="tensorboard", project_dir=".")
    accelerator.init_trackers("run")
    names = default()
    names["model"], names["optimizer"] = accelerator.prepare(names["model"], names["optimizer"])
    return {**names, "accelerator": accelerator}


def transformers() -> dict[str, Any]:
    """What a Trainer takes."""
    from transformers import TrainingArguments

    from tests.accelerate_loops import reset
    from tests.trainer_runs import Rows, make_llama

    reset()
    args = TrainingArguments("out", use_cpu=True, max_steps=2, report_to="tensorboard", **_QUIET)
    return {"model": make_llama(), "args": args, "dataset": Rows(32)}


def trl() -> dict[str, Any]:
    """What a GRPOTrainer takes."""
    from trl import GRPOConfig

    from tests import grpo_runs
    from tests.accelerate_loops import reset

    reset()
    args = GRPOConfig(
        "out",
        use_cpu=True,
        bf16=False,
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=grpo_runs.LENGTH,
        report_to="tensorboard",
        activation_checkpointing=False,
        **_QUIET,
    )
    return {
        "model": grpo_runs.make_model(),
        "args": args,
        "reward": grpo_runs.reward_of_small_digits,
        "dataset": grpo_runs.prompts(),
        "tokenizer": grpo_runs.make_tokenizer(),
    }


_QUIET: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 0}


def rollout() -> dict[str, Any]:
    """Log-probs of four completions under three policies, and a loop that samples."""
    generator = torch.Generator().manual_seed(0)
    current = -3 * torch.rand(4, LENGTH, generator=generator)
    old, other, reference = (current + 0.05 * torch.randn(4, LENGTH, generator=generator) for _ in range(3))
    mask = torch.arange(LENGTH) < torch.tensor([8, 5, 7, 3])[:, None]

    def log_probs(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch.input_ids).logits.log_softmax(-1)
        found: Tensor = logits.gather(-1, batch.input_ids.unsqueeze(-1)).squeeze(-1)
        return found

    names = default()
    batches = []
    for batch in names["loader"]:
        logp = log_probs(names["model"], types.SimpleNamespace(**batch)).detach()
        logp += 0.02 * torch.randn(logp.shape, generator=generator)
        batches.append(types.SimpleNamespace(**batch, logp=logp, mask=mask))
    return {
        **names,
        "logp_current": current,
        "logp_old": old,
        "logp_rollout": other,
        "logp_reference": reference,
        "mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.2, -1.0]),
        "entropy": torch.rand(4, LENGTH, generator=generator),
        "log_probs": log_probs,
        "batches": batches,
    }


def ranks() -> dict[str, Any]:
    """On each of several ranks: as the default, with batches of its own."""
    return {**default(), "loader": make_loader(rank=torch.distributed.get_rank())}


#: Setup -> names.
SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": default,
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
    "trl": trl,
    "rollout": rollout,
    "ranks": ranks,
}
