"""One bad token, found: `python -m stabilizer.examples.bad_token` trains a small GPT and plants it.

Every token's loss has a weight, as where rewards or sources of data are weighted. At one step a single weight is wrong:
one of 1,024 tokens gets 10,000 instead of 1. `GradLocCallback` runs the suspicious micro-batch once more and names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback, GradNormCallback, attach
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule
from stabilizer.examples.report import say
from stabilizer.localize.incident import Incident

__all__ = ["Bytes", "Plant", "main", "micro_batches", "train", "weighted_loss"]

Batch = dict[str, Tensor]
_MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Plant:
    """Where the bad token is.

    Attributes:
        step: At which optimizer step.
        micro_batch: In which of its four micro-batches.
        row: In which of four rows.
        position: At which of 64 positions.
        weight: Of its loss; all others have 1.
    """

    step: int = 70
    micro_batch: int = 2
    row: int = 1
    position: int = 40
    weight: float = 10_000.0


class Bytes:
    """The tokenizer of a model of bytes: anything with this one method will do."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some tokens.

        Args:
            ids: Token numbers, from 0 to 255.

        Example:
            >>> Bytes().decode([72, 105])
            'Hi'
        """
        return bytes(ids).decode(errors="replace")


def weighted_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over tokens of weight x cross-entropy.

    Args:
        model: From token numbers (rows, positions) to logits (rows, positions, vocabulary).
        batch: `input_ids`, `labels` (the tokens after them) and `weights`, each (rows, positions).

    Returns:
        Shape (), divided by the number of micro-batches, as it is propagated.
    """
    losses = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["weights"].flatten()).mean() / _MICRO_BATCHES


def micro_batches(plant: Plant, *, seed: int = 0) -> Iterator[list[Batch]]:
    """The four micro-batches of every step, without end.

    Args:
        plant: Whose weight is wrong.
        seed: Of the data.
    """
    windows = iter(make_loader(context=64, batch_size=4, seed=seed, rank=0))
    step = 0
    while True:
        rows = [next(windows) for _ in range(_MICRO_BATCHES)]
        batches = [{"input_ids": w[:, :-1], "labels": w[:, 1:], "weights": torch.ones(w[:, 1:].shape)} for w in rows]
        if step == plant.step:
            batches[plant.micro_batch]["weights"][plant.row, plant.position] = plant.weight
        yield batches
        step += 1


def train(callback: GradLocCallback, *, steps: int = 80, plant: Plant | None = None, log: Any = None) -> GPT:
    """Train in a plain loop that accumulates gradients.

    Args:
        callback: What finds the token.
        steps: Number of optimizer steps.
        plant: The bad token; default that of `Plant()`.
        log: See `attach`.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    model = GPT(context=64, num_layers=4, dim=48)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer, steps=steps)
    callbacks = [GradNormCallback(), AdaptiveClipThreshold(), callback]
    batches = micro_batches(plant or Plant())
    # The loss is not in what the model returns: loss_fn says where it is, and record_batch what it is computed from.
    with attach(
        None,
        model=model,
        optimizer=optimizer,
        callbacks=callbacks,
        loss_fn=weighted_loss,
        log=log,
        num_steps=steps,
        schedulers=[schedule],
    ) as handle:
        for _ in range(steps):
            for batch in next(batches):
                handle.record_batch(batch)
                loss = weighted_loss(model, batch)
                loss.backward()
                handle.record_loss(loss * _MICRO_BATCHES)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def main(arguments: Sequence[str] | None = None) -> list[Incident]:
    """Train, and say what was found and where to look at it.

    Args:
        arguments: Of the command line.

    Returns:
        What the callback has found.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stabilizer.examples.bad_token", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--logdir", type=Path, default=Path("stabilizer-bad-token"), help="folder for TensorBoard")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--step", type=int, default=Plant.step, help="which of them has the bad token")
    parser.add_argument("--weight", type=float, default=Plant.weight, help="of its loss; all others have 1")
    parser.add_argument("--on-found", default="report", help="report, drop_tokens or skip_step")
    parser.add_argument("--save-batch", action="store_true", help="save the micro-batch too, with safetensors")
    options = parser.parse_args(arguments)
    callback = GradLocCallback(
        tokenizer=Bytes(),
        on_found=options.on_found,
        dump_dir=str(options.logdir / "incidents"),
        dump_batch=options.save_batch,
    )
    writer = SummaryWriter(str(options.logdir))
    train(callback, steps=options.steps, plant=Plant(step=options.step, weight=options.weight), log=writer)
    writer.close()
    if not callback.incidents:
        say(f"\nNo step was over {callback.trigger_ratio:g} times its threshold: nothing was searched.")
    for incident in callback.incidents:
        folder = options.logdir / "incidents" / f"step_{incident.step}"
        say(f"\nThe incident is in {folder}; to show it again:\nstabilizer replay {shlex.quote(str(folder))}")
    if callback.incidents:
        say("\nIn TensorBoard it is under Text and Images (gradloc/...):")
    say(f"tensorboard --logdir {shlex.quote(str(options.logdir))}")
    return callback.incidents


if __name__ == "__main__":
    main()
