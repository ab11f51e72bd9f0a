"""The default suite in `transformers.Trainer` (and in TRL's): one callback in its list.

    python -m stabilizer.examples.transformers_trainer

The model is a Llama of 44,000 random weights made in memory, the text is Python's own standard library, a token is a
byte. What to look at afterwards is what `tensorboard --logdir stabilizer-transformers-trainer` shows: grad_norm/layer/
<layer> and clip/total_threshold under Scalars, beside the trainer's own train/loss. The trainer's `max_grad_norm` is
taken over for the run: the table that is printed at the start says so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from stabilizer.callbacks import StabilizerTrainerCallback, recommended
from stabilizer.examples.starting import needs, read_options, show
from stabilizer.examples.stdlib_text import load_stdlib_text

with needs("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

__all__ = ["Rows", "main"]


class Rows(Dataset[dict[str, Any]]):
    """A text in rows; the model shifts the labels itself.

    Args:
        num_rows: How many.
        length: Tokens in each.
    """

    def __init__(self, *, num_rows: int, length: int) -> None:
        self.rows = load_stdlib_text(num_rows * length)[: num_rows * length].view(num_rows, length).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="transformers_trainer", text=__doc__, steps=60)
    # Where transformers' own TensorBoard callback writes, and ours through it.
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(options.logdir)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(options.logdir),
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=5,
            logging_steps=10,
            report_to=["tensorboard"],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Rows(num_rows=512, length=64),
        callbacks=[StabilizerTrainerCallback(recommended())],  # this line is all
    )
    trainer.train()
    show("Under Scalars, grad_norm/... and clip/...", options)


if __name__ == "__main__":
    main()
