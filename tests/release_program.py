"""README's quick start as a program that tells whether an installed package does what README begins with."""

from __future__ import annotations

import re

__all__ = ["Failed", "quick_start"]

_QUICK_START = """
import functools, importlib.metadata, pathlib
import stabilizer

assert pathlib.Path(stabilizer.__file__).is_relative_to({site!r}), stabilizer.__file__
assert stabilizer.__version__ == importlib.metadata.version("torch-stabilizer") == {version!r}

import lightning.pytorch, torch
from torch import nn
from torch.utils.data import DataLoader


class Tiny(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(torch.randn(12, 4), batch_size=4)


if __name__ == "__main__":
    model = Tiny()
    small = dict(max_steps=3, accelerator="cpu", devices=1, enable_progress_bar=False)
    lightning.pytorch.Trainer = functools.partial(lightning.pytorch.Trainer, **small)
    exec({code!r})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [path] = pathlib.Path("lightning_logs").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path))
    events.Reload()
    steps = [event.step for event in events.Scalars("grad_norm/total")]
    assert steps == [0, 1, 2], steps
    print("trained and logged", len(steps), "steps")
"""


class Failed(Exception):
    """What stands in the way of a release; the message is all that is shown."""


def quick_start(readme: str, *, site: str, version: str) -> str:
    """README's first piece of code, as a program that trains a tiny model and looks at what was logged.

    Args:
        readme: README.md.
        site: Folder that the package must be imported from.
        version: That it must have.

    Raises:
        Failed: README.md does not begin with a trainer of Lightning.
    """
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    chosen = [block for block in blocks if "lightning" in block and "trainer.fit(model)" in block]
    if not chosen:
        raise Failed("README.md has no block of Python with a Trainer of Lightning and trainer.fit(model) to try.")
    return _QUICK_START.format(site=site, version=version, code=chosen[0])
