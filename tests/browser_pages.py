"""What the pages of TensorBoard show, read through the shadow roots that it is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.browser import wait_for

__all__ = [
    "Chart",
    "Picture",
    "Text",
    "categories",
    "charts",
    "groups",
    "hparams",
    "open_page",
    "pictures",
    "texts",
]

#: For a page, in seconds: on two busy cores twenty charts take most of a minute.
_PATIENCE = 180.0

#: Finds elements wherever they are; what follows it uses `all`.
_ALL = """
const all = (selector, root = document.body) => {
  const found = [];
  const walk = (node) => {
    if (node.nodeType !== Node.ELEMENT_NODE && node.nodeType !== Node.DOCUMENT_FRAGMENT_NODE) return;
    if (node.matches && node.matches(selector)) found.push(node);
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(root);
  return found;
};
const text = (node) => node ? node.textContent.trim() : "";
// Of the dashboard at hand: those of pages that were open before stay in the document.
const views = () => all("tf-category-paginated-view").filter((view) => view.offsetHeight);
"""

_OPEN_GROUPS = """
views().flatMap((view) => all("button.heading:not([open-button])", view)).forEach((button) => button.click());
return views().length;
"""

_CHARTS = """
return views().flatMap((view) => all(
  "tf-custom-scalar-multi-line-chart-card, tf-custom-scalar-margin-chart-card", view
).map((card) => {
  const chart = all("vz-line-chart2", card)[0];
  const drawn = (selector) => all(selector, chart).filter((path) => path.getTotalLength() > 0).length;
  return {
    page: text(all(".category-name", view)[0]),
    title: text(all("[itemprop=name]", card)[0]),
    points: Object.fromEntries(chart._visibleSeriesCache.map((name) => [name, chart._seriesDataCache[name].length])),
    num_lines: drawn("path.line:not([fill-opacity])"),
    num_bands: drawn("path.area"),
    num_dots: drawn("path.symbol"),
    message: all(".error-content", card).map(text).join(" "),
  };
}));
"""

#: Charts without data count as loaded too.
_ARE_LOADED = """
const charts = views().flatMap((view) => all("vz-line-chart2", view));
return charts.length && charts.every((chart) => chart.hasAttribute("data-loaded-once"));
"""

_PICTURES = """
const images = views().flatMap((view) => all("tf-image-loader", view)).map((loader) => [loader, all("img", loader)[0]]);
if (!images.length || !images.every(([, image]) => image && image.complete)) return null;
return images.map(([loader, image]) => ({
  tag: loader.tag, step: loader._steps[loader._stepIndex].step,
  width: image.naturalWidth, height: image.naturalHeight, num_shown: loader._steps.length,
}));
"""

_TEXTS = """
return views().flatMap((view) => all("tf-text-loader", view).flatMap((loader) =>
  all(".step-container", loader).map((container, place) => {
    const shown = all("tf-markdown-view", loader).filter((markdown) => markdown.offsetHeight)[place];
    const body = all("#markdown", shown)[0];
    const cells = (row) => [...row.cells].map(text);
    return {
      tag: loader.tag, step: Number(text(all(".step-value", container)[0])), text: body.innerText,
      headings: all("h1, h2, h3, h4", body).map(text),
      // TensorBoard itself puts every text into a table of one cell without a head.
      tables: all("table", body).filter((table) => table.tHead).map((table) => [...table.rows].map(cells)),
      code: all("pre code", body).map((code) => code.textContent),
    };
  })));
"""

_TICK_ALL = """
const boxes = all("paper-checkbox", all(".hyperparameters")[0]);
boxes.filter((box) => !box.checked).forEach((box) => box.click());
return boxes.length;
"""

_HPARAMS = """
const grid = all("vaadin-grid#sessionGroupsTable")[0];
const shown = [...grid.querySelectorAll("vaadin-grid-cell-content")].filter((cell) => cell.offsetHeight);
const cells = (kind) => shown.filter((cell) => all(kind, cell).length).map(text);
return {headers: cells(".table-header"), cells: cells(".table-cell:not(.table-header)")};
"""

_GROUPS = """return all(".group-title").map(text);"""

_CATEGORIES = """return views().map((view) => text(all(".category-name", view)[0]));"""


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart of Custom Scalars.

    Attributes:
        page: Heading under which it is.
        title: Above it.
        points: Curve as the legend names it -> number of its points.
        num_lines: Lines that are drawn: with a length.
        num_bands: Areas that are drawn.
        num_dots: Marks of single points and of last ones.
        message: What TensorBoard complains of.
    """

    page: str
    title: str
    points: dict[str, int]
    num_lines: int
    num_bands: int
    num_dots: int
    message: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        tag: Its name.
        step: Of the one that is shown, the last.
        width: In its own pixels; 0 if it is broken.
        height: Likewise.
        num_shown: How many there are, by step.
    """

    tag: str
    step: int
    width: int
    height: int
    num_shown: int


@dataclasses.dataclass(frozen=True)
class Text:
    """One text, as it is rendered.

    Attributes:
        tag: Its name.
        step: Of the text.
        text: All of it.
        headings: Of any depth.
        tables: Those with a head; each as rows of cells.
        code: Blocks of code.
    """

    tag: str
    step: int
    text: str
    headings: list[str]
    tables: list[list[list[str]]]
    code: list[str]


def open_page(driver: Any, address: str, page: str) -> None:
    """Go to a page of TensorBoard, with no other in the document, and without smoothing.

    Args:
        driver: Of `tests.browser.browser`.
        address: Of `tests.browser.tensorboard`.
        page: As after "#".
    """
    # The pages are one document: what an earlier one has made would stay in it.
    driver.get("about:blank")
    driver.get(f"{address}#{page}&_smoothingWeight=0")


def group(driver: Any, title: str) -> Any:
    """The element of one group of cards.

    Args:
        driver: Shows Custom Scalars, Scalars, Images or Text.
        title: Of the group.
    """
    return _run(driver, "return views().find((view) => text(all('.category-name', view)[0]) === arguments[0]);", title)


def text_card(driver: Any, tag: str) -> Any:
    """The element of one text, at its full height and alone on its page.

    Args:
        driver: Shows Text.
        tag: Of the text.
    """
    code = """
    const loaders = all("tf-text-loader"), loader = loaders.find((one) => one.tag === arguments[0] + "/text_summary");
    views().filter((view) => !view.contains(loader)).forEach((view) => { view.style.display = "none"; });
    loaders.filter((one) => one !== loader).forEach((one) => { one.style.display = "none"; });
    all("#steps-container", loader)[0].style.maxHeight = "none";
    return loader;
    """
    return _run(driver, code, tag)


def groups(driver: Any) -> set[str]:
    """Titles of the groups of cards of Time Series.

    Args:
        driver: Shows the page.
    """
    return set(_steady(driver, _GROUPS)) - {"Pinned"}


def categories(driver: Any) -> set[str]:
    """Titles of the groups of cards of Scalars, Images and Text.

    Args:
        driver: Shows the page.
    """
    return set(_steady(driver, _CATEGORIES))


def charts(driver: Any) -> list[Chart]:
    """All charts of Custom Scalars, when they are drawn.

    Args:
        driver: Shows the page.
    """
    wait_for(lambda: _run(driver, _ARE_LOADED), seconds=_PATIENCE)
    return [Chart(**found) for found in _steady(driver, _CHARTS)]


def pictures(driver: Any) -> list[Picture]:
    """All pictures of Images, when they have arrived.

    Args:
        driver: Shows the page.
    """
    _open_groups(driver)
    return [Picture(**found) for found in _steady(driver, _PICTURES)]


def texts(driver: Any) -> list[Text]:
    """All texts of Text.

    Args:
        driver: Shows the page.
    """
    _open_groups(driver)
    return [Text(**found) for found in _steady(driver, _TEXTS)]


def hparams(driver: Any) -> dict[str, str]:
    """The one run of HParams: column -> cell, with all columns; at first the page shows five.

    Args:
        driver: Shows the page.
    """
    wait_for(lambda: _run(driver, _TICK_ALL), seconds=_PATIENCE)
    found = _steady(driver, _HPARAMS)
    assert len(found["headers"]) == len(found["cells"]), f"one run was expected: {found}"
    return dict(zip(found["headers"], found["cells"], strict=True))


def _open_groups(driver: Any) -> None:
    wait_for(lambda: _run(driver, _OPEN_GROUPS), seconds=_PATIENCE)


def _run(driver: Any, code: str, *arguments: Any) -> Any:
    return driver.execute_script(_ALL + code, *arguments)


def _steady(driver: Any, code: str) -> Any:
    """What a page gives when it gives something, and the same twice: curves are drawn after their names."""
    last: list[Any] = [None]

    def is_steady() -> Any:
        before, last[0] = last[0], _run(driver, code)
        return last[0] if before == last[0] else None

    return wait_for(is_steady, seconds=_PATIENCE)
