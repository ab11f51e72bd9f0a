"""Recorded batches of public trainers, and a record of which of their numbers were compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stabilizer import rollout
from tests.environments import ROOT

__all__ = ["LIMIT", "Batch", "Compared", "leaves"]

#: Of log-ratios in verl, slime and ms-swift.
LIMIT = 20.0


class Batch:
    """One recorded batch, and our log-ratios of it."""

    def __init__(self, name: str) -> None:
        self.golden: dict[str, Any] = json.loads((ROOT / f"tests/data/golden_rl/golden_{name}.json").read_text())
        given = {key: torch.tensor(value) for key, value in self.golden["input"].items()}
        self.mask, self.advantages = given["mask"].bool(), given["adv"]
        self.old, self.current, self.rollout = given["old"], given["cur"], given["rollout"]
        self.log_ratios = rollout.token_log_ratios(self.old, logp_rollout=self.rollout, mask=self.mask)
        self.drift = rollout.token_log_ratios(self.current, logp_rollout=self.old, mask=self.mask)
        self.off_policy = rollout.token_log_ratios(self.current, logp_rollout=self.rollout, mask=self.mask)
        self.to_reference = rollout.token_log_ratios(self.old, logp_rollout=self.current, mask=self.mask)
        self.statistics = rollout.rollout_mismatch(self.old, logp_rollout=self.rollout, mask=self.mask).as_dict()

    def tokens(self, values: Any) -> Tensor:
        """Rows with or without padding as one of ours, 0 where the mask is 0."""
        result = torch.zeros_like(self.log_ratios)
        for row, given in zip(result, values, strict=True):
            filled = torch.tensor(given, dtype=torch.float32)
            row[: len(filled)] = filled
        return torch.where(self.mask, result, 0.0)


class Compared:
    """Numbers of one trainer, of which it is kept which ones were looked at."""

    def __init__(self, values: Any, path: str = "") -> None:
        self.values, self.path, self.seen = values, path, set[str]()

    def check(self, name: str, found: Any, *, rtol: float = 1e-5, atol: float = 0.0) -> None:
        """Compare, where the trainer has the number."""
        value = self.values
        for part in name.split("//"):
            if part not in value:
                return
            value = value[part]
        self.seen.add(name)
        torch.testing.assert_close(
            torch.as_tensor(found).float(),
            torch.as_tensor(value).float(),
            rtol=rtol,
            atol=atol,
            msg=lambda text: f"{self.path} {name}: {text}",
        )

    def check_rows(self, batch: Batch, name: str, found: Tensor) -> None:
        """Compare a metric that the trainer has by token, in rows without padding."""
        values = self.values["metrics"]
        if name in values:
            torch.testing.assert_close(
                torch.where(batch.mask, found.float(), 0.0),
                batch.tokens(values[name]),
                rtol=1e-5,
                atol=2e-7,
                msg=lambda text: f"{self.path} {name}: {text}",
            )
            self.seen.add(f"metrics//{name}")


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Paths of numbers, with what stands in lists taken together."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from leaves(value, f"{path}//{name}" if path else name)
    else:
        yield path
