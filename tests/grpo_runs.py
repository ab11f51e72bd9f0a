"""Short GRPO runs of TRL on a CPU: a tiny model and a tokenizer that are made in memory.

trainer = make_grpo("single", folder, callbacks=[StabilizerTrainerCallback([GradLocCallback()])], max_steps=4)
trainer.train()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.accelerate_loops import reset
from tests.trainer_runs import pretend_fsdp

__all__ = ["LENGTH", "make_grpo", "make_model", "make_tokenizer", "prompts", "reward_of_small_digits"]

_WORDS = ["<pad>", "<bos>", "<eos>", *"0123456789+=?"]
#: Of completions, at most.
LENGTH = 8


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word a digit."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def make_model(*, dropout: float = 0.0) -> Qwen2ForCausalLM:
    """A Qwen2 of two layers with the same weights each time."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(_WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def prompts(num: int = 64) -> Dataset:
    """Sums, to be completed."""
    return Dataset.from_list([{"prompt": f"{a % 10} + {a // 10 % 10} ="} for a in range(num)])


def reward_of_small_digits(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Larger for small digits, and different in nearly every completion."""
    found = []
    for completion in completions:
        digits = [int(word) for word in completion.split() if word.isdigit()]
        found.append(1.0 - sum(digits) / (9.0 * len(digits)) if digits else 0.0)
    return found


class _Injected(GRPOTrainer):
    """Has its micro-batches changed after they were sampled and scored, as a fault in a rollout engine would.

    Attributes:
        inject: Takes the trainer and a copy of a micro-batch, to be changed in place.
    """

    inject: Any = None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        made = super()._prepare_inputs(generation_batch)
        if self.inject is None or not self.model.training:
            return made
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in made.items()}
        self.inject(self, own)
        return own


def make_grpo(
    strategy: str,
    folder: Path | str,
    *,
    callbacks: Sequence[Any] = (),
    model: nn.Module | None = None,
    inject: Any = None,
    eval_dataset: bool = False,
    **options: Any,
) -> GRPOTrainer:
    """A trainer that samples four completions of each prompt.

    Args:
        strategy: "single", "ddp", or "fsdp2" on two processes.
        folder: Of its output.
        callbacks: Of transformers.
        model: To train; default a tiny Qwen2.
        inject: Takes the trainer and a micro-batch, to change it in place.
        eval_dataset: Whether there are prompts to evaluate with.
        **options: Of GRPOConfig.
    """
    reset()
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "seed": 0,
        "dataloader_pin_memory": False,
        "activation_checkpointing": False,
        **options,
    }
    backend = None if strategy == "single" else "gloo"
    trainer = _Injected(
        model=make_model() if model is None else model,
        args=GRPOConfig(output_dir=str(folder), use_cpu=True, ddp_backend=backend, **given),
        reward_funcs=reward_of_small_digits,
        train_dataset=prompts(),
        eval_dataset=prompts(4) if eval_dataset else None,
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.inject = inject
    if strategy == "fsdp2":
        pretend_fsdp(trainer, wrapped=["Qwen2DecoderLayer"])
    return trainer


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter, all of it."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
    return full.detach().clone()
