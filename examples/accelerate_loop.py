"""An Accelerate loop with accumulation: `attach` around it, and nothing in it changes.

    python -m stabilizer.examples.accelerate_loop

What to look at afterwards is what `tensorboard --logdir stabilizer-accelerate-loop` shows: grad_norm/total and
grad_norm/total_after (what the optimizer got) under Scalars, one point an optimizer step and not one a micro-batch; and
gns/noise_scale, which says whether a larger batch would pay. The states of the callbacks are in the folder `saved`,
where `accelerator.save_state` has put them beside those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stabilizer.callbacks import GradNoiseScaleCallback, attach, recommended
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss
from stabilizer.examples.starting import needs, read_options, show

with needs("accelerate"):
    from accelerate import Accelerator  # type: ignore[import-untyped]

__all__ = ["main"]

_MICRO_BATCHES = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Train.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="accelerate_loop", text=__doc__, steps=60)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=_MICRO_BATCHES, log_with="tensorboard", project_dir=options.logdir
    )
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = GPT(context=64, num_layers=4, dim=48)
    optimizer = make_optimizer(model.parameters())
    loader = make_loader(context=64, batch_size=8, seed=0, rank=accelerator.process_index)
    schedule = make_schedule(optimizer, steps=options.steps, warmup_steps=5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    callbacks = [*recommended(), GradNoiseScaleCallback(min_samples=20)]
    # For GradLoc, which runs a suspicious micro-batch again: where the loss comes from.
    with attach(
        accelerator,
        model=model,
        optimizer=optimizer,
        callbacks=callbacks,
        loss_fn=next_byte_loss,
        num_steps=options.steps,
    ) as handle:
        num_steps = 0
        for batch in loader:
            with accelerator.accumulate(model):
                handle.record_batch(batch)
                accelerator.backward(next_byte_loss(model, batch))
                optimizer.step()  # the callbacks clip here, in place of accelerator.clip_grad_norm_
                schedule.step()
                optimizer.zero_grad()
            num_steps += accelerator.sync_gradients
            if num_steps == options.steps:
                break
        accelerator.save_state(str(options.logdir / "saved"))
    accelerator.end_training()
    show("Under Scalars, grad_norm/total and gns/noise_scale", options)


if __name__ == "__main__":
    main()
