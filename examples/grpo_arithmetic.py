"""GRPO on a CPU, its faults, and what repairs them: `python -m stabilizer.examples.grpo_arithmetic` (needs trl).

A tiny model learns to count on by GRPO in TRL's trainer. With `--fault` something goes wrong now and then, GradLoc
finds it, and the clip that is made for it repairs it; `--table` shows how long a run lasts with which clips.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback, Qwen2ForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from stabilizer.callbacks import GradLocCallback, LayerClipCallback, StabilizerCallback
from stabilizer.callbacks.transformers import StabilizerTrainerCallback
from stabilizer.examples.arithmetic import NUM_SUMS, Rewards, make_model, make_prompts, make_tokenizer, pretrain
from stabilizer.examples.grpo_faults import KINDS, Faults, FaultyTrainer, Kind
from stabilizer.examples.grpo_report import (
    ARMS,
    REPAIRS,
    Clip,
    Run,
    collapsed_at,
    draw,
    show_fault,
    show_table,
    summarize,
)
from stabilizer.examples.report import say
from stabilizer.rollout import SeqClip, TokenClip

__all__ = ["CLIPS", "Setting", "main", "train"]

#: With the bounds at which GradLoc calls a ratio extreme, so that each repairs its own kind of fault; and one that is
#: as narrow as two passes over a batch allow.
CLIPS: dict[str, TokenClip | SeqClip] = {
    "TokenClip": TokenClip(mode="mis", bounds=(None, 1e5)),
    "TokenClip at 100": TokenClip(mode="mis", bounds=(None, 100.0)),
    "SeqClip": SeqClip(ratio="product", bounds=(1e-30, 1e5)),
}
#: One sampled batch is cut in two, and each part is learnt from twice.
_PARTS, _TIMES = 2, 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    Attributes:
        steps: Optimizer steps.
        batch_size: Completions in one step.
        warmup_steps: Of thresholds. Nothing goes wrong until ten steps later.
        interval: Steps from one fault to the next, in the mean.
        until: Cross-entropy at which the training by examples ends, in nats per token.
        max_probes: Of a search.
    """

    steps: int = 300
    batch_size: int = 64
    warmup_steps: int = 50
    interval: int = 12
    until: float = 0.5
    max_probes: int = 16


def train(
    clips: Sequence[Clip] = (),
    *,
    kinds: Sequence[Kind] = (),
    seed: int = 0,
    max_grad_norm: float = 0.0,
    setting: Setting | None = None,
    folder: Path | str,
    tensorboard: bool = False,
) -> Run:
    """Train once: by a few examples first, then by GRPO, until the end or a collapse.

    Args:
        clips: What repairs.
        kinds: What goes wrong.
        seed: Of weights, prompts, samples and faults.
        max_grad_norm: The trainer's own clip. GradLoc would take its limit for a threshold, and is left out with it.
        setting: Lengths and sizes.
        folder: For incidents and event files.
        tensorboard: Whether to write event files.

    Returns:
        How it went.
    """
    setting, rewards = setting or Setting(), Rewards()
    # One that counts backwards: sure of other tokens, but of none as sure as to give ratios over 1e5.
    other = _pretrained(seed, 1.6 * setting.until, -1) if "sequence_ratio" in kinds else None
    callbacks = [] if max_grad_norm else _callbacks(clips, setting, Path(folder) / "incidents")
    # Without a reporter a callback would warn that nothing is logged.
    log = None if tensorboard else _nowhere
    trainer = FaultyTrainer(
        model=copy.deepcopy(_pretrained(seed, setting.until)),
        args=_arguments(setting, folder=folder, seed=seed, max_grad_norm=max_grad_norm, tensorboard=tensorboard),
        reward_funcs=rewards,
        train_dataset=make_prompts(seed=seed),
        processing_class=make_tokenizer(),
        callbacks=[_Watch(rewards), *([StabilizerTrainerCallback(callbacks, log=log)] if callbacks else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.clips = [CLIPS[clip] for clip in clips if clip in CLIPS]
    trainer.faults = Faults(kinds, interval=setting.interval, first=setting.warmup_steps + 10, seed=seed)
    trainer.other = other
    # Tables of all incidents and settings: they are in the folder, and the first of them is shown at the end.
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    collapse = collapsed_at(rewards.means)
    return Run(
        clips=tuple(clips),
        seed=seed,
        rewards=[round(mean, 4) for mean in rewards.means],
        collapsed_at=None if collapse is None else trainer.state.global_step,
        planted=[(step, kind, row, position) for step, (kind, row, position) in trainer.planted.items()],
        incidents=[incident for one in callbacks if isinstance(one, GradLocCallback) for incident in one.incidents],
    )


def main(arguments: Sequence[str] | None = None, *, setting: Setting | None = None) -> dict[str, Any]:
    """Train, and say how it went.

    Args:
        arguments: Of the command line.
        setting: Sizes; its number of steps is that of the command line.

    Returns:
        By name what was run: rewards, faults and incidents, as they are written with `--output`.
    """
    options = _parser().parse_args(arguments)
    setting, runs = dataclasses.replace(setting or Setting(), steps=options.steps), {}
    if options.table:
        report = _table(options, setting)
    else:
        kinds: list[Kind] = [options.fault] if options.fault else []
        for clips in [(), *([(REPAIRS[options.fault],)] if options.fault else [])]:
            name = " + ".join(clips) or "no clip"
            say(f"{'GRPO with faults, ' if kinds else 'GRPO, '}{name}: {setting.steps} steps ...")
            runs[name] = train(
                clips,
                kinds=kinds,
                seed=options.seed,
                setting=setting,
                folder=options.logdir / name.replace(" ", "_"),
                tensorboard=options.tensorboard,
            )
            say(f"  {runs[name].describe()}")
        if options.fault:
            show_fault(options.fault, runs["no clip"])
        report = {"setting": dataclasses.asdict(setting), "runs": {name: run.as_dict() for name, run in runs.items()}}
        if options.fault or options.tensorboard:
            say(f"Incidents and event files are in {options.logdir}")
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return report


@functools.lru_cache(maxsize=8)
def _pretrained(seed: int, until: float, sign: int = 1) -> Qwen2ForCausalLM:
    # Other weights, since one that is only taught anew is too much alike.
    model = make_model(seed=seed if sign > 0 else seed + 100)
    pretrain(model, until=until, sign=sign, seed=seed)
    return model


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stabilizer.examples.grpo_arithmetic", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--fault", choices=list(KINDS), help="what goes wrong; without it nothing does")
    what.add_argument("--table", action="store_true", help="all faults together, with every choice of clips")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the same for the table")
    parser.add_argument("--processes", type=int, default=2, help="runs of the table at a time, one thread each")
    parser.add_argument("--logdir", type=Path, default=Path("stabilizer-grpo"), help="folder for incidents")
    parser.add_argument("--tensorboard", action="store_true", help="write event files into it too")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    parser.add_argument("--picture", type=Path, help="PNG file for the rewards of the table (needs matplotlib)")
    return parser


def _callbacks(clips: Sequence[Clip], setting: Setting, folder: Path) -> list[StabilizerCallback]:
    rule = {"name": "robust_log", "warmup_steps": setting.warmup_steps}
    localizer = GradLocCallback(
        rule=rule,
        warmup_steps=setting.warmup_steps,
        max_probes=setting.max_probes,
        cooldown_steps=0,
        max_incidents=setting.steps,
        tokenizer=make_tokenizer(),
        dump_dir=str(folder),
    )
    return [localizer, *([LayerClipCallback(rule=rule)] if "LayerClip" in clips else [])]


def _arguments(
    setting: Setting, *, folder: Path | str, seed: int, max_grad_norm: float, tensorboard: bool
) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=setting.steps,
        per_device_train_batch_size=setting.batch_size,
        steps_per_generation=_PARTS,
        num_iterations=_TIMES,
        num_generations=8,
        max_completion_length=NUM_SUMS + 1,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_grad_norm=max_grad_norm,
        seed=seed,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        dataloader_pin_memory=False,
        report_to=["tensorboard"] if tensorboard else [],
        logging_strategy="steps" if tensorboard else "no",
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
    )


def _nowhere(values: Mapping[str, float], step: int) -> None:
    pass


class _Watch(TrainerCallback):
    """Calls a run off that has collapsed."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the rewards."""
        control.should_training_stop |= collapsed_at(self._rewards.means) is not None


def _table(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    # Few passes are enough for the kind of a spike.
    setting = dataclasses.replace(setting, max_probes=6)
    jobs = [(name, seed, setting) for seed in options.seeds for name in ARMS]
    with multiprocessing.get_context("spawn").Pool(options.processes, initializer=_prepare) as pool:
        runs: dict[str, list[Run]] = {name: [] for name in ARMS}
        for name, run in pool.imap_unordered(_train, jobs):
            runs[name].append(run)
            say(f"{name}, seed {run.seed}: {run.describe()}")
    report = {"setting": {**dataclasses.asdict(setting), "torch": torch.__version__}, "arms": summarize(runs)}
    show_table(report)
    if options.picture is not None:
        draw(report, options.picture)
    return report


def _prepare() -> None:
    # Runs side by side: more threads would wait for each other.
    torch.set_num_threads(1)
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    _silence()


def _silence() -> None:
    # Of transformers and TRL about each other, and of tokens that a tiny tokenizer does without.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", module=r"transformers|trl")


def _train(job: tuple[str, int, Setting]) -> tuple[str, Run]:
    name, seed, setting = job
    arm = ARMS[name]
    with tempfile.TemporaryDirectory() as folder:
        kinds = list(KINDS) if arm.has_faults else []
        clip = arm.max_grad_norm
        return name, train(arm.clips, kinds=kinds, seed=seed, max_grad_norm=clip, setting=setting, folder=folder)


if __name__ == "__main__":
    _silence()
    main()
