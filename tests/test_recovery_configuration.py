"""Conditions and rungs in a YAML file and in LightningCLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from stabilizer.callbacks import CheckpointGuardCallback
from tests.lightning_models import PACKAGES
from tests.test_config import load
from tests.test_lightning_cli import make_cli, ours, write

ARGUMENTS: dict[str, Any] = {
    "conditions": [
        "nonfinite",
        {"name": "loss", "k": 3},
        {"name": "call", "function": "tests.test_recovery_conditions.is_lost"},
    ],
    "ladder": ["alarm", {"name": "roll_back", "max_rollbacks": 2}, "stop"],
    "skip_list": "list.json",
    "max_skips": 7,
}


def test_a_file(tmp_path: Path) -> None:
    [callback] = load(tmp_path, yaml.dump({"checkpoint_guard": ARGUMENTS}))
    assert callback.hyperparameters() == CheckpointGuardCallback(**ARGUMENTS).hyperparameters()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_command_line(tmp_path: Path, package: str) -> None:
    path = "stabilizer.callbacks.CheckpointGuardCallback"
    content = yaml.dump({"trainer": {"callbacks": [{"class_path": path, "init_args": ARGUMENTS}]}})
    [callback] = ours(make_cli(package, write(tmp_path, fit=content)))
    assert callback.hyperparameters() == CheckpointGuardCallback(**ARGUMENTS).hyperparameters()


def test_a_mistake_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stabilizer\.yaml.*ladder: 'rollback': allowed are .* roll_back"):
        load(tmp_path, yaml.dump({"checkpoint_guard": {"ladder": ["rollback"]}}))
