"""One broken image among thousands, named by its row: GradLoc where a unit is a sample and not a token.

    python -m stabilizer.examples.image_classifier

A small network tells four kinds of stripes apart. In step 70 one image of 32 comes with pixels from 0 to 255 where all
others have 0 to 1, and with the wrong label: what a reader of files that forgets a division does. What to look at
afterwards: the incident that is printed names the row, and proves it, since without this one sample the norm is normal.
The same is in `tensorboard --logdir stabilizer-image-classifier` under Text, and in the folder `incidents`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback, GradNormCallback, attach
from stabilizer.examples.recipe import make_schedule
from stabilizer.examples.report import say
from stabilizer.examples.starting import read_options, show

__all__ = ["BAD_ROW", "BAD_STEP", "Classifier", "batches", "main"]

BAD_STEP, BAD_ROW = 70, 13


class Classifier(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Tell what is in images.

        Args:
            images: Shape (rows, 1, height, width).

        Returns:
            Logits, shape (rows, classes).
        """
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def batches(*, rows: int = 32, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and their labels, without end.

    Args:
        rows: Images in a batch.
        size: Height and width, in pixels.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    waves = [(0.0, 0.8), (math.pi / 2, 0.8), (math.pi / 4, 0.8), (0.0, 2.0)]
    stripes = torch.stack([torch.sin(f * (x * math.cos(a) + y * math.sin(a))) for a, f in waves])
    step = 0
    while True:
        labels = torch.randint(4, (rows,), generator=generator)
        noise = 0.1 * torch.randn(rows, size, size, generator=generator)
        images = (0.5 + 0.4 * stripes[labels] + noise).clamp(0, 1).unsqueeze(1)
        if step == BAD_STEP:
            images[BAD_ROW] *= 255
            labels[BAD_ROW] = (labels[BAD_ROW] + 1) % 4
        yield images, labels
        step += 1


def main(arguments: Sequence[str] | None = None) -> list[int]:
    """Train.

    Args:
        arguments: Of the command line.

    Returns:
        The rows that were found.
    """
    options = read_options(arguments, name="image_classifier", text=__doc__, steps=90)
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = make_schedule(optimizer, steps=options.steps, warmup_steps=5)
    search = GradLocCallback(tap="head")  # its output has the shape (rows, classes), so that a unit is a row
    callbacks = [GradNormCallback(), AdaptiveClipThreshold(), search]
    writer, data = SummaryWriter(str(options.logdir)), batches()

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    with attach(
        None, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=loss_of, log=writer, schedulers=[schedule]
    ) as handle:
        for _ in range(options.steps):
            batch = next(data)
            handle.record_batch(batch)
            loss = loss_of(model, batch)
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    writer.close()
    rows = [token.row for incident in search.incidents for token in incident.tokens]
    say(f"\nThe broken image was row {BAD_ROW} of step {BAD_STEP}; found: {rows}")
    show("Under Text and Images, gradloc/...", options)
    return rows


if __name__ == "__main__":
    main()
