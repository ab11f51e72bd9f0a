"""verify_checkpoint takes bounded time and memory, whatever stands in a file."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabilizer.checkpoints import archive, verify_checkpoint
from stabilizer.checkpoints.finiteness import PIECE, count_nonfinite
from stabilizer.checkpoints.inert import SavedTensor, read_pickle
from stabilizer.checkpoints.views import ViewCount

HOSTILE = {
    "an index of the memo": b"\x80\x02}r" + struct.pack("<I", 2**31) + b"X",
    "a byte array": b"\x80\x05\x96" + struct.pack("<Q", 2**29) + b"abc.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**36) + b"abc.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**36) + b"X",
    "a deep key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "a key that doubles": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "a set that doubles": b"\x80\x04(\x91" + b"q\x00(h\x00h\x00\x85\x91" * 60 + b".",
    "a storage's name that doubles": b"\x80\x02]" + b"q\x00](h\x00h\x00e" * 60 + b"(X\x01\x00\x00\x00aNNNNtQ.",
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
}

_MEASURE = """
import json, resource, sys, pathlib
from stabilizer.checkpoints import verify_checkpoint
for path in sys.argv[1:]:
    guard = verify_checkpoint(path)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps([guard.verdict, guard.reasons, used]))
"""


def _zip(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return path


def _verified_elsewhere(*paths: Path) -> list[Any]:
    """Verdict, reasons and MB of memory so far: what crashes or takes all memory, does so in another process."""
    command = [sys.executable, "-c", _MEASURE, *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_pickle_that_would_take_all_memory_or_time_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "fine.ckpt")
    paths = [_zip(tmp_path / f"{number}.ckpt", pickled) for number, pickled in enumerate(HOSTILE.values())]
    (_, _, before), *found = _verified_elsewhere(tmp_path / "fine.ckpt", *paths)
    assert len(found) == len(HOSTILE)
    for kind, (verdict, reasons, used) in zip(HOSTILE, found, strict=True):
        assert (verdict, len(reasons)) == ("bad", 1), kind
        assert used < before + 150, (kind, used, before)
    said = dict(zip(HOSTILE, (reasons[0] for _, reasons, _ in found), strict=True))
    assert "tuples nested more than 100 deep" in said["a deep key"]
    assert "tuples nested more than 100 deep" in said["a key that doubles"]
    assert said["deep lists"] == "it is nested more than 1000 deep"


@pytest.mark.parametrize("pickled", [b"\x80\x02\x82\x01.", b"\x80\x02(" * 3 + b"0" * 9])
def test_what_is_no_data_is_one_clear_error(pickled: bytes) -> None:
    with pytest.raises(ValueError, match="its pickle is not whole"):
        read_pickle(io.BytesIO(pickled))


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from stabilizer.checkpoints import inert

    monkeypatch.setattr(inert, "_MAX_OBJECTS", 1000)
    assert len(read_pickle(io.BytesIO(b"\x80\x02(" + b"]" * 900 + b"l."))) == 900
    for many in (b"]" * 1000, b"cany\nname\nq\x00" + b"h\x00)\x81" * 100, b"N" + b"\x94" * 1000):
        with pytest.raises(ValueError, match="more than 1000 objects"):
            read_pickle(io.BytesIO(b"\x80\x02(" + many + b"l."))


def test_names_are_only_made_of_what_has_a_tensor() -> None:
    """Wide in the middle of a long name: as many copies of it as there are values."""
    value: Any = {f"{number}": [number] for number in range(1000)}
    value["weight"] = SavedTensor("0", torch.float32, 4, 0, (1,), (1,))
    for _ in range(20):
        value = {"k" * 100: value}
    assert [name for name, _ in archive.named_tensors(value, "top")] == [
        "top." + "k" * 100 + "." + "k" * 100 + "." + ("k" * 100 + ".") * 18 + "weight"
    ]
    with pytest.raises(ValueError, match="more than 4096 characters"):
        list(archive.named_tensors({"k" * 4000: value}))
    assert not list(archive.named_tensors({"k" * 5000: [1, 2, {"a": 3}]})), "no tensor has that name"


class _Largest(TorchDispatchMode):
    """The largest storage that an operation has made."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("way", ["whole", "transposed", "strided", "half"])
def test_one_nan_in_a_large_tensor_takes_no_copy_of_it(way: str, tmp_path: Path) -> None:
    values = torch.zeros(2048, 6144, dtype=torch.bfloat16 if way == "half" else torch.float32)
    values[2000, 6000] = math.nan
    values[1999, 6001] = math.nan
    seen = {"whole": values, "half": values, "transposed": values.t(), "strided": values[:, ::2]}[way]
    torch.save({"weight": seen}, tmp_path / "large.pt")
    with _Largest() as largest:
        guard = verify_checkpoint(tmp_path / "large.pt")
    number = 1 if way == "strided" else 2
    assert guard.reasons == (f"tensor weight: {number} of {seen.numel()} elements are not finite ({number} NaN)",)
    assert 0 < largest.num_bytes <= 4 * PIECE + 4096, "a piece of 16 MiB; the tensor has 48"


def _views() -> dict[str, torch.Tensor]:
    base = torch.arange(4000, dtype=torch.float32)
    return {
        "whole": base,
        "slice": base[5:77],
        "steps": base[3:900:7],
        "matrix": base[:3000].view(50, 60),
        "transposed": base[:3000].view(50, 60).t(),
        "columns": base[:3000].view(50, 60)[:, 3:20],
        "both": base[:3000].view(50, 60)[::2, 1:50:3],
        "three": base[:3000].view(10, 30, 10)[1:, ::3, 2:5].permute(2, 0, 1),
        "expanded": base[:30:3].expand(4, 10),
        "overlapping": base[:100].unfold(0, 20, 10)[:, :],
        "scalar": base[17],
        "empty": base[:0],
        "one": base[40:41].view(1, 1),
    }


@pytest.mark.parametrize("name", _views())
@pytest.mark.parametrize("piece", [64, 4096, 1 << 20])
def test_a_view_is_counted_as_the_view_itself(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilizer.checkpoints.views._PLACES", 100)
    view = _views()[name]
    storage = view.new_empty(0).set_(view.untyped_storage())
    generator = torch.Generator().manual_seed(0)
    storage[torch.rand(len(storage), generator=generator) < 0.05] = math.nan
    storage[torch.rand(len(storage), generator=generator) < 0.05] = -math.inf
    counted = ViewCount(
        SavedTensor("0", view.dtype, 4 * len(storage), view.storage_offset(), tuple(view.shape), view.stride())
    )
    content = storage.view(torch.uint8)
    for start in range(0, len(content), piece):
        counted.see(content[start : start + piece], start)
    oracle = count_nonfinite(view.clone())
    if name == "overlapping":  # each place of it counts once
        oracle = count_nonfinite(storage[:100])
    assert counted.result == oracle
    assert name in ("scalar", "empty", "one") or oracle.nan


def test_a_tensor_has_a_number_of_dimensions_that_can_be() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones([1] * 64)}, file)
    assert len(archive.Archive(file).content["weight"].shape) == 64
    with zipfile.ZipFile(file) as opened:
        pickled = opened.read("archive/data.pkl")
    ones = b"(" + b"K\x01" * 64
    assert ones in pickled
    with pytest.raises(ValueError, match="of 65 dimensions"):
        read_pickle(io.BytesIO(pickled.replace(ones, ones + b"K\x01")))
