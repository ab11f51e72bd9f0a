"""One sentence for a person: what happened, where, and the proof."""

from __future__ import annotations

from collections.abc import Sequence

from stabilizer.localize.incident import FoundToken, Incident
from stabilizer.localize.rows import number

__all__ = ["summarize"]


def summarize(incident: Incident) -> str:
    """Say in one sentence what an incident has found.

    Args:
        incident: All but its summary.

    Example:
        >>> bad = FoundToken(rank=1, micro_batch=2, row=3, position=77, text=" sat")
        >>> summarize(
        ...     Incident(step=412, type="D", observed_norm=812.4, threshold=9.3, counterfactual_norm=4.7, tokens=(bad,))
        ... )
        "gradient norm 812.4 at step 412 (threshold 9.3): token ' sat' at rank 1, micro-batch 2, row 3, position 77 \
is the cause: without it the norm is 4.7"
    """
    what = f"gradient norm {number(incident.observed_norm)} at step {incident.step}"
    what += f" (threshold {number(incident.threshold)})"
    return f"{what}: {_finding(incident)}"


def _finding(incident: Incident) -> str:
    if incident.error is not None:
        return f"the search failed ({incident.error})"
    if incident.reproducible is False and incident.replayed_norm is None:
        return "the ranks' own gradients are too small for it: it was made after the backward pass, see the notes"
    if incident.reproducible is False:
        return f"not reproducible: {_replay(incident)}; hardware, or code that differs from run to run"
    if incident.tokens:
        return _tokens(incident)
    if incident.origin is not None:
        return _begins(incident)
    if incident.type == "X":
        return f"no token did this; what is left with every token's gradient left out is as large{_layers(incident)}"
    if not incident.is_complete:
        num = sum(group.num_units for group in incident.candidates)
        left = f"; the cause is among {num} of them" if num else ""
        return f"the budget ended after {incident.num_passes} passes before the tokens were known{left}"
    return f"no set of tokens explains it{_layers(incident)}"


def _replay(incident: Incident) -> str:
    replayed = number(incident.replayed_norm)
    if incident.local_norm is None:
        return f"a replay of a micro-batch gave {replayed}"
    place = f"rank {incident.replayed_rank}, micro-batch {incident.replayed_micro_batch}"
    return f"the local norm of {place} was {number(incident.local_norm)}, and {replayed} in a replay"


def _tokens(incident: Incident) -> str:
    tokens = incident.tokens
    one = len(tokens) == 1
    units = ("sample" if tokens[0].position is None else "token") + ("" if one else "s")
    text = f" {tokens[0].text!r}" if one and tokens[0].text is not None else ""
    cause = f"{units}{text} at {_place(tokens[0])}" if one else f"{len(tokens)} {units} {_where(tokens)}"
    if incident.counterfactual_norm is None:
        return f"{cause} {'is' if one else 'are'} behind it"
    bound = "at most " if incident.counterfactual_is_bound else ""
    without = f"without {'it' if one else 'them'} the norm is {bound}{number(incident.counterfactual_norm)}"
    return f"{cause} {'is' if one else 'are'} the cause: {without}"


def _begins(incident: Incident) -> str:
    origin = incident.origin
    assert origin is not None
    verb = "the gradient grows" if origin.kind == "growth" else "the first value that is not finite is"
    row = "" if origin.row is None else f", row {origin.row}"
    position = "" if origin.position is None else f", position {origin.position}"
    return f"{verb} in {origin.layer} at rank {origin.rank}, micro-batch {origin.micro_batch}{row}{position}"


def _place(token: FoundToken) -> str:
    position = "" if token.position is None else f", position {token.position}"
    return f"rank {token.rank}, micro-batch {token.micro_batch}, row {token.row}{position}"


def _where(tokens: Sequence[FoundToken]) -> str:
    """What many tokens have in common, down to the row."""
    for num, names in ((3, ("rank", "micro-batch", "row")), (2, ("rank", "micro-batch")), (1, ("rank",))):
        places = {(token.rank, token.micro_batch, token.row)[:num] for token in tokens}
        if len(places) == 1:
            (place,) = places
            return "at " + ", ".join(f"{name} {value}" for name, value in zip(names, place, strict=True))
    return f"on {len({token.rank for token in tokens})} ranks"


def _layers(incident: Incident) -> str:
    known = [layer for layer in incident.layers if layer.ratio is not None]
    if not known:
        return ""
    worst = max(known, key=lambda layer: layer.ratio or 0.0)
    return f"; largest in {worst.name}, {worst.ratio:.3g} times its usual norm"
