"""Field reports, area cli-config: which callbacks a configuration makes, and with which settings."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback
from tests.lightning_models import PACKAGES
from tests.test_arguments import CLASSES, assert_defaults_change_nothing
from tests.test_config import same
from tests.test_lightning_cli import (
    EXPECTED,
    LOSSES,
    NORMS,
    ClassArguments,
    Defaults,
    derived,
    make_cli,
    ours,
    saved_and_read,
    write,
)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("form", ["file", "command line"])
def test_B039_an_appended_callback_stands_behind_those_of_the_first_file(
    form: str, package: str, tmp_path: Path
) -> None:
    if form == "file":
        arguments = write(tmp_path, a=NORMS, b=LOSSES % "+")
    else:
        append = "--trainer.callbacks+=stabilizer.callbacks.LossMeanVarCallback"
        arguments = [*write(tmp_path, a=NORMS), append]
    assert same(ours(make_cli(package, arguments)), [EXPECTED, LossMeanVarCallback()])


@pytest.mark.parametrize("package", PACKAGES)
def test_B039_of_plain_lists_the_last_one_wins(package: str, tmp_path: Path) -> None:
    found = ours(make_cli(package, write(tmp_path, a=NORMS, b=LOSSES % "")))
    assert [type(one) for one in found] == [LossMeanVarCallback]


@pytest.mark.parametrize("name", CLASSES)
def test_B065_a_default_that_is_said_is_the_default(name: str, tmp_path: Path) -> None:
    assert_defaults_change_nothing(name, tmp_path)


@pytest.mark.parametrize("kind", [Defaults, ClassArguments])
@pytest.mark.parametrize("package", PACKAGES)
def test_B113_callbacks_set_in_code_are_in_the_saved_configuration(package: str, kind: type, tmp_path: Path) -> None:
    base = derived(package, kind)
    cli = make_cli(package, [], base=base)
    content, again = saved_and_read(package, cli, tmp_path, base)
    found = content["norms"] if kind is ClassArguments else content["trainer"]["callbacks"][0]["init_args"]
    # Every argument, those with default values included.
    assert found.keys() == inspect.signature(GradNormCallback).parameters.keys()
    assert len(again) == 1
    assert same(again, ours(cli))
