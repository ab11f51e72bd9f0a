"""The base installation, without any host, imports and works."""

from __future__ import annotations

import email
import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from tests.environments import build, closure, copy_tree, install_wheel, make_environment, run_python

HOSTS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "trl")

NO_HOST = f"""
import importlib.util
found = [name for name in {HOSTS} if importlib.util.find_spec(name)]
assert not found, found
import stabilizer
from stabilizer.callbacks import GradNormCallback, StabilizerCallback
assert issubclass(GradNormCallback, StabilizerCallback)
GradNormCallback()
from stabilizer.callbacks import *
try:
    from stabilizer.callbacks import StabilizerTrainerCallback
except ImportError as error:
    assert 'pip install "torch-stabilizer[transformers]"' in str(error), error
else:
    raise AssertionError("there is no transformers")
"""

USES_CORE = """
import torch
from stabilizer import GradientStore, ParameterIndex
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
model(torch.ones(2, 4)).sum().backward()
store = GradientStore(ParameterIndex(model))
store.measure(0)
view = store.view("block", 2)
want = torch.stack([torch.cat([p.grad.flatten() for p in layer.parameters()]).norm() for layer in model])
torch.testing.assert_close(view.norms, want)
torch.testing.assert_close(view.total_norm, want.norm())
print(*view.layer_names)
"""

USES_BASE_REQUIREMENTS = """
import jsonargparse, rich, tensorboard, torchmetrics
from torch.utils.tensorboard import SummaryWriter
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    wheel = build(copy_tree(folder / "tree"), folder / "wheel", kind="wheel")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
    site = make_environment(folder / "environment", distributions=closure(requirements))
    install_wheel(wheel, site)
    return folder / "environment"


def test_the_running_environment_has_a_host() -> None:
    # Else the tests below would say nothing.
    assert importlib.metadata.version("lightning")
    assert importlib.metadata.version("pytorch-lightning")


def test_callbacks_import_without_a_host(bare: Path, tmp_path: Path) -> None:
    run_python(bare, NO_HOST, cwd=tmp_path)


def test_the_core_works_without_a_host(bare: Path, tmp_path: Path) -> None:
    assert run_python(bare, USES_CORE, cwd=tmp_path).split() == ["0", "1"]


def test_base_requirements_are_there(bare: Path, tmp_path: Path) -> None:
    run_python(bare, USES_BASE_REQUIREMENTS, cwd=tmp_path)
