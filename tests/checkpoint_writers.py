"""Small checkpoints as the hosts write them, without a host."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from stabilizer.checkpoints import Expected
from stabilizer.checkpoints.expecting import nonfinite_buffers, weights_of

__all__ = ["WRITERS", "Tied", "expected_of", "trained"]


class Tied(nn.Module):
    """Two names of one matrix, a frozen parameter, a mask, and a buffer of half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("scale", torch.tensor([1.5, math.inf], dtype=torch.bfloat16))


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model.head(model.embed(torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def expected_of(model: nn.Module, **numbers: int) -> Expected:
    return Expected(weights_of(model), nonfinite_buffers(model), **numbers)


def _lightning(path: Path, state: dict[str, Any], optimizer: Any, **more: Any) -> Path:
    torch.save({"state_dict": state, "optimizer_states": [optimizer], "loops": {}, "global_step": 5, **more}, path)
    return path


def _accelerate(path: Path, state: dict[str, Any], optimizer: Any, **_: Any) -> Path:
    path.mkdir()
    kept = {name: tensor.contiguous() for name, tensor in state.items() if name != "head.weight"}
    save_file({f"module.{name}": tensor for name, tensor in kept.items()}, path / "model.safetensors")
    torch.save(optimizer, path / "optimizer.bin")
    for rank in range(2):
        torch.save({"step": 1, "random_state": (3, (1, 2), None)}, path / f"random_states_{rank}.pkl")
    return path


def _sharded(path: Path, state: dict[str, Any], optimizer: Any, **more: Any) -> Path:
    dcp.save({"state_dict": state, "optimizer_0": optimizer}, checkpoint_id=path)
    torch.save({"loops": {}, "global_step": 5, **more}, path / "meta.pt")
    return path


WRITERS: dict[str, Callable[..., Path]] = {"lightning": _lightning, "accelerate": _accelerate, "sharded": _sharded}
