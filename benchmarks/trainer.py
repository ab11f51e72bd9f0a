#!/usr/bin/env python
"""What the default suite costs a step of transformers' Trainer.

python benchmarks/trainer.py
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.timing import Figure, Samples, ratio_figure  # noqa: E402
from stabilizer.callbacks import (  # noqa: E402
    RolloutMismatchCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    recommended,
)

__all__ = ["ROWS", "main", "trainer"]

TITLE = "What the callbacks cost a trainer's step"
_WARMUP_STEPS = 3


def _clock() -> Any:
    """A callback of transformers that times steps from the first micro-batch to the end of the optimizer's step.

    In seconds of the processor, which others on the machine take none of.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self._start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._start = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > _WARMUP_STEPS:
                self.times.append(time.process_time() - self._start)

    return Clock()


def _model(*, tiny: bool, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dim, layers = (16, 1) if tiny else (256, 6)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=4 * dim,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _make(folder: str, callbacks: list[StabilizerCallback], *, tiny: bool, steps: int) -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    vocabulary, length, size = (32, 8, 2) if tiny else (512, 128, 8)
    tokens = torch.randint(3, vocabulary, (64, length), generator=torch.Generator().manual_seed(0))
    clock = _clock()
    given = [StabilizerTrainerCallback(callbacks, log=lambda values, step: None)] if callbacks else []
    trainer = Trainer(
        model=_model(tiny=tiny, vocabulary=vocabulary),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=size,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10,
            learning_rate=1e-6,  # nothing shall spike
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[*given, clock],
    )
    return trainer, clock


def trainer(*, tiny: bool = False) -> list[Figure]:
    """Steps of trainers with and without callbacks, a few of each in turn.

    Args:
        tiny: Try it out.

    Returns:
        Ratios to the trainer alone, which clips at 1.0 as it does by default.
    """
    rounds, steps = (2, 6) if tiny else (8, 12)
    suites: dict[str, Callable[[], list[StabilizerCallback]]] = {
        "alone": list,
        "default suite": recommended,
        "default suite and RolloutMismatchCallback": lambda: [*recommended(), RolloutMismatchCallback()],
    }
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {name: _make(folder, suite(), tiny=tiny, steps=steps) for name, suite in suites.items()}
        for number in range(rounds):
            # Everybody comes first equally often.
            names = list(made)[number % len(made) :] + list(made)[: number % len(made)]
            for name in names:
                made[name][0].train()
        samples = {name: clock.times for name, (_, clock) in made.items()}
    num = sum(p.numel() for p in made["alone"][0].model.parameters()) / 1e6
    step = 1e3 * statistics.median(samples["alone"])
    how = f"Llama, {num:.1f} M float32 parameters, {step:.0f} ms of the processor a step"
    return [
        ratio_figure("trainer", f"step with the {name} / without", samples, (name, "alone"), target=None, how=how)
        for name in list(suites)[1:]
    ]


ROWS: dict[str, Callable[..., list[Figure]]] = {"trainer": trainer}
main = command_line(ROWS, title=TITLE, name="trainer")


if __name__ == "__main__":
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    sys.exit(main())
