"""The code of the guide, run as it stands, and the messages that it quotes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.callbacks import StabilizerCallback, attach
from tests.environments import ROOT

GUIDE = (ROOT / "docs" / "guides" / "my-loss-spiked.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


class TwoTowers(nn.Module):
    """Has the layers that the guide speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"patches": nn.Linear(4, 4)})
        self.token_embedding = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.vision["patches"](x) + self.token_embedding(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.lm_head(x)
        return result


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_gives_callbacks_that_train(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 (our own page)
    callbacks: list[StabilizerCallback] = names["callbacks"] if "callbacks" in names else [names["clip"]]
    torch.manual_seed(0)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    logged: dict[str, float] = {}
    options: dict[str, Any] = {"granularity": "module"} if "clip" in names else {}
    for name, value in options.items():
        setattr(callbacks[0], name, value)
    with attach(
        None, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda values, _: logged.update(values)
    ):
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(callback.has_failed for callback in callbacks)
    assert any(tag.startswith("clip/") for tag in logged)


def test_the_guide_has_code() -> None:
    assert len(BLOCKS) == 5
