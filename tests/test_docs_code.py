"""Every Python and YAML block of every page, run as it stands."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs_blocks import commands, pages, program, read_blocks
from tests.docs_runner import run_page
from tests.environments import ROOT

PAGES = [str(path.relative_to(ROOT)) for path in pages()]
LANGUAGES = {"python", "yaml", "console", "text", "math", "toml", "json", "diff", "{eval-rst}", "{toctree}"}


def write(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(textwrap.dedent(text), encoding="utf-8")
    return page


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / page)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    drawn_on_github = {"mermaid"} if "/" not in page else set()
    for block in read_blocks(ROOT / page):
        assert block.language in LANGUAGES | drawn_on_github, f"{block}: {block.language!r} is not run by anything"
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "toml" and sys.version_info >= (3, 11):
            import tomllib

            tomllib.loads(block.code)
        elif block.language == "console":
            assert list(commands(block)), f"{block}: no line begins with '$ '"


def test_blocks_share_names_and_keep_the_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = write(
        tmp_path,
        """
        - In a list:

          ```python
          before = next(model.parameters()).sum().item()
          ```

        ```yaml
        # own.yaml: for later
        grad_norm: true
        ```

        <!-- run: rollout -->

        ```python
        from stabilizer.callbacks import load_callbacks
        callbacks = load_callbacks("own.yaml")
        assert before and mask.any()
        assert 0
        ```
        """,
    )
    with pytest.raises(AssertionError) as caught:
        run_page(page)
    assert caught.traceback[-1].lineno + 1 == 19
    assert [block.setup for block in read_blocks(page)] == ["default", "default", "rollout"]
    assert program(read_blocks(page)[:1]).splitlines()[4] == "before = next(model.parameters()).sum().item()"


def test_a_callback_that_fails_fails_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = write(
        tmp_path,
        """
        ```python
        from stabilizer.callbacks import StabilizerCallback, attach

        class Broken(StabilizerCallback):
            def on_gradients(self, context):
                raise OSError("a fault of the page")

        with attach(None, model=model, optimizer=optimizer, callbacks=[Broken()], log=writer):
            model(**loader[0]).loss.backward()
            optimizer.step()
        ```
        """,
    )
    with pytest.raises(AssertionError, match="a fault of the page"):
        run_page(page)


def test_the_ranks_of_a_page_have_data_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = write(
        tmp_path,
        """
        <!-- run: ranks -->

        ```python
        import torch.distributed as dist
        found = [None, None]
        dist.all_gather_object(found, int(loader[0]["input_ids"].sum()))
        ```

        Then:

        ```python
        assert found[0] != found[1]
        raise OSError(f"rank {dist.get_rank()} came here")
        ```
        """,
    )
    with pytest.raises(Exception, match=r"rank [01] came here"):
        run_page(page)


def test_a_file_that_is_wrong_fails_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="gradnorm"):
        run_page(write(tmp_path, "```yaml\ngradnorm: true\n```\n"))
    entry = "```yaml\ntrainer: {callbacks: [{class_path: stabilizer.callbacks.GradNorm}]}\n```\n"
    with pytest.raises(SystemExit):
        run_page(write(tmp_path, "<!-- run: lightning-cli -->\n" + entry))
