"""The callbacks through LightningCLI of both packages: files, the command line, code, and saved configurations."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml  # type: ignore[import-untyped]

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, StabilizerCallback
from tests.lightning_models import PACKAGES
from tests.test_config import same

OPTIONS = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
NORMS = """
trainer:
  callbacks:
    - class_path: stabilizer.callbacks.GradNormCallback
      init_args:
        every_n_steps: 5
        layers: [0, -1, head]
        exclude: [x]
        granularity: {attn: attention}
        norm_type: inf
        name: vision
"""
LOSSES = """
trainer:
  callbacks%s:
    - class_path: stabilizer.callbacks.LossMeanVarCallback
"""
EXPECTED = GradNormCallback(
    every_n_steps=5,
    layers=[0, -1, "head"],
    exclude=["x"],
    granularity={"attn": "attention"},
    norm_type="inf",
    name="vision",
)

pytestmark = pytest.mark.parametrize("package", PACKAGES)


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """LightningCLI calls methods of jsonargparse that have new names in later versions."""
    with warnings.catch_warnings():
        for text in ("By default only one JsonargparseDeprecationWarning", ".*deprecated"):
            warnings.filterwarnings("ignore", rf"\s*{text}", category=DeprecationWarning)
        yield


def make_cli(package: str, arguments: list[str], *, base: type | None = None, **options: Any) -> Any:
    """A LightningCLI that has made its Trainer and does nothing with it.

    Args:
        package: One of PACKAGES.
        arguments: Of the command line.
        base: The class.
        **options: Of LightningCLI.
    """
    kind = base or importlib.import_module(f"{package}.cli").LightningCLI
    model = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    with mock.patch.object(sys, "argv", ["train.py", *OPTIONS, *arguments]), without_deprecations():
        return kind(model, run=False, seed_everything_default=False, **options)


def ours(cli: Any) -> list[StabilizerCallback]:
    """The Trainer's callbacks that are of this package."""
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, StabilizerCallback)]


def write(folder: Path, **files: str) -> list[str]:
    """Write configuration files; the arguments that read them."""
    arguments = []
    for name, content in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(content, encoding="utf-8")
        arguments.append(f"--config={path}")
    return arguments


def test_class_path_and_overrides(package: str, tmp_path: Path) -> None:
    files = write(tmp_path, a=NORMS)
    assert same(ours(make_cli(package, files)), [EXPECTED])
    changed = ours(
        make_cli(package, [*files, "--trainer.callbacks.every_n_steps=7", "--trainer.callbacks.layers=[2,a]"])
    )
    assert [(one.every_n_steps, one.layers, one.exclude) for one in changed] == [(7, [2, "a"], ["x"])]


@pytest.mark.parametrize("rest", [[], ["--trainer.callbacks.windows=[5,50]"]])
def test_append_on_the_command_line(package: str, rest: list[str], tmp_path: Path) -> None:
    append = "--trainer.callbacks+=stabilizer.callbacks.LossMeanVarCallback"
    losses = LossMeanVarCallback(windows=(5, 50)) if rest else LossMeanVarCallback()
    assert same(ours(make_cli(package, [*write(tmp_path, a=NORMS), append, *rest])), [EXPECTED, losses])


def test_append_in_a_second_file_and_plain_lists(package: str, tmp_path: Path) -> None:
    appended = ours(make_cli(package, write(tmp_path, a=NORMS, b=LOSSES % "+")))
    assert same(appended, [EXPECTED, LossMeanVarCallback()])
    replaced = ours(make_cli(package, write(tmp_path, a=NORMS, b=LOSSES % "")))
    # As docs/configuration.md says: what both have in common at one place of the list stays.
    common: dict[str, Any] = {
        "every_n_steps": 5,
        "layers": [0, -1, "head"],
        "exclude": ["x"],
        "granularity": {"attn": "attention"},
    }
    assert same(replaced, [LossMeanVarCallback(**common, name="vision")])


class Defaults:
    """Mixed into a LightningCLI: a callback set in code, as a default of the list."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        entry = {"class_path": "stabilizer.callbacks.GradNormCallback", "init_args": {"every_n_steps": 3}}
        parser.set_defaults({"trainer.callbacks": [entry]})


class ClassArguments:
    """Mixed into a LightningCLI: a callback with options of its own."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(GradNormCallback, "norms")
        parser.set_defaults({"norms.every_n_steps": 3})


def derived(package: str, kind: type) -> type:
    """A LightningCLI of a package with a mix-in."""
    return type("CLI", (kind, importlib.import_module(f"{package}.cli").LightningCLI), {})


def saved_and_read(package: str, cli: Any, folder: Path, base: type | None = None) -> tuple[dict[str, Any], list[Any]]:
    """What the saved configuration says, and the callbacks that it makes."""
    path = folder / "saved.yaml"
    # What SaveConfigCallback does.
    with without_deprecations():
        cli.parser.save(cli.config, path, skip_none=False, overwrite=True, multifile=False)
    again = make_cli(package, [f"--config={path}"], base=base)
    return yaml.safe_load(path.read_text(encoding="utf-8")), ours(again)


def test_a_saved_configuration_has_all_and_loads_again(package: str, tmp_path: Path) -> None:
    cli = make_cli(package, [*write(tmp_path, a=NORMS, b=LOSSES % "+")])
    content, again = saved_and_read(package, cli, tmp_path)
    assert same(again, [EXPECTED, LossMeanVarCallback()])
    first, second = (entry["init_args"] for entry in content["trainer"]["callbacks"])
    assert (first["history"], first["layers"], first["strict"]) == (1024, [0, -1, "head"], False)
    assert (second["windows"], second["on_alarm"], second["cooldown_steps"]) == ([100, 1000], ["log"], 100)


ACTIONS = """
trainer:
  callbacks:
    - class_path: stabilizer.callbacks.LossMeanVarCallback
      init_args:
        on_alarm:
          - log
          - {name: lower_lr, factor: 0.1}
          - builtins.print
          - {name: save_checkpoint}
"""


def test_actions_at_an_alarm(package: str, tmp_path: Path) -> None:
    expected = LossMeanVarCallback(
        on_alarm=["log", {"name": "lower_lr", "factor": 0.1}, print, {"name": "save_checkpoint", "max_saves": 3}]
    )
    cli = make_cli(package, write(tmp_path, a=ACTIONS))
    assert same(ours(cli), [expected])
    assert same(saved_and_read(package, cli, tmp_path)[1], [expected])
    with pytest.raises(ValueError, match=r"'lower_rl': allowed are .*\"lower_lr\".*; the closest is lower_lr"):
        make_cli(package, write(tmp_path, b=ACTIONS.replace("- log", "- lower_rl")))


def test_set_in_code_is_saved(package: str, tmp_path: Path) -> None:
    for kind in (Defaults, ClassArguments):
        base = derived(package, kind)
        cli = make_cli(package, [], base=base)
        assert same(ours(cli), [GradNormCallback(every_n_steps=3)])
        content, again = saved_and_read(package, cli, tmp_path, base)
        assert same(again, ours(cli))
        found = content["norms"] if kind is ClassArguments else content["trainer"]["callbacks"][0]["init_args"]
        assert (found["every_n_steps"], found["history"], found["layer_every_n_steps"]) == (3, 1024, 10)


def test_objects_in_trainer_defaults_run(package: str) -> None:
    cli = make_cli(package, [], trainer_defaults={"callbacks": [GradNormCallback(every_n_steps=3)]})
    assert same(ours(cli), [GradNormCallback(every_n_steps=3)])


def test_a_run_of_a_saved_configuration(package: str, tmp_path: Path) -> None:
    options = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    options += ["--trainer.logger.class_path=CSVLogger", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    options += ["--trainer.enable_progress_bar=false", "--trainer.callbacks=stabilizer.callbacks.LossMeanVarCallback"]
    cli = make_cli(package, options)
    with without_deprecations():
        cli.trainer.fit(cli.model)
    again = make_cli(package, [f"--config={cli.trainer.log_dir}/config.yaml"])
    assert same(ours(again), [LossMeanVarCallback()])
