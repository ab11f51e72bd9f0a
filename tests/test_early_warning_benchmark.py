"""What the report on early warning counts, on runs that are made up."""

from __future__ import annotations

import math

import pytest

from benchmarks.early_warning import CHANNELS, FROZEN_ON, SEEDS, TRIED_ON, crossing, false_crossings, frozen, tables
from benchmarks.unstable_runs import KINDS, Run


def made_up(kind: str, seed: int, *, excesses: dict[int, float] | None = None, alarm: int | None = None) -> Run:
    """A run of 1,000 steps, looked at every fifth, in which all channels have these excesses and else 0."""
    steps = list(range(0, 1000, 5))
    values = [(excesses or {}).get(step, 0.0) for step in steps]
    alarms = [] if alarm is None else [(alarm, "drift")]
    return Run(kind, seed, 700, steps, dict.fromkeys(CHANNELS, values), [2.0] * 1000, alarms)


def test_a_threshold_is_the_largest_excess_that_lasted_two_looks() -> None:
    runs = [made_up("healthy", 0, excesses={600: 3.0}), made_up("healthy", 1, excesses={600: 0.4, 605: 0.3})]
    assert frozen(runs, settled=500) == dict.fromkeys(CHANNELS, 0.3)
    early = made_up("healthy", 2, excesses={100: 9.0, 105: 9.0})
    assert frozen([*runs, early], settled=500) == dict.fromkeys(CHANNELS, 0.3)


def test_a_crossing_is_that_of_the_second_look_and_before_the_end() -> None:
    run = made_up("learning_rate", 0, excesses={700: 1.0, 710: 1.0, 715: 1.0})
    assert crossing(run, "layers", threshold=0.5, start=700, end=1000) == 715
    assert crossing(run, "layers", threshold=0.5, start=700, end=715) is None
    assert crossing(run, "layers", threshold=1.0, start=700, end=1000) is None


def test_a_rise_counts_once_however_long_it_lasts() -> None:
    long = made_up("healthy", 5, excesses=dict.fromkeys(range(600, 700, 5), 1.0))
    twice = made_up("healthy", 6, excesses={600: 1.0, 605: 1.0, 700: 1.0, 705: 1.0, 300: 1.0, 305: 1.0})
    assert false_crossings([long, twice], "variance", threshold=0.5, settled=500) == (3, 1000)


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_report_tells_leads_and_what_was_not_seen(is_seen: bool) -> None:
    healthy = [made_up("healthy", seed) for seed in FROZEN_ON + TRIED_ON]
    excesses = {750: 1.0, 755: 1.0} if is_seen else {}
    others = [made_up(kind, seed, excesses=excesses, alarm=855) for kind in KINDS[1:] for seed in SEEDS]
    report = tables([*healthy, *others])
    assert report.count("155 steps after the start") == 9
    assert report.count("100 before") == (27 if is_seen else 0)
    assert report.count("median 100, 100 to 100; 3 of 3") == (9 if is_seen else 0)
    assert report.count("0 of 3") == (0 if is_seen else 9)


def test_what_is_not_known_crosses_nothing() -> None:
    run = made_up("healthy", 0, excesses={600: math.nan, 605: math.nan})
    assert frozen([run], settled=500) == dict.fromkeys(CHANNELS, 0.0)
