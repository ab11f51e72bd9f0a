"""docs/comparison.md: what it says of releases that are installed here is tried."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stabilizer
from tests.environments import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


def _version(tool: str) -> str:
    [version] = re.findall(rf"^\| {re.escape(tool)} \| (\S+) \|", PAGE, re.MULTILINE)
    return version


def test_versions_are_those_that_are_tried() -> None:
    assert _version("Lightning (`lightning`)") == importlib.metadata.version("lightning")
    assert _version("stabilizer") == stabilizer.__version__


def test_every_row_has_every_tool() -> None:
    table = PAGE.partition("## What each can do")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    assert {line.count("|") for line in rows} == {9}


def test_lightning_refuses_a_clip_by_norm_under_fsdp1() -> None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.plugins.precision import FSDPPrecision

    with pytest.raises(MisconfigurationException, match="not supported"):
        FSDPPrecision("32-true").clip_grad_by_norm(None, 1.0)


def test_lightnings_norms_raise_under_fsdp2_and_ours_do_not() -> None:
    from lightning.pytorch.utilities import grad_norm
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.randn(2, 4)).sum().backward()
        with pytest.raises(RuntimeError):
            grad_norm(model, 2)
        assert stabilizer.gradient_norms(model).total_norm > 0
    finally:
        dist.destroy_process_group()


def test_lightnings_spike_detection_does_not_resume() -> None:
    from lightning.pytorch.callbacks import SpikeDetection

    detection = SpikeDetection()
    with pytest.raises(AttributeError):
        detection.load_state_dict(detection.state_dict())
