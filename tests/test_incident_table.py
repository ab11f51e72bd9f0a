"""What a person reads of an incident: a sentence and a table."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from stabilizer.console import printable
from stabilizer.localize.incident import Incident, Origin
from stabilizer.localize.markdown import incident_markdown
from stabilizer.localize.rows import short_token
from stabilizer.localize.summary import summarize
from stabilizer.localize.table import incident_advice, incident_text, print_incident
from tests.incidents import make_incident, make_layers, make_token

NAN, INF = math.nan, math.inf


# Its sentence.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["812.4", "step 412", "27.9", "2 tokens at rank 1, micro-batch 2, row 3", "without them", "at most 4.7"]),
        ({"tokens": (make_token(),)}, ["token ' sat' at rank 1, micro-batch 2, row 3, position 77", "without it"]),
        ({"tokens": (make_token(position=None, text=None),)}, ["sample at rank 1, micro-batch 2, row 3 is"]),
        ({"tokens": (make_token(), make_token(row=4))}, ["2 tokens at rank 1, micro-batch 2 are"]),
        ({"tokens": (make_token(), make_token(rank=4))}, ["2 tokens on 2 ranks are"]),
        ({"counterfactual_norm": None}, ["are behind it"]),
        (
            {"reproducible": False, "replayed_norm": 5.5},
            ["not reproducible", "the local norm of rank 1, micro-batch 2 was 1625, and 5.5 in a replay", "hardware"],
        ),
        ({"reproducible": False, "replayed_norm": 5.5, "local_norm": None}, ["replay of a micro-batch gave 5.5"]),
        ({"reproducible": False, "replayed_norm": None}, ["own gradients are too small"]),
        ({"tokens": ()}, ["the gradient grows in layers.0 at rank 1, micro-batch 2, row 3, position 77"]),
        (
            {"tokens": (), "origin": Origin(layer="h.3", kind="nonfinite", value=NAN)},
            ["the first value that is not finite is in h.3 at rank 0, micro-batch 0"],
        ),
        ({"tokens": (), "origin": None, "type": "X"}, ["no token did this", "layers.0, 40 times"]),
        ({"tokens": (), "origin": None}, ["the budget ended after 3 passes", "among 9"]),
        ({"tokens": (), "origin": None, "is_complete": True}, ["no set of tokens", "layers.0"]),
        ({"error": "rank 1 failed"}, ["the search failed (rank 1 failed)"]),
    ],
)
def test_the_sentence(changes: dict[str, Any], words: list[str]) -> None:
    sentence = summarize(make_incident(**{"error": None, **changes}))
    for word in words:
        assert word in sentence
    assert "\n" not in sentence


# Its table.


def test_the_table_is_read_without_colour_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_incident(make_incident())
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 80
    assert [line.rstrip() for line in output.splitlines()] == incident_text(make_incident()).splitlines()
    for word in (
        "step 412",
        "optimizer 1",
        "812.4",
        "27.9",
        "AdaptiveClipThreshold",
        "What, where, proof.",
        "at most 4.7",
    ):
        assert word in output
    assert "yes: local norm 1625, replayed 1625 (rank 1, micro-batch 2)" in output
    for word in ("search ended", "drop_tokens", "rank 1 failed", "the LM head is outside", "' sat'", "97.0 %"):
        assert word in output
    for word in ("the cat>>> sat<<< on", "layers.0", "0:1, 2", "1625", "growth", "2:5", "-1.5", "4 passes to rebuild"):
        assert word in output


def test_what_is_not_known_takes_no_room() -> None:
    text = incident_text(Incident(step=7, type="D", observed_norm=NAN, threshold=INF))
    for word in ("None", "Tokens", "Layers", "without them", "reproducible", "optimizer", "begins", "note"):
        assert word not in text
    assert "norm          nan\n" in text


def test_text_of_a_token_changes_nothing_on_a_terminal() -> None:
    nasty = "\x1b[31m\r\n\x07[bold]\u202e\ud800"
    incident = make_incident(
        tokens=(make_token(text=nasty, context=f"a>>>{nasty}<<<b"),), notes=(nasty,), summary=nasty
    )
    text = incident_text(incident)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert printable(nasty) == r"\x1b[31m\r\n\x07[bold]\u202e\ud800"


def test_text_of_a_token_is_no_markup() -> None:
    incident = make_incident(tokens=(make_token(text="[b]x", context="[red]y"),), summary="[u]z", notes=("[i]w",))
    text = incident_text(incident)
    for word in ("'[b]x'", "[red]y", "[u]z", "[i]w"):
        assert word in text


@pytest.mark.parametrize("write", [incident_text, incident_markdown])
def test_long_texts_are_cut_around_the_token(write: Callable[[Incident], str]) -> None:
    """What stands next to the token stays, with its marks."""
    token = make_token(text="bad", context=f"{'a' * 9000} here>>>bad<<<there {'b' * 9000}")
    text = write(make_incident(tokens=(token,)))
    assert "here>>>bad<<<there" in "".join(html.unescape(text).split())
    assert text.count("a") < 200
    longest = make_token(text="x" * 10_000, context=f"here>>>{'x' * 10_000}<<<there")
    text = write(make_incident(tokens=(longest,)))
    assert 100 < text.count("x") < 300
    assert "x...<<<there" in "".join(html.unescape(text).split())


@pytest.mark.parametrize("text", ["bad", ">>>x<<<", "<<<", "", "x" * 500])
def test_marks_in_the_data_are_no_marks(text: str) -> None:
    before, after = ">>> print(1)\n>>> ", " <<< 2 >>> 3"
    token = make_token(text=text, context=f"{before}>>>{text}<<<{after}")
    assert token.pieces == (before, text, after)
    assert short_token(token).pieces == (before, text if len(text) < 500 else f"{text[:120]}...", after)
    assert short_token(short_token(token)) == short_token(token)
    assert make_token(context="[red]y").pieces == ("[red]y", "", "")


def test_a_search_without_a_token_sends_nobody_to_tokens() -> None:
    """And what it failed with is said once."""
    error = "rank 0: RuntimeError: no loss"
    failed = make_incident(tokens=(), error=error, summary=f"norm 8: the search failed ({error})")
    assert "look at these tokens" in incident_advice(make_incident(error=None))
    assert incident_advice(failed).startswith("mend what the error says")
    assert "no single token" in incident_advice(make_incident(tokens=(), error=None))
    assert " ".join(incident_text(failed).split()).count(error) == 1
    assert error in " ".join(incident_text(make_incident(error=error)).split())


def test_an_output_that_knows_ascii_only() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_incident(make_incident(tokens=(make_token(text="caf\u00e9 \u65e5"),)), Console(file=stream, width=80))
    stream.seek(0)
    assert r"\xe9" in stream.read()


def test_many_tokens_and_layers_are_cut_and_counted() -> None:
    text = incident_text(
        make_incident(tokens=tuple(make_token(row=row) for row in range(50)), layers=tuple(make_layers(*range(1, 90))))
    )
    assert "Tokens (50)" in text
    assert "and 30 more in the JSON" in text
    assert "and 69 more in the JSON" in text
    layers = text.split("Layers")[1].splitlines()
    assert layers[2].split()[0] == "88"  # the largest ratio
