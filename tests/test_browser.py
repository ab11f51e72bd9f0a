"""What a person sees: the pages of a real TensorBoard on a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback
from tests.browser import TEXTS, browser, tensorboard, wait_for
from tests.lightning_models import make_module, make_trainer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LAYERS = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "model.norm", "model.lm_head"]

#: Titles of the groups of cards.
GROUPS = """return [...document.querySelectorAll(".group-title")].map((node) => node.textContent.trim());"""

#: Pictures that have arrived and can be drawn, with their widths, through shadow roots.
PICTURES = """
const found = [];
const walk = (node) => {
  if (node.nodeName === "IMG" && node.complete && node.src.includes("individualImage")) found.push(node.naturalWidth);
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found;
"""


def test_the_pages_of_a_run(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    callbacks = [GradNormCallback(layer_every_n_steps=2)]
    trainer = make_trainer(max_steps=30, callbacks=callbacks, logger=logger, gradient_clip_val=0.5)
    trainer.fit(make_module("transformer"))
    with tensorboard(tmp_path) as address, browser() as driver:
        for check in (_all_layers_are_in_one_chart, _one_group_holds_all_tags, _the_picture_is_drawn):
            check(driver, address)
        assert driver.get_log("browser") == []


def _all_layers_are_in_one_chart(driver: Any, address: str) -> None:
    driver.get(f"{address}#custom_scalars")
    expected = {f"grad_norm/layer/{layer} (run)" for layer in LAYERS}
    expected |= {"Gradient norm of every layer", "Total gradient norm"}
    expected |= {"grad_norm/total (run)", "grad_norm/total_after (run)", "Matches (7)", "Matches (2)"}
    wait_for(lambda: set(driver.execute_script(TEXTS)) >= expected)
    texts = driver.execute_script(TEXTS)
    assert not any("grad_norm/layer_after/" in text for text in texts), "the first chart holds raw norms only"


def _one_group_holds_all_tags(driver: Any, address: str) -> None:
    driver.get(f"{address}#timeseries")
    groups = wait_for(lambda: driver.execute_script(GROUPS))
    assert set(groups) - {"Pinned"} == {"grad_norm"}


def _the_picture_is_drawn(driver: Any, address: str) -> None:
    driver.get(f"{address}#images")
    widths = wait_for(lambda: driver.execute_script(PICTURES))
    assert all(width >= 800 for width in widths)
    assert "grad_norm/heatmap" in driver.execute_script(TEXTS)
