"""The parts of docs/callbacks/grad_loc.md and README.md that are made from the code.

`python -m tests.gradloc_page` writes them. The incident is one of `python -m stabilizer.examples.bad_token`, kept in
tests/data, as this version prints it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from stabilizer.localize import incident as incidents
from stabilizer.localize.incident import Incident
from stabilizer.localize.table import incident_text
from tests.environments import ROOT

__all__ = ["PAGES", "made", "replaced"]

#: Page -> what is made in it.
PAGES = {"docs/callbacks/grad_loc.md": ("incident", "schema"), "README.md": ("short",)}

_INCIDENT = ROOT / "tests/data/bad-token-incident.json"
_KINDS = ("Incident", "FoundToken", "LayerReport", "MicroBatchReport", "OtherMicroBatches", "Origin", "CandidateGroup")
_KEYS = {
    "FoundToken": "tokens",
    "LayerReport": "layers",
    "MicroBatchReport": "micro_batches",
    "OtherMicroBatches": "other_micro_batches",
    "Origin": "origin",
}


def made(what: str) -> str:
    """What stands between the marks.

    Args:
        what: "incident", "short" (without the tables of norms) or "schema".
    """
    if what == "schema":
        return "\n\n".join(_table(getattr(incidents, name)) for name in _KINDS)
    text = incident_text(Incident.from_json(_INCIDENT.read_text(encoding="utf-8"))).strip("\n")
    if what == "short":
        text = text.partition("\n\nLocal norms")[0]
    return f"```text\n{text}\n```"


def replaced(page: str, what: str) -> str:
    """A page with one part of it made anew.

    Args:
        page: Its text.
        what: See `made`.
    """
    start, end = f"<!-- {what}:start -->", f"<!-- {what}:end -->"
    head, _, rest = page.partition(start)
    _, found, tail = rest.partition(end)
    if not found or start in tail:
        raise ValueError(f"expected {start} and {end} once each")
    return f"{head}{start}\n\n{made(what)}\n\n{end}{tail}"


def _table(kind: type[Any]) -> str:
    """Every field of a dataclass, with what its docstring says."""
    section = re.search(r"\n {4}Attributes:\n(.*?)\n(?:\n|$)", (kind.__doc__ or "") + "\n", re.DOTALL)
    assert section is not None
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", section[1] + "\n", re.DOTALL | re.MULTILINE)
    described = {name: " ".join(text.split()) for name, text in entries}
    names = [field.name for field in dataclasses.fields(kind)]
    assert set(described) == set(names), kind
    key = _KEYS.get(kind.__name__, "candidates")
    title = "" if kind is Incident else f"In `{key}`:\n\n"
    rows = "".join(f"\n| `{name}` | {described[name]} |" for name in _first(names))
    return f"{title}| key | |\n| --- | --- |{rows}"


def _first(names: list[str]) -> list[str]:
    """In the order of the file, where the schema stands first."""
    return [*(name for name in names if name == "schema"), *(name for name in names if name != "schema")]


def main() -> None:
    """Write the parts."""
    for name, parts in PAGES.items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        for what in parts:
            page = replaced(page, what)
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
