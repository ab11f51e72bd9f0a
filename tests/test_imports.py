"""`import stabilizer` loads torch and nothing else that takes time."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from tests.environments import ROOT

#: Loaded on first use only. torch itself loads torch.distributed, but not these.
LAZY = (
    "accelerate",
    "jsonargparse",
    "lightning",
    "matplotlib",
    "pytorch_lightning",
    "rich",
    "stabilizer.callbacks",
    "tensorboard",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "torchmetrics",
    "transformers",
)

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
before = set(sys.modules)
import stabilizer
end = time.perf_counter()
print(json.dumps({"torch": middle - start, "stabilizer": end - middle, "new": sorted(set(sys.modules) - before)}))
"""


def _import() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_only_torch_is_loaded() -> None:
    new = _import()["new"]
    assert isinstance(new, list)
    assert "stabilizer.store" in new
    assert [name for name in new if name.startswith(LAZY)] == []


@pytest.mark.alone
def test_import_costs_little_beside_torch() -> None:
    runs = [_import() for _ in range(3)]
    # Both are timed in one process, so that a busy machine slows both.
    ratio = statistics.median(1 + float(str(run["stabilizer"])) / float(str(run["torch"])) for run in runs)
    assert ratio <= 1.3
