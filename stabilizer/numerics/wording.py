"""What is said of each verdict, and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from stabilizer.numerics.finding import Verdict

__all__ = [
    "PARAMETER_REMEDY",
    "SCALE_REMEDIES",
    "SLOW_REMEDY",
    "UNDERFLOW_REMEDY",
    "remedy_for",
    "verdict_text",
]

_TEXTS: dict[Verdict, str] = {
    "repeats": "run again {times}, it came out the same: the data or the code, not the machine",
    "nondeterministic": "run again {times}, it came out differently: numerics that are not deterministic",
    "transient": "run again {times}, it came out in order: it does not repeat, which points to the machine",
    "scaler_overflow": "run again with a very low loss scale, it is finite: an overflow, no NaN of the model",
    "unknown": "whether it repeats is not known: {reason}",
}
_REMEDIES: dict[Verdict, str] = {
    "repeats": "look at the data of this micro-batch, then at the code that makes the value",
    "nondeterministic": (
        "look for kernels that read what was never written, races and atomic additions: "
        "torch.use_deterministic_algorithms(True) names some of them"
    ),
    "transient": (
        "look at the ECC counts, the temperature and the kernel log (Xid) of that host: nvidia-smi -q -d "
        "ECC,TEMPERATURE; if the same rank is named again, take the machine out"
    ),
    "scaler_overflow": "lower the loss or the learning rate of the layers that overflow, or train in bfloat16",
    "unknown": "look at the data of this step, and at the layer that is named",
}
#: Of parameters and buffers that are not finite, or have an element out of all proportion.
PARAMETER_REMEDY = (
    "every step from here on is lost: go back to a checkpoint from before it, and look at the step that wrote it "
    "(a step that was not skipped, a flipped bit, code that changes weights)"
)
#: Of collectives that take many times their usual time.
SLOW_REMEDY = "look at that rank's data loader and machine (clocks, temperature, ECC), then at the network between them"
#: Of gradients that half precision loses.
UNDERFLOW_REMEDY = (
    "let the loss scale grow (a larger init_scale, a smaller growth_interval, fewer overflows), or train in bfloat16"
)
#: By what `ScaleHistory.see` returns.
SCALE_REMEDIES = {
    "overflows": (
        "no loss scale helps here: find the layer whose activations or gradients leave float16 (65504), or train in "
        "bfloat16"
    ),
    "floor": (
        "a scale under 1 makes small gradients smaller still: the gradients are too large for float16 or not finite "
        "at all; look at the layer that overflows, or train in bfloat16"
    ),
    "ceiling": (
        "nothing overflows at such a scale, so nothing here is computed in float16: leave the GradScaler out "
        "(bfloat16 and float32 need none) before it reaches infinity"
    ),
}


def verdict_text(verdict: Verdict, *, num_replays: int, reason: str = "") -> str:
    """The verdict in words.

    Args:
        verdict: It.
        num_replays: How often it was run again.
        reason: Why that is not known.

    Example:
        >>> verdict_text("unknown", num_replays=0, reason="nothing here can run it again")
        'whether it repeats is not known: nothing here can run it again'
    """
    times = "once" if num_replays == 1 else "twice" if num_replays == 2 else f"{num_replays} times"
    return _TEXTS[verdict].format(times=times, reason=reason)


def remedy_for(verdict: Verdict, *, machines: Sequence[str] = (), has_tokens: bool = False) -> str:
    """What helps.

    Args:
        verdict: Of the replays.
        machines: What the suspicious ranks' machines say.
        has_tokens: Whether GradLoc is asked for the token.
    """
    told = _REMEDIES[verdict]
    if verdict == "repeats" and not has_tokens:
        told += "; GradLocCallback beside this callback names the tokens"
    return told + (f" ({'; '.join(machines)})" if machines else "")
