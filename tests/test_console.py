"""What a person sees on the console when something happens: one block, once, in colour where there is a terminal."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import LayerClipCallback, LossMeanVarCallback
from stabilizer.callbacks.console import NUM_BLOCKS, RunConsole
from stabilizer.callbacks.run_counts import StepCounts
from stabilizer.callbacks.run_summary import show_summary
from stabilizer.errors import StabilizerWarning
from stabilizer.localize.table import incident_text
from stabilizer.notices import Notice, StabilizerAlarm
from tests.console_runs import ODD, PROGRAM, on_a_terminal, piped, ranks, unread
from tests.incidents import make_incident, make_layers
from tests.localize_loops import Plan, grad_loc, run, written

ESCAPE = "\x1b"


def notice(step: int = 7, *, kind: str = "loss jump", text: str = "the loss jumped", **changes: Any) -> Notice:
    return Notice(kind=kind, step=step, text=f"step {step}: {text}", what=text, **changes)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings, however often the same one comes."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def shown(caught: Sequence[warnings.WarningMessage]) -> str:
    """What the console would have shown of them."""
    alarms = [warning.message for warning in caught if isinstance(warning.message, StabilizerAlarm)]
    return "".join(alarm.shown(width=80, is_coloured=False) for alarm in alarms)


# In a program of its own.


def test_where_there_is_no_terminal_it_is_plain_text_in_80_columns() -> None:
    out, err = piped(PROGRAM, FORCE_COLOR="1", COLUMNS="200")
    assert ESCAPE not in out + err
    assert max(map(len, err.splitlines())) <= 80
    assert ".py:" not in err
    assert "Warning" not in err
    lines = err.splitlines()
    start = lines.index("Non-finite gradient at step 30")
    assert lines[start - 1] == ""
    names = [line.split()[0] for line in lines[start + 1 : start + 8] if re.match(r"  \w", line)]
    assert names == ["what", "where", "next"]
    # What else is wrong with that step is one sentence, and step 33 is within the cooldown of both.
    assert len(re.findall("^Also at step 30, non-finite loss", err, re.MULTILINE)) == 1
    assert "step 33" not in err
    # A kind that comes at every step.
    assert len(re.findall(f"^{ODD.capitalize()} at step", err, re.MULTILINE)) == NUM_BLOCKS
    [last] = re.findall(r"^Odd thing: told 5 times.*\n.*", err, re.MULTILINE)
    assert "odd/log" in last
    assert "further ones are only counted" in " ".join(last.split())
    assert r"odd \x1b[31mxxx" in err
    for words in ("odd thing: 10, steps 40 to 49", "non-finite gradient: 2, steps 30 to 33", "non-finite loss: 2"):
        assert words in out


def test_a_terminal_gets_colours_and_the_same_words() -> None:
    sent = on_a_terminal(PROGRAM)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    assert re.search(r"\x1b\[1;31mNon-finite gradient at step 30", sent)
    assert r"odd \x1b[31mxxx" in sent
    for words in ("Non-finite gradient at step 30", "Also at step 30, non-finite loss", "Stabilizer summary"):
        assert plain.count(words) == 1


WAYS = """
import logging, sys, warnings
import stabilizer.callbacks
from stabilizer.callbacks.console import RunConsole
from stabilizer.errors import warn
from stabilizer.notices import Notice, StabilizerAlarm

def tell(step):
    print(f"<{step}>", file=sys.stderr)
    RunConsole().tell(Notice(kind="loss jump", step=step, text=f"step {step}: it jumped", what="it jumped"))

before = warnings.formatwarning
tell(1)
assert warnings.formatwarning is before
warnings.warn("another's")
warn("one of ours that is no alarm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tell(2)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        tell(3)
    except StabilizerAlarm as alarm:
        print("caught:", alarm, file=sys.stderr)
logging.basicConfig(format="LOG %(name)s %(message)s")
logging.captureWarnings(True)
tell(4)
logging.captureWarnings(False)
warnings.formatwarning = lambda message, *rest: f"MINE {message}\\n"
tell(5)
print("<6>", file=sys.stderr)
warnings.formatwarning = before
tell(1)
tell(1)
"""


def test_filters_errors_loggers_and_own_formats_have_what_they_had() -> None:
    _, err = piped(WAYS)
    parts = re.split(r"<\d>\n", err)
    assert parts[1].startswith("\nLoss jump at step 1\n  what          it jumped\n")
    assert "UserWarning: another's" in parts[1]
    assert "<string>:" in parts[1], "another's warning is shown as ever"
    assert "\nStabilizerWarning: one of ours that is no alarm\n" in parts[1]
    assert parts[2] == ""
    assert parts[3] == "caught: step 3: it jumped\n"
    assert parts[4].startswith("LOG py.warnings \nLoss jump at step 4\n  what ")
    assert parts[5] == "MINE step 5: it jumped\n"
    # Another run in the same process tells the same again.
    assert "".join(parts[6:]).count("Loss jump at step 1\n") == 2


def test_only_rank_0_speaks(tmp_path: Path) -> None:
    (out, err), (other_out, other_err) = ranks(PROGRAM, tmp_path)
    assert "Non-finite gradient at step 30" in err
    assert "Stabilizer summary" in out
    assert other_out == ""
    assert "step" not in other_err
    assert "Odd" not in other_err


INCIDENT = """
import sys
from stabilizer.callbacks.console import RunConsole
from tests.incidents import make_incident
RunConsole().show_incident(make_incident(), None)
print("<end>", file=sys.stderr)
"""


def test_nobody_who_reads_ends_no_run() -> None:
    """As in `python train.py | head`: preflight, summary and an incident go nowhere, and that is no failure."""
    code, err = unread(PROGRAM + INCIDENT, STABILIZER_PREFLIGHT="1")
    assert code == 0, err
    assert err.rstrip().endswith("<end>")
    assert err.count("stdout is a pipe that nobody reads any more") == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert "Non-finite gradient at step 30" in err, "what goes elsewhere is told as ever"


# One thing is told once.


def test_a_spike_that_is_searched_is_one_block_and_short_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caught: list[warnings.WarningMessage]
) -> None:
    callbacks = [
        grad_loc(tmp_path),
        LossMeanVarCallback(windows=(10, 20), warmup_steps=20, every_n_steps=1),
        LayerClipCallback(),
    ]
    run(Plan(factor=float("nan")), callbacks, tells_loss=True)
    out, said = capsys.readouterr().out, shown(caught)
    assert written(tmp_path).keys() == {36}
    assert out.count("Gradient spike at step 36") == 1
    assert re.search(r"^  next +look at the operation there", out, re.MULTILINE)
    assert re.search(rf"^  more\s+{re.escape(str(tmp_path))}/step_36$", out, re.MULTILINE)
    assert "and 2 more in the JSON" in out, "a table has five rows on the console"
    assert "\n\n" not in said
    # That block is on stdout, and this may be in another file.
    assert " ".join(said.split()).startswith("Also at step 36, beside the gradient spike on stdout, non-finite grad")
    assert len(said.splitlines()) <= 5
    # All the same they are warnings, with all their words.
    assert any("not finite in" in str(warning.message) for warning in caught)


def test_incidents_of_thousands_of_layers_and_many_of_them_stay_short(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole()
    layers = tuple(make_layers(*range(1, 3000)))
    for step in range(20):
        console.show_incident(make_incident(step=step, layers=layers), None)
    out = capsys.readouterr().out
    assert len(incident_text(make_incident(layers=layers)).splitlines()) > 50
    blocks = out.split("\nGradient spike at step ")[1:]
    assert len(blocks) == NUM_BLOCKS + 1
    assert max(len(block.splitlines()) for block in blocks) < 50
    assert "further ones are only counted" in " ".join(blocks[-1].split())
    assert len(blocks[-1].splitlines()) <= 3
    assert console.kinds["gradient spike"].num == 20


def test_what_comes_with_a_spike_that_is_only_counted_stands_alone(caught: list[warnings.WarningMessage]) -> None:
    console = RunConsole()
    for step in range(NUM_BLOCKS + 3):
        console.show_incident(make_incident(step=step, optimizer_index=0), None)
        console.tell(notice(step, kind=f"kind {step}"))
    lines = [line for line in shown(caught).splitlines() if "step" in line]
    beside = [f"Also at step {step}, beside the gradient spike on stdout, kind {step}: " for step in range(6)]
    assert [line[: len(start)] for line, start in zip(lines, beside, strict=False)] == beside
    assert lines[6:] == ["Kind 6 at step 6", "Kind 7 at step 7"]


def test_a_search_that_fails_in_the_same_way_again_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console, error = RunConsole(), "rank 0: RuntimeError: the model returns no loss"
    for step in (5, 6):
        console.show_incident(make_incident(step=step, error=error, tokens=(), summary=f"failed ({error})"), None)
    first, second = capsys.readouterr().out.split("\nGradient spike at step ")[1:]
    assert " ".join(first.split()).count(error) == 1
    assert "next          mend what the error says" in first
    assert " ".join(second.split()) == "6, optimizer 1: D, data. The search failed as before"


def test_an_incident_is_one_line_of_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole()
    console.steps[0] = StepCounts(torch.device("cpu"), step=0)
    console.show_incident(make_incident(step=5, summary=f"norm 8 (2): the search failed ({'word ' * 90})"), None)
    capsys.readouterr()
    show_summary(console, folder=lambda: None)
    said = capsys.readouterr().out.partition("incidents")[2].splitlines()
    assert said[0].startswith("     step 5: D, the search failed (word word")
    assert len(said) <= 2


def test_the_same_from_two_optimizers_is_shown_once(caught: list[warnings.WarningMessage]) -> None:
    console = RunConsole()
    for step in (7, 8):
        for number in (0, 1):
            console.tell(notice(step, optimizer_index=number))
    console.tell(notice(8, text="another loss", optimizer_index=1))
    titles = [line for line in shown(caught).splitlines() if "at step" in line]
    assert titles == ["Loss jump at step 7", "Loss jump at step 8", "Loss jump at step 8, optimizer 1"]
    assert console.kinds["loss jump"].num_blocks == 3
    assert console.kinds["loss jump"].num == 2


def test_the_same_from_two_callbacks_is_shown_once(caught: list[warnings.WarningMessage]) -> None:
    console = RunConsole()
    for source in ("One", "Two"):
        console.tell(notice(source=source))
    console.tell(notice(kind="loss drift"))
    console.tell(notice(8))
    assert shown(caught).count("Loss jump at step 7") == 1
    assert shown(caught).count("Also at step 7, loss drift") == 1
    assert "Also at step 7, loss jump" not in shown(caught)
    assert "Loss jump at step 8" in shown(caught)
    assert len(caught) == 4, "whoever catches warnings has all of them"
    assert console.kinds["loss jump"].num == 2


def test_a_fault_on_purpose_hides_nothing(caught: list[warnings.WarningMessage]) -> None:
    console = RunConsole()
    for step in range(10):
        console.tell(notice(step, kind="drill"), is_limited=False)
    console.tell(notice(9))
    assert shown(caught).count("Drill at step") == 10
    assert "Loss jump at step 9" in shown(caught)


def test_it_is_a_warning_of_ours_wherever_it_is_caught() -> None:
    with pytest.warns(StabilizerWarning, match="^step 7: the loss jumped$") as caught:
        RunConsole().tell(notice())
    alarm = caught[0].message
    assert isinstance(alarm, StabilizerAlarm)
    assert alarm.notice is not None
    assert (alarm.notice.kind, alarm.notice.step) == ("loss jump", 7)
