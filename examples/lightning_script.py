"""The default suite in a Lightning Trainer: one argument, and nothing else of the script changes.

    python -m stabilizer.examples.lightning_script

It trains a small GPT of bytes on one CPU. What to look at afterwards is what `tensorboard --logdir
stabilizer-lightning-script` shows: under Custom Scalars every layer's gradient norm in one chart, and the total norm
with the threshold that clips it; under Scalars the mean and the deviation of the loss (loss/mean_100, loss/std_100).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stabilizer.callbacks import recommended
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss
from stabilizer.examples.starting import needs, read_options, show

with needs("lightning"):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["SmallGPT", "main"]


class SmallGPT(pl.LightningModule):
    """A module like any other: nothing in it knows of the callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(context=64, num_layers=4, dim=48)

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="lightning_script", text=__doc__, steps=100)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        logger=TensorBoardLogger(options.logdir, name=None),
        callbacks=[*recommended()],  # this line is all
        enable_checkpointing=False,
    )
    trainer.fit(SmallGPT(), make_loader(context=64, batch_size=8, seed=0, rank=0))
    show("Under Custom Scalars, page Norms", options)


if __name__ == "__main__":
    main()
