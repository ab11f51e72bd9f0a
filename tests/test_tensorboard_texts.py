"""Text and HParams in TensorBoard: Markdown that the data cannot break, and the configuration of the run."""

from __future__ import annotations

import enum
import html
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    attach,
    load_callbacks,
    recommended,
)
from stabilizer.callbacks.configuration import arguments_of, configuration_text, flat_arguments
from stabilizer.callbacks.run_facts import RunFacts
from stabilizer.callbacks.sinks import LoopSink
from stabilizer.config import FEATURES
from stabilizer.console import printable
from stabilizer.examples.bad_token import Bytes
from stabilizer.localize.markdown import incident_markdown
from stabilizer.markdown import code, note, table
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.event_files import Run, read_run
from tests.incidents import make_incident, make_token
from tests.lightning_models import expected_batches, make_module, make_trainer
from tests.trainer_runs import make_trainer as make_transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what TensorBoard has copied from others
    from tensorboard.plugin_util import markdown_to_safe_html

NASTY = "a|b`c<script>alert(1)</script>\n| *z* _u_ [k](http://x) $\\| \x00\x1b[31m # & &lt; ~~ \u65e5"


def cells(markdown: str) -> list[list[str]]:
    """The cells of all rows of all tables, as TensorBoard shows them."""
    shown = markdown_to_safe_html(markdown)
    rows = re.findall(r"<tr>(.*?)</tr>", shown, flags=re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row, flags=re.DOTALL)] for row in rows]


def test_an_incident_has_headings_and_tables() -> None:
    shown = markdown_to_safe_html(incident_markdown(make_incident()))
    assert shown.startswith("<h3>Gradient spike at step 412, optimizer 1: D, data</h3>")
    titles = re.findall(r"<h4>(.*?)</h4>", shown)
    assert titles == ["Tokens (2)", "Their context", "Undecided", "Local norms of the micro-batches", "Layers"]
    assert shown.count("<table>") == 5
    assert "<pre>" not in shown
    assert "<li><strong>threshold</strong> 27.9, of total (AdaptiveClipThreshold)</li>" in shown


@pytest.mark.parametrize("text", [NASTY, "|", "`", "``` \n```", "<", "\n\n# heading\n", "---", "|---|", ">>>|<<<", ""])
def test_text_of_the_data_stays_in_its_cell(text: str) -> None:
    incident = make_incident(tokens=(make_token(text=text, context=f"before >>>{text}<<< after"),))
    markdown = incident_markdown(incident)
    shown = markdown_to_safe_html(markdown)
    assert shown.count("<table>") == 5
    assert "<script" not in shown
    assert "<a " not in shown
    assert "<em>" not in shown
    rows = cells(markdown)
    token = next(row for row, before in zip(rows[1:], rows, strict=False) if "text" in before)
    heading = next(row for row in rows if "text" in row)
    assert len(token) == len(heading)
    found = token[heading.index("text")].split()
    assert found == f"'{printable(text, limit=298)}'".split()


def test_a_fence_is_longer_than_what_is_in_it() -> None:
    shown = markdown_to_safe_html(code("```\n<script>x</script>\n````\n# end"))
    assert shown.count("<pre>") == 1
    assert "<h1>" not in shown
    assert "&lt;script" in shown
    assert "```\n" in shown


def test_a_note_and_a_table_show_what_they_were_given() -> None:
    shown = markdown_to_safe_html(note("alarm: a_b", "x < y and *z*"))
    assert "<strong>alarm: a&#95;b</strong>" in shown
    assert "x &lt; y and &#42;z&#42;" in shown
    assert cells(table(["a", "b"], [["1", "x|y"]], left=["b"])) == [["a", "b"], ["1", "x|y"]]


def files_of(text: str) -> list[str]:
    """The YAML files in a configuration."""
    return re.findall(r"```yaml\n(.*?)\n```", text, flags=re.DOTALL)


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature != "drill"])
def test_the_configuration_makes_the_same_callback(feature: str, tmp_path: Path) -> None:
    file = tmp_path / "stabilizer.yaml"
    file.write_text(f"{feature}: {{name: 'x: 1', every_n_steps: 7}}\n")
    [callback] = load_callbacks(file)
    [text] = files_of(configuration_text([callback], world_size=1, host="plain"))
    file.write_text(text)
    [again] = load_callbacks(file)
    assert type(again) is type(callback)
    assert again.hyperparameters() == callback.hyperparameters()
    assert arguments_of(again) == arguments_of(callback)
    assert arguments_of(callback)["every_n_steps"] == 7


def test_what_no_file_can_hold_is_a_comment(tmp_path: Path) -> None:
    callbacks = [GradLocCallback(tokenizer=Bytes(), redact=["user"]), GradLocCallback(name="second", max_probes=3)]
    first, second = files_of(configuration_text(callbacks, world_size=2, host="plain"))
    assert "  # tokenizer: an object of stabilizer.examples.bad_token.Bytes" in first
    assert yaml.safe_load(first)["grad_loc"]["redact"] == ["user"]
    assert yaml.safe_load(second)["grad_loc"]["max_probes"] == 3
    row = flat_arguments(callbacks, world_size=2, host="plain")
    assert row["grad_loc[second].max_probes"] == 3
    assert row["world_size"] == 2
    assert all(isinstance(value, bool | int | float | str) for value in row.values())


class Own(StabilizerCallback):
    """A user's own, which knows no `name` and hands on what it does not know."""

    def __init__(self, *, size: float = 1e-5, **others: Any) -> None:
        super().__init__(**others)
        self.size = size


def test_numbers_and_words_of_other_kinds_are_plain_ones() -> None:
    class Mode(str, enum.Enum):
        OBSERVE = "observe"

    callback = AdaptiveClipThreshold(max_threshold=np.float64(2.5), mode=Mode.OBSERVE, name=np.str_("a"))
    found = yaml.safe_load(
        configuration_text([callback], world_size=1, host="plain").split("```")[1].removeprefix("yaml")
    )
    told = found["adaptive_clip"]
    assert told["max_threshold"] == 2.5
    assert (told["mode"], told["name"]) == ("observe", "a")


class Counted(StabilizerCallback):
    """A user's own, whose arguments need no names."""

    def __init__(self, limit: float = 1.0, *rest: int, **others: Any) -> None:
        super().__init__(**others)


def test_a_user_s_own_callback() -> None:
    assert arguments_of(Own(every_n_steps=3)) == {"size": 1e-5, "every_n_steps": 3}
    assert arguments_of(Counted(5.0, 1, 2, name="a")) == {"limit": 5.0, "rest": [1, 2], "name": "a"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'every'"):
        Own(every=3)


def test_a_user_s_own_callbacks_are_comments_in_a_file_that_is_taken(tmp_path: Path) -> None:
    callbacks = [Counted(5.0, every_n_steps=3), Own(), GradNormCallback(history=7), Own(size=2)]
    [text] = files_of(configuration_text(callbacks, world_size=1, host="plain"))
    for lines in (
        "# Counted:\n#   limit: 5.0\n#   every_n_steps: 3",
        "# Own:\n#   size: 1.0e-05",
        "# Own:\n#   size: 2",
    ):
        assert lines in text
    file = tmp_path / "stabilizer.yaml"
    file.write_text(text)
    [again] = load_callbacks(file)
    assert arguments_of(again)["history"] == 7
    [text] = files_of(configuration_text([Own()], world_size=1, host="plain"))
    assert yaml.safe_load(text) is None
    assert "# Own:" in text


def test_what_is_too_large_for_a_text_is_named() -> None:
    ring: list[Any] = []
    ring.append(ring)
    found = [(range(3_000_000), "range with 3,000,000"), ([[0] * 50] * 50, "list with 50"), (ring, "list with 1")]
    for value, what in (*found, ("x" * 5000, "str with 5,000"), (b"abc", "bytes with 3")):
        words = f"an object of builtins.{what} items"
        assert f"# size: {words}\n" in configuration_text([Own(size=value)], world_size=1, host="plain")
        assert flat_arguments([Own(size=value)], world_size=1, host="plain")["Own.size"] == words
    assert arguments_of(Own(size=(many := dict.fromkeys("abc", [1.5] * 500))))["size"] == many


def _callbacks() -> list[StabilizerCallback]:
    return [GradNormCallback(layer_every_n_steps=3, heatmap_every_n_steps=None), LossMeanVarCallback(windows=(2, 4))]


def _lightning(folder: Path, module: Any = None) -> Run:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(folder, name="", version="run")
    trainer = make_trainer(max_steps=3, callbacks=_callbacks(), logger=logger)
    trainer.fit(make_module("transformer") if module is None else module)
    return read_run(folder / "run")


def _accelerate(folder: Path) -> Run:
    accelerator = make_accelerator(log_with=["tensorboard"], project_dir=str(folder))
    accelerator.init_trackers("run", config={"theirs": 1})
    model, optimizer = prepared(accelerator)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=_callbacks()):
        train(accelerator, model, optimizer, [expected_batches("transformer", step)[0] for step in range(3)])
    accelerator.end_training()
    return read_run(folder / "run")


def _plain(folder: Path) -> Run:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        SummaryWriter(str(folder)) as writer,
        attach(None, model=model, optimizer=optimizer, callbacks=_callbacks(), log=writer) as handle,
    ):
        for _ in range(3):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert [path for path in folder.iterdir() if path.is_dir()] == [], "no run of its own"
    return read_run(folder)


def _transformers(folder: Path) -> Run:
    callback = StabilizerTrainerCallback(_callbacks())
    trainer = make_transformers(
        "single", folder, callbacks=[callback], report_to=["tensorboard"], logging_strategy="no"
    )
    trainer.train()
    [found] = {path.parent for path in folder.rglob("events.out.tfevents.*") if "stabilizer" in _tags(path.parent)}
    return read_run(found)


def _tags(folder: Path) -> str:
    return " ".join(read_run(folder).texts)


@pytest.mark.parametrize("host", [_plain, _lightning, _accelerate, _transformers])
def test_every_host_shows_the_configuration(host: Any, tmp_path: Path) -> None:
    run = host(tmp_path)
    [text] = run.texts["stabilizer/config"].values()
    [content] = files_of(text)
    assert yaml.safe_load(content)["grad_norm"]["layer_every_n_steps"] == 3
    assert yaml.safe_load(content)["loss_mean_var"]["windows"] == [2, 4]
    assert f"torch {torch.__version__}" in text
    assert "on 1 process" in text
    assert run.arguments["grad_norm.layer_every_n_steps"] == 3
    assert run.arguments["loss_mean_var.windows"] == "[2, 4]"
    assert run.arguments["versions.torch"] == torch.__version__
    assert run.arguments.keys() <= run.columns


def test_lightning_s_own_arguments_stay(tmp_path: Path) -> None:
    """Theirs come before our first step; both are in the row then, and theirs alone in their file."""
    module = make_module("transformer")
    module.save_hyperparameters({"width": 16, "grad_norm.history": "theirs"})
    run = _lightning(tmp_path, module)
    assert run.arguments["width"] == 16
    assert run.arguments["grad_norm.history"] == "theirs"
    assert run.arguments["grad_norm.layer_every_n_steps"] == 3
    assert {"width", "grad_norm.layer_every_n_steps"} <= run.columns
    assert "layer_every_n_steps" not in (tmp_path / "run" / "hparams.yaml").read_text()
    assert "hp_metric" in run.scalars


def test_nobody_writes_through_us_when_the_run_is_over(tmp_path: Path) -> None:
    """The writer is as it was, after steps and without any."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter(str(tmp_path)) as writer:
        with attach(None, model=model, optimizer=optimizer, callbacks=_callbacks(), log=writer):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert "add_summary" not in vars(writer._get_file_writer())
        facts = RunFacts(_callbacks())
        facts.begin(LoopSink(writer))
        assert "add_summary" in vars(writer._get_file_writer())
        facts.let_go()
        assert "add_summary" not in vars(writer._get_file_writer())


def test_without_a_writer_there_is_nothing(tmp_path: Path) -> None:
    model, rows = torch.nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(None, model=model, optimizer=optimizer, callbacks=recommended(), log=lambda *row: rows.append(row)):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert rows
    assert list(tmp_path.iterdir()) == []
