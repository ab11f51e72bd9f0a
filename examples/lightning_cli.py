"""The callbacks in a file of LightningCLI, by their class paths and arguments.

    python -m stabilizer.examples.lightning_cli

It writes the file below to the folder, and trains a small GPT as the file says. LightningCLI checks every argument
before training starts: `max_probs: 8` would be an error that names the key. What to look at afterwards is what
`tensorboard --logdir stabilizer-lightning-cli` shows: clip/layer_threshold/<layer> and clip/layer_coefficient/<layer>
of LayerClipCallback under Scalars, and the layers' norms under Custom Scalars.

A run of your own: `python my_script.py fit --config config.yaml`, with `LightningCLI(MyModule, MyData)` in the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss
from stabilizer.examples.starting import needs, read_options, show

with needs("lightning"):
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

__all__ = ["CONFIG", "SmallGPT", "main"]

CONFIG = """\
seed_everything: 0
model:
  dim: 48
trainer:
  accelerator: cpu
  devices: 1
  max_steps: {steps}
  enable_checkpointing: false
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {{save_dir: {logdir}, name: null}}
  callbacks:
    - class_path: stabilizer.callbacks.GradNormCallback
      init_args: {{layer_every_n_steps: 5}}
    - class_path: stabilizer.callbacks.LossMeanVarCallback
    - class_path: stabilizer.callbacks.LayerClipCallback
      init_args:
        rule: {{name: robust_log, k: 4.0, warmup_steps: 30}}
        exclude: [model.position_embedding]
    - class_path: stabilizer.callbacks.GradLocCallback
      init_args: {{max_probes: 8}}
"""


class SmallGPT(pl.LightningModule):
    """A module like any other: nothing in it knows of the callbacks.

    Args:
        dim: Width of the model.
    """

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.model = GPT(context=64, num_layers=4, dim=dim)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Predict the next byte.

        Args:
            batch: Token numbers, (batch, context + 1).
            batch_idx: Number of the batch.
        """
        loss = next_byte_loss(self.model, batch)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW; a linear warm-up, then a cosine."""
        optimizer = make_optimizer(self.parameters())
        schedule = make_schedule(optimizer, steps=self.trainer.max_steps, warmup_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows of the source of Python's standard library."""
        return make_loader(context=64, batch_size=8, seed=0, rank=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file and train as it says.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="lightning_cli", text=__doc__, steps=100)
    options.logdir.mkdir(parents=True, exist_ok=True)
    file = options.logdir / "config.yaml"
    file.write_text(CONFIG.format(steps=options.steps, logdir=options.logdir))
    LightningCLI(SmallGPT, args=["fit", "--config", str(file)], save_config_callback=None)
    show(f"Trained as {file} says. Under Scalars, clip/...", options)


if __name__ == "__main__":
    main()
