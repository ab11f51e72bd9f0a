"""A `Setting` to ask `facts` about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stabilizer.callbacks.preflight import Fact, Setting, facts
from tests.models import make_transformer

__all__ = ["make_setting", "rows_of"]


def make_setting(model: nn.Module | None = None, **changes: Any) -> Setting:
    """A plain loop with AdamW and nothing else, unless told otherwise."""
    model = make_transformer() if model is None else model
    options: dict[str, Any] = {
        "host": "plain loop",
        "model": model,
        "optimizers": [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)],
        "callbacks": [],
        "clipping": "",
        "precision": "32",
    }
    return Setting(**{**options, **changes})


def rows_of(setting: Setting) -> dict[str, Fact]:
    """The facts by name; none of them may have failed."""
    found = facts(setting)
    rows = {fact.name: fact for fact in found}
    assert len(rows) == len(found)
    failed = [fact for fact in found if "Error" in fact.value]
    assert not failed
    return rows
