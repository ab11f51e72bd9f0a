"""A callback of your own: it reads what was measured anyway, and may change what the optimizer gets.

    python -m stabilizer.examples.own_callback

`EmbeddingShrink` multiplies the gradient of the embeddings by 0.1, as GLM-130B was kept stable with, and logs which
share of the gradient they were. `acts = True` says that it proposes to `context.plan`; the plan is carried out once,
together with what the clips propose. What to look at afterwards is what `tensorboard --logdir
stabilizer-own-callback` shows: monitor/embedding_share under Scalars, and grad_norm/total_after below grad_norm/total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import GradNormCallback, StabilizerCallback, StepContext, attach
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss
from stabilizer.examples.starting import read_options, show

__all__ = ["EmbeddingShrink", "main"]


class EmbeddingShrink(StabilizerCallback):
    """Multiplies the gradient of the embeddings by a number.

    Args:
        factor: The number.
        **common: See `StabilizerCallback`.
    """

    acts = True

    def __init__(self, *, factor: float = 0.1, **common: Any) -> None:
        super().__init__(**common)
        self.factor = factor

    def on_gradients(self, context: StepContext) -> None:
        """Propose, and log; all of it stays on the device.

        Args:
            context: The step.
        """
        norms, names = context.store.norms, context.store.layer_names
        is_embedding = [name.endswith("embedding") for name in names]
        coefficients = [torch.full_like(norms[0], self.factor if wanted else 1.0) for wanted in is_embedding]
        context.plan.clip_layers(torch.stack(coefficients))
        squares = torch.stack([norm.square() for norm, wanted in zip(norms, is_embedding, strict=True) if wanted])
        context.log("monitor/embedding_share", squares.sum() / context.store.total_norm.square())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with it in a plain loop; it works the same way in every trainer.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="own_callback", text=__doc__, steps=60)
    torch.manual_seed(0)
    model = GPT(context=64, num_layers=4, dim=48)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer, steps=options.steps, warmup_steps=5)
    callbacks = [GradNormCallback(layer_every_n_steps=1), EmbeddingShrink()]
    batches = iter(make_loader(context=64, batch_size=8, seed=0, rank=0))
    writer = SummaryWriter(str(options.logdir))
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=writer, schedulers=[schedule]):
        for _ in range(options.steps):
            next_byte_loss(model, next(batches)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    writer.close()
    show("Under Scalars, monitor/embedding_share", options)


if __name__ == "__main__":
    main()
