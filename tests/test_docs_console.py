"""Every command of every page: ours with the options that they have, others with names that exist."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from stabilizer import cli
from tests.docs_blocks import Block, commands, pages, read_blocks
from tests.environments import ROOT

BLOCKS = {str(block): block for page in pages() for block in read_blocks(page) if block.language == "console"}
#: Programs of others, of which the name is all that is checked.
OTHERS = {"tensorboard", "torchrun", "accelerate", "git", "cd", "source"}
SECONDS = 60


@functools.lru_cache
def help_of(module: str) -> str:
    """What a module prints for `--help`, without a process of its own."""
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [module, "--help"]),
        contextlib.redirect_stdout(output),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".*found in sys.modules", category=RuntimeWarning)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None), f"python -m {module} --help ends with {ended.value.code}"
    return output.getvalue()


def extras() -> set[str]:
    """Those of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return set(
        re.findall(
            r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE
        )
    )


def environments() -> set[str]:
    """Those of tox.ini, the default list's too."""
    text = (ROOT / "tox.ini").read_text(encoding="utf-8")
    listed = re.search(r"^env_list = (.*)$", text, re.MULTILINE)
    return {*re.findall(r"^\[testenv:(\w+)\]", text, re.MULTILINE), *(listed[1] if listed else "").split(", ")}


def check(words: list[str]) -> None:
    """Fail where a command could not be given as it stands.

    Args:
        words: Of the command.
    """
    program, rest = words[0], words[1:]
    if program == "stabilizer" or words[:3] == ["python", "-m", "stabilizer"]:
        _check_ours(rest if program == "stabilizer" else words[3:])
    elif words[:2] == ["python", "-m"] and words[2].startswith(("stabilizer.", "benchmarks")):
        _check_options(words[2], words[3:])
    elif words[:2] == ["python", "-m"]:
        assert words[2] in {"pytest", "venv", "pip", "tests.gradloc_page", "tests.strategy_table"}, words
    elif program == "python":
        assert rest[0].endswith(".py")
        # In no folder: the reader's own.
        assert "/" not in rest[0] or (ROOT / rest[0]).is_file(), words
    elif program == "pip":
        named = [extra for word in rest for found in re.findall(r"\[([\w,]+)\]$", word) for extra in found.split(",")]
        assert set(named) <= extras(), words
        assert all((ROOT / rest[at + 1]).is_file() for at, word in enumerate(rest) if word == "-c"), words
    elif program == "tox":
        assert {
            name for at, word in enumerate(rest) if word == "-e" for name in rest[at + 1].split(",")
        } <= environments()
    elif "/" in program:
        assert (ROOT / program).is_file(), words
    else:
        assert program in OTHERS, f"{program!r} is not known"


def _check_ours(rest: list[str]) -> None:
    if "--version" in rest or "--help" in rest:
        assert cli_of(rest) == 0
        return
    # A folder of the reader's.
    files = {word for word in rest if word.endswith((".yaml", ".json"))}
    for file in files:
        Path(file).write_text("{}", encoding="utf-8")
    cli._parse(rest)


def cli_of(rest: list[str]) -> int:
    """The exit status of what ends by itself."""
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        cli.main(rest)
    return int(ended.value.code or 0)


def _check_options(module: str, rest: list[str]) -> None:
    """A module without options of its own may have no `--help`, which would train: it must be there."""
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    if not options:
        assert importlib.util.find_spec(module) is not None
        return
    known = set(re.findall(r"--[\w-]+", help_of(module)))
    assert options <= known, f"{module}: {options - known} are no options"


@pytest.mark.parametrize("name", BLOCKS)
def test_commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = BLOCKS[name]
    monkeypatch.chdir(tmp_path)
    found = list(commands(block))
    assert found, "no line begins with '$ '"
    for words in found:
        check(words)
        if block.own_setup == "shell":
            _run(block, words)


def _run(block: Block, words: list[str]) -> None:
    command = [sys.executable, "-m", *words] if words[0] == "stabilizer" else [sys.executable, *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{block}: {words}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "line",
    [
        "stabilizer demo --no-such-option 3",
        "stabilizer demos",
        "python -m stabilizer.examples.bad_token --no-such-option",
        "python -m stabilizer.examples.no_such",
        'pip install ".[no_such]"',
        "tox -e no_such",
        "scripts/no_such",
        "no_such_program",
    ],
)
def test_a_wrong_command_is_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ A=1 {line}\noutput\n```\n", encoding="utf-8")
    [words] = commands(read_blocks(page)[0])
    with pytest.raises((AssertionError, cli.UsageError, ModuleNotFoundError)):
        check(words)
