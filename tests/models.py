"""Small models and data, the same on every rank, in every process and on every run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MLP",
    "AdaptedLinear",
    "Batch",
    "Block",
    "TinyTransformer",
    "initialise_",
    "loss_of",
    "make_mlp",
    "make_transformer",
    "mlp_batch",
    "reference_gradients",
    "token_batch",
]

VOCABULARY = 32
SEQUENCE = 8
Batch = tuple[Tensor, Tensor]


class MLP(nn.Module):
    """4 -> 8 -> 1: over two ranks the last bias (1 element) and the last weight (1 row) lie on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 4) to (batch, 1)."""
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


class AdaptedLinear(nn.Module):
    """A frozen linear map plus a trainable map of rank 2, as in LoRA."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out, bias=False)
        self.lora_a = nn.Linear(dim_in, 2, bias=False)
        self.lora_b = nn.Linear(2, dim_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim_in) to (..., dim_out)."""
        output: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return output


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the width of the projections (fewer under TP)."""

    def __init__(self, dim: int, head_dim: int, adapters: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = AdaptedLinear(dim, dim) if adapters else nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = AdaptedLinear(dim, dim) if adapters else nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, dim) to the same."""
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        # Written out: the fused kernels differ between devices, dtypes and tensor subclasses.
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        weights = torch.where(mask, scores, -1e4).softmax(-1)
        output: Tensor = self.o((weights @ v).transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """dim -> 4 dim -> dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, dim: int, head_dim: int, adapters: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, head_dim, adapters)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, dim) to the same."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class TinyTransformer(nn.Module):
    """A decoder with the attribute names of the Llama family: `embed_tokens`, `layers`, `norm`, `lm_head`.

    Args:
        num_layers: Number of blocks.
        dim: Width.
        tied: Whether `lm_head` and `embed_tokens` share their weight.
        adapters: Whether only low-rank adapters (on `q` and `v`) train.
        unused: Whether the model also has a trainable layer (`unused`) that no forward pass calls.
        sparse: Whether the embedding's gradient is sparse.
    """

    def __init__(
        self,
        *,
        num_layers: int = 4,
        dim: int = 16,
        tied: bool = False,
        adapters: bool = False,
        unused: bool = False,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, dim, sparse=sparse)
        self.layers = nn.ModuleList(Block(dim, dim // 4, adapters) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        if unused:
            self.unused = nn.Linear(dim, dim)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        if adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def initialise_(model: nn.Module, *, seed: int = 0) -> None:
    """Fill the parameters: in float64 from one generator, so that every dtype and host gets the same model.

    Args:
        model: Not yet sharded.
        seed: Of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_gain = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * values if is_gain else 0.3 * values)


def make_mlp(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> MLP:
    """An initialised MLP.

    Args:
        seed: Of its weights.
        dtype: Of its weights.
    """
    model = MLP().to(dtype)
    initialise_(model, seed=seed)
    return model


def make_transformer(*, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> TinyTransformer:
    """An initialised TinyTransformer.

    Args:
        seed: Of its weights.
        dtype: Of its weights.
        **options: Of TinyTransformer.
    """
    model = TinyTransformer(**options).to(dtype)
    initialise_(model, seed=seed)
    return model


def _generator(rank: int, step: int, micro_batch: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(((seed * 1000 + step) * 100 + micro_batch) * 100 + rank)


def mlp_batch(
    rank: int = 0,
    *,
    step: int = 0,
    micro_batch: int = 0,
    size: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Inputs (size, 4) and targets (size, 1) of one rank's micro-batch.

    Args:
        rank: The data-parallel rank: ranks of one tensor-parallel group share it.
        step: The step.
        micro_batch: Its number inside the step.
        size: Number of samples.
        seed: Of the data set.
        dtype: Of both tensors.
    """
    generator = _generator(rank, step, micro_batch, seed)
    inputs, targets = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (4, 1))
    return inputs.to(dtype), targets.to(dtype)


def token_batch(rank: int = 0, *, step: int = 0, micro_batch: int = 0, size: int = 3, seed: int = 0) -> Batch:
    """Tokens and next tokens, both (size, SEQUENCE), of one rank's micro-batch.

    Args:
        rank: The data-parallel rank: ranks of one tensor-parallel group share it.
        step: The step.
        micro_batch: Its number inside the step.
        size: Number of sequences.
        seed: Of the data set.
    """
    generator = _generator(rank, step, micro_batch, seed)
    tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch: cross-entropy for tokens, squared error otherwise.

    Args:
        model: Wrapped or not.
        batch: Of `token_batch` or `mlp_batch`.
    """
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def reference_gradients(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor | None]:
    """The float64 gradients of the loss averaged over micro-batches, in one process.

    Args:
        model: Neither wrapped nor sharded; it is copied, not changed.
        batches: All micro-batches of one step, of all ranks; each weighs the same.

    Returns:
        Parameter name -> dense gradient, or None where none came; a tied parameter under its first name.
    """
    reference = copy.deepcopy(model).cpu().to(torch.float64)
    reference.zero_grad(set_to_none=True)
    for inputs, targets in batches:
        batch = tuple(t.to(torch.float64) if t.is_floating_point() else t for t in (inputs.cpu(), targets.cpu()))
        (loss_of(reference, (batch[0], batch[1])) / len(batches)).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.requires_grad}
    return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in gradients.items()}
