"""Sums that a tiny model can learn on a CPU: the task, its tokenizer, a Qwen2, and a first training by examples.

"+4 from 3" wants "7 1 5 9 3 7 1 5 <eos>": eight sums of one digit, modulo 10, each from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

__all__ = ["NUM_SUMS", "Rewards", "make_model", "make_prompts", "make_tokenizer", "pretrain", "score"]

#: Of each answer.
NUM_SUMS = 8
_WORDS = ("<pad>", "<bos>", "<eos>", "from", "?", *"0123456789", *(f"+{digit}" for digit in range(10)))
_IDS = {word: number for number, word in enumerate(_WORDS)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; made here, so that nothing is loaded.

    Example:
        >>> make_tokenizer().encode("+5 from 7")
        [20, 3, 12]
    """
    tokenizer = Tokenizer(WordLevel(_IDS, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def make_model(*, seed: int = 0, dim: int = 48) -> Qwen2ForCausalLM:
    """A Qwen2 of three blocks.

    Args:
        seed: Of its weights.
        dim: Width.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(_WORDS),
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=_IDS["<pad>"],
        bos_token_id=_IDS["<bos>"],
        eos_token_id=_IDS["<eos>"],
    )
    return Qwen2ForCausalLM(config)


def make_prompts(num: int = 4096, *, seed: int = 0) -> Dataset:
    """Sums to be completed, in the one column that TRL asks for.

    Args:
        num: How many.
        seed: Of the digits.

    Example:
        >>> make_prompts(1)[0]["prompt"]
        '+4 from 9'
    """
    digits = _digits(num, torch.Generator().manual_seed(seed))
    return Dataset.from_list([{"prompt": f"+{step} from {start}"} for step, start in digits.tolist()])


def score(prompt: str, completion: str) -> float:
    """The share of an answer's sums that are right, each from the digit before it.

    Args:
        prompt: As of `make_prompts`.
        completion: What was answered, words between blanks; what comes after the last sum counts for nothing.

    Example:
        >>> score("+4 from 3", "7 1 5 9 3 7 1 5"), score("+4 from 3", "7 2 6 9 3")
        (1.0, 0.375)
    """
    step, _, last = prompt.split()
    right = 0
    for word in completion.split()[:NUM_SUMS]:
        right += last.isdigit() and word == str((int(last) + int(step)) % 10)
        last = word
    return right / NUM_SUMS


class Rewards:
    """TRL's reward function, that keeps what it has given.

    Attributes:
        means: Of every generated batch, from 0 to 1.
    """

    __name__ = "right_sums"

    def __init__(self) -> None:
        self.means: list[float] = []

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **others: Any) -> list[float]:
        """Score completions.

        Args:
            prompts: One for each completion.
            completions: What was sampled.
            others: Of no use here.
        """
        scores = [score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self.means.append(sum(scores) / len(scores))
        return scores


def pretrain(model: Qwen2ForCausalLM, *, until: float = 0.7, sign: int = 1, seed: int = 0) -> int:
    """Train by right examples, until a policy is right often enough to get rewards.

    Args:
        model: To train.
        until: Cross-entropy at which it ends, in nats per token.
        sign: -1 counts backwards: another policy than the one that is sought.
        seed: Of the examples.

    Returns:
        Number of optimizer steps, of 64 examples each.

    Raises:
        RuntimeError: If 2,000 steps are not enough.

    Example:
        >>> 0 < pretrain(make_model(), until=3.0) < 50
        True
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(2000):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        inputs, targets = _examples(_digits(64, generator), sign)
        logits = model(input_ids=inputs).logits[:, -targets.shape[1] :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if loss.item() < until:
            return step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(
        f"after 2,000 steps the loss is {loss.item():.3f} and not under until={until}: take another seed"
    )


def _digits(num: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 10, (num, 2), generator=generator)


def _examples(digits: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Token numbers but for the last, and what comes after each from the end of the prompt on."""
    num, zero = len(digits), _IDS["0"]
    step, start = digits[:, :1], digits[:, 1:]
    counted = (start + sign * step * torch.arange(NUM_SUMS + 1)) % 10
    words = (torch.full((num, 1), _IDS[word]) for word in ("from", "<eos>"))
    middle, end = words
    row = torch.cat([step + _IDS["+0"], middle, counted + zero, end], dim=1)
    return row[:, :-1], row[:, -(NUM_SUMS + 1) :]
