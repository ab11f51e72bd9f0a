"""How Sphinx makes the pages. The source is the whole tree, so that every link between files can be followed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pygments.lexers.special import TextLexer

import stabilizer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "stabilizer"
project_copyright = "the authors of stabilizer"
version = release = stabilizer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "*/README.md"]
exclude_patterns = ["docs/_build", "tests/**", ".*", "*.egg-info", "build", "dist"]

myst_enable_extensions = ["dollarmath"]
# As on GitHub: every heading can be linked to.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# In docstrings a name stands between single backticks.
default_role = "code"
# Docstrings name types of other packages, whose pages are not here. Links between our pages are all checked.
nitpick_ignore_regex = [(r"py:.*", r".*")]

html_theme = "furo"
html_title = "stabilizer"

# Whose methods a reader calls or writes; of the others the class says it all.
WITH_METHODS = ("StabilizerCallback", "StepContext", "LoopHandle", "GradientStore", "NormHistory", "ThresholdRule")
METHOD = re.compile(r"(\w+)\.(\w+)")


def is_skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out methods, but of a few classes."""
    method = METHOD.fullmatch(getattr(obj, "__qualname__", ""))
    return True if what == "class" and method and method[1] not in WITH_METHODS else None


def as_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write absolute values between bars, which reStructuredText would take for its own."""
    lines[:] = [line if line.lstrip().startswith(">>>") else line.replace("|", r"\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Register both, and show drawings that only GitHub makes as the text that they are made from."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("autodoc-skip-member", is_skipped)
    app.connect("autodoc-process-docstring", as_text)
