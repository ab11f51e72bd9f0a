#!/usr/bin/env python
"""What importance ratios cost, beside one softmax over a vocabulary of 32k for the same tokens.

python benchmarks/rollout.py           # everything
python benchmarks/rollout.py --check   # exit status 1 if a target is missed
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.command import command_line  # noqa: E402
from benchmarks.timing import Figure, threads, time_in_turn  # noqa: E402
from stabilizer import rollout  # noqa: E402

__all__ = ["ROWS", "main", "one_process"]

TITLE = "What importance ratios cost"
#: Of one softmax, for all of it together.
TARGET = 0.05
VOCABULARY = 32_000


def one_process(*, tiny: bool = False) -> list[Figure]:
    """1e5 tokens in sequences of 2000.

    Args:
        tiny: Try it out.

    Returns:
        Times of parts and of all of it in times of one softmax; all of it with a target.
    """
    num_sequences, length, piece, vocabulary = (2, 50, 16, 100) if tiny else (50, 2000, 2048, VOCABULARY)
    train = -torch.rand(num_sequences, length) * 5
    others = {"logp_rollout": train + torch.randn_like(train) * 0.05, "mask": torch.rand_like(train) < 0.9}
    mask = others["mask"]
    # All logits at once would be 12.8 GB; a piece is larger than any cache, so that its time scales.
    logits = torch.randn(piece, vocabulary)
    pieces = train.numel() / piece
    token_clip, seq_clip = rollout.TokenClip(mode="icepop"), rollout.SeqClip(ratio="geometric", veto=1e-4)
    log_ratios = rollout.token_log_ratios(train, **others)

    def everything() -> None:
        found = rollout.token_log_ratios(train, **others)
        token_clip(found, mask=mask)
        seq_clip(found, mask=mask)
        rollout.rollout_mismatch(train, **others)

    functions: dict[str, Callable[[], object]] = {
        "everything": everything,
        "statistics": lambda: rollout.rollout_mismatch(train, **others),
        "clips": lambda: (token_clip(log_ratios, mask=mask), seq_clip(log_ratios, mask=mask)),
        "softmax": lambda: torch.softmax(logits, -1),
    }
    time_in_turn(functions, rounds=2)
    samples = time_in_turn(functions, rounds=4 if tiny else 24)
    # Of the same round: what else the machine does is shared.
    medians = {name: statistics.median(values) for name, values in samples.items()}
    smallest = {name: min(values) for name, values in samples.items()}
    what = {
        "everything": "log-ratios, raw statistics, TokenClip and SeqClip",
        "statistics": "raw statistics alone",
        "clips": "TokenClip and SeqClip alone",
    }
    return [
        Figure(
            "one process",
            f"{text} / softmax over {vocabulary} of the same tokens",
            medians[name] / (medians["softmax"] * pieces),
            "ratio",
            TARGET if name == "everything" else None,
            f"{train.numel()} tokens, softmax of {piece} times {pieces:.1f}, medians of n={len(samples[name])}, "
            f"{threads()}",
            {
                "median_seconds": medians,
                "smallest_seconds": smallest,
                "ratio_of_smallest": smallest[name] / (smallest["softmax"] * pieces),
            },
        )
        for name, text in what.items()
    ]


ROWS: dict[str, Callable[..., list[Figure]]] = {"one process": one_process}
main = command_line(ROWS, title=TITLE, name="rollout")


if __name__ == "__main__":
    sys.exit(main())
