"""A small GPT, written plainly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Block"]


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Args:
        dim: Width of the residual stream.
        num_heads: Number of heads; must divide `dim`.
    """

    def __init__(self, dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it.

        Args:
            x: Hidden states, (batch, length, dim).

        Returns:
            What attention adds to them, same shape.
        """
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class Block(nn.Module):
    """One transformer block: attention, then an MLP, each behind a norm and around a residual.

    Args:
        dim: Width of the residual stream.
        num_heads: Number of attention heads.
    """

    def __init__(self, dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads=num_heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block.

        Args:
            x: Hidden states, (batch, length, dim).

        Returns:
            New hidden states, same shape.
        """
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """A decoder-only language model with learned positions.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        context: Longest sequence, in tokens.
        num_layers: Number of blocks.
        dim: Width of the residual stream.
        num_heads: Number of attention heads; must divide `dim`.

    Example:
        >>> model = GPT(context=16, num_layers=2, dim=32, num_heads=4)
        >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 256])
    """

    def __init__(
        self, *, vocab_size: int = 256, context: int = 128, num_layers: int = 6, dim: int = 192, num_heads: int = 6
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads=num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(self._init_weights)
        # Each block adds to the residual stream twice: smaller output weights keep its variance near 1 at the start.
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * num_layers) ** 0.5)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_output_embeddings(self) -> nn.Module:
        """What makes logits of hidden states; of this name in transformers' models too."""
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: Token numbers, (batch, length).

        Returns:
            Logits, (batch, length, vocab_size).
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
