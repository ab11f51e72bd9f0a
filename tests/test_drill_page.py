"""The page on drills: its file loads, and its tables have every kind and field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from stabilizer.callbacks import DrillCallback, load_callbacks
from stabilizer.faults import KINDS, Fault, parse_faults
from stabilizer.faults.tables import FIELDS
from tests.environments import ROOT

PAGE = (ROOT / "docs" / "callbacks" / "drill.md").read_text(encoding="utf-8")


def test_the_file_gives_callbacks(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "drill.yaml"
    path.write_text(text)
    [drill] = [callback for callback in load_callbacks(path) if isinstance(callback, DrillCallback)]
    assert [fault.kind for fault in drill.faults] == ["nan_gradient", "token_loss", "bit_flip", "learning_rate_jump"]


def test_the_code_gives_a_drill() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [listed] = re.findall(r"DrillCallback\(faults=(\[.*\])\)", code)
    namespace: dict[str, object] = {}
    exec(f"faults = {listed}", namespace)  # noqa: S102 (our own page)
    assert parse_faults(namespace["faults"])[0].kind == "layer_spike"  # type: ignore[arg-type]


def test_every_kind_and_every_field_is_there() -> None:
    faults = PAGE.partition("### The faults")[2].partition("### Fields")[0]
    rows = re.findall(r"^\| (`.*?) \|", faults, re.MULTILINE)
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == set(KINDS)
    fields = PAGE.partition("### Fields")[2].partition("## How")[0]
    for field in dataclasses.fields(Fault):
        assert f"`{field.name}`" in fields, field.name


def test_the_defaults_are_those_of_the_code() -> None:
    factors = {kind: fields["factor"] for kind, fields in FIELDS.items() if "factor" in fields}
    assert factors.pop("learning_rate_jump") == 100.0
    assert factors.pop("stuck_loss_scale") == 2.0**-20
    assert set(factors.values()) == {1000.0}
    assert "`factor`: 1000 unless said, of a learning rate 100. Of a loss scale it is the value itself, 2^-20" in PAGE
