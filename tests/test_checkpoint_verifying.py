"""verify_checkpoint: what the hosts' own writers have written, whole and spoiled, without executing any of it."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from stabilizer.checkpoints import Expected, verify_checkpoint
from stabilizer.checkpoints.archive import Archive
from stabilizer.checkpoints.expecting import nonfinite_buffers, weights_of
from tests.checkpoint_writers import WRITERS, Tied, expected_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


every_format = pytest.mark.parametrize("kind", WRITERS)


@every_format
def test_what_a_host_writes_is_good(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS[kind](tmp_path / "five5", model.state_dict(), optimizer.state_dict())
    guard = verify_checkpoint(path, expected=expected_of(model, num_optimizers=1))
    assert (guard.verdict, guard.reasons, guard.is_full, guard.step) == ("good", (), True, 5)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    assert [(file.name, file.size) for file in guard.files] == [(file.name, file.stat().st_size) for file in files]
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in guard.files)


@every_format
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["parameter", "moment", "buffer"])
def test_what_is_not_finite_is_named(kind: str, value: float, place: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    model.register_buffer("running", torch.ones(5))
    expected = expected_of(model)
    state, moments = model.state_dict(), optimizer.state_dict()
    spoiled = {"parameter": state["embed.weight"], "moment": moments["state"][0]["exp_avg"], "buffer": state["running"]}
    spoiled[place].view(-1)[-1] = value
    guard = verify_checkpoint(WRITERS[kind](tmp_path / "saved", state, moments), expected=expected)
    assert guard.verdict == "bad"
    names = {"parameter": ("embed.weight", "head.weight"), "moment": ("exp_avg",), "buffer": ("running",)}[place]
    size, word = spoiled[place].numel(), "NaN" if math.isnan(value) else "Inf"
    assert guard.reasons
    for reason in guard.reasons:
        assert reason.endswith(f": 1 of {size} elements are not finite (1 {word})")
        assert any(f"{name}:" in reason for name in names)


@every_format
def test_infinities_that_were_there_from_the_start_are_none_of_its_business(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS[kind](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    [reason] = verify_checkpoint(path, expected=Expected(weights_of(model))).reasons
    assert "scale: 1 of 2 elements" in reason, "the mask alone is one by its looks"
    model.scale[0] = math.nan
    assert verify_checkpoint(path, expected=expected_of(model)).verdict == "good"


@every_format
def test_shapes_and_names_are_the_model_s(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    state = model.state_dict()
    del state["frozen"]  # which may be left out
    path = WRITERS[kind](tmp_path / "saved", state, optimizer.state_dict())
    assert verify_checkpoint(path, expected=expected_of(model)).verdict == "good"
    other = Tied()
    other.embed.weight = other.head.weight = nn.Parameter(torch.zeros(8, 4))
    [reason] = verify_checkpoint(path, expected=expected_of(other)).reasons
    assert reason == "parameter embed.weight has shape [7, 4], the model's has [8, 4]"
    model.more = nn.Linear(2, 2)
    reasons = verify_checkpoint(path, expected=expected_of(model)).reasons
    assert reasons == tuple(
        f"parameter more.{name} of shape {shape} is missing" for name, shape in (("weight", [2, 2]), ("bias", [2]))
    )
    # A hook that saves under names of its own: nothing can be said.
    strange = Expected(weights_of(nn.Linear(1, 1)), nonfinite_buffers(model))
    assert verify_checkpoint(path, expected=strange).verdict == "good"


def _cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98])
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("lightning", ""),
        ("accelerate", "model.safetensors"),
        ("accelerate", "optimizer.bin"),
        ("accelerate", "random_states_1.pkl"),
        ("sharded", "__0_0.distcp"),
        ("sharded", ".metadata"),
        ("sharded", "meta.pt"),
    ],
)
def test_a_file_that_is_cut_off_is_bad(kind: str, file: str, share: float, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS[kind](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    _cut(path / file if file else path, share)
    guard = verify_checkpoint(path, expected=expected_of(model))
    assert guard.verdict == "bad"
    assert not file or any(file in reason or ".metadata" in reason for reason in guard.reasons)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("model.safetensors", "no model is there: the save broke off"),
        ("optimizer.bin", "0 of 1 optimizers are there: the save broke off"),
        ("random_states_1.pkl", "random_states_1.pkl is missing: the save broke off"),
    ],
)
def test_a_folder_of_accelerate_that_lacks_a_file_is_bad(file: str, reason: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS["accelerate"](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    (path / file).unlink()
    assert reason in verify_checkpoint(path, expected=expected_of(model, num_processes=2)).reasons


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "meta.pt"])
def test_a_sharded_folder_that_lacks_a_file_is_bad(file: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS["sharded"](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    (path / file).unlink()
    assert verify_checkpoint(path, expected=expected_of(model)).verdict == "bad"


@pytest.mark.parametrize("kind", ["lightning", "sharded"])
def test_a_flipped_bit_is_found_by_the_sums_of_the_writer(kind: str, tmp_path: Path) -> None:
    """In the middle of a tensor, where the value stays finite."""
    model, optimizer = trained()
    path = WRITERS[kind](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    file = path if path.is_file() else path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.find(model.embed.weight.detach().numpy().tobytes())
    assert place > 0
    content[place + 1] ^= 1
    file.write_bytes(bytes(content))
    assert "Bad CRC-32" in " ".join(verify_checkpoint(path, expected=expected_of(model)).reasons)


def test_a_file_without_sums_is_read_all_the_same(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.serialization.set_crc32_options(False)
    try:
        path = WRITERS["lightning"](tmp_path / "saved.ckpt", model.state_dict(), optimizer.state_dict())
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify_checkpoint(path, expected=expected_of(model)).verdict == "good"


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@every_format
def test_nothing_is_executed(kind: str, tmp_path: Path) -> None:
    """Wherever a pickle may be: in the file, in the rest, in the metadata, in states of random numbers."""
    model, optimizer = trained()
    trap = tmp_path / "trap"
    path = WRITERS[kind](
        tmp_path / "saved", model.state_dict(), optimizer.state_dict(), hyper_parameters={"config": _Bomb(trap)}
    )
    if kind == "accelerate":
        for name in ("random_states_0.pkl", "scheduler.bin", "optimizer.bin"):
            torch.save({"state": _Bomb(trap)}, path / name)
        (path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(_Bomb(trap)))
    guard = verify_checkpoint(path, expected=expected_of(model))
    assert guard.verdict == "good", guard.reasons  # an object of a user's own makes no checkpoint a bad one
    if kind == "sharded":
        (path / ".metadata").write_bytes(pickle.dumps(_Bomb(trap)))
        assert verify_checkpoint(path).reasons == (".metadata: it has no state_dict_metadata",)
    assert not trap.exists()
    pickle.loads(pickle.dumps(_Bomb(trap)))
    assert trap.exists(), "the trap does not work"


def test_metadata_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS["sharded"](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    content = (path / ".metadata").read_bytes()
    (tmp_path / "0_0.distc").write_bytes((path / "__0_0.distcp").read_bytes())
    (path / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../0_0.distc"))
    reasons = verify_checkpoint(path).reasons
    assert reasons
    assert all(reason.endswith(".metadata names no place for it") for reason in reasons[:20])


def test_the_weights_alone_are_not_what_a_run_resumes_from(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({"state_dict": model.state_dict(), "global_step": 5}, tmp_path / "weights.ckpt")
    guard = verify_checkpoint(tmp_path / "weights.ckpt", expected=expected_of(model))
    assert (guard.verdict, guard.is_full) == ("good", False)


def test_what_callbacks_keep_may_be_infinite(tmp_path: Path) -> None:
    model, optimizer = trained()
    callbacks = {"EarlyStopping": {"best_score": torch.tensor(math.inf)}}
    for kind in ("lightning", "sharded"):
        path = WRITERS[kind](tmp_path / kind, model.state_dict(), optimizer.state_dict(), callbacks=callbacks)
        assert verify_checkpoint(path, expected=expected_of(model)).verdict == "good"


def test_elements_that_no_tensor_sees_may_be_anything(tmp_path: Path) -> None:
    """A slice is saved with all of its storage."""
    storage = torch.ones(10)
    storage[7] = math.nan
    torch.save({"seen": storage[:7], "also": storage[8:]}, tmp_path / "slices.pt")
    assert verify_checkpoint(tmp_path / "slices.pt").verdict == "good"
    torch.save({"seen": storage[:9:2], "not": storage[1::2]}, tmp_path / "strided.pt")
    assert verify_checkpoint(tmp_path / "strided.pt").reasons == ("tensor not: 1 of 5 elements are not finite (1 NaN)",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_every_type_of_numbers_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.ones(6).to(dtype)
    torch.save({"values": values}, tmp_path / "file.pt")
    assert verify_checkpoint(tmp_path / "file.pt").verdict == "good"
    values = torch.tensor([1.0, math.nan]).to(dtype)
    torch.save({"values": values}, tmp_path / "file.pt")
    assert verify_checkpoint(tmp_path / "file.pt").verdict == "bad"


def test_a_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    for value, verdict in ((1.0, "good"), (math.nan, "bad")):
        content = {"values": torch.tensor([value])}
        torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        assert verify_checkpoint(tmp_path / "old.pt").verdict == verdict


def test_links_are_not_followed(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS["accelerate"](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    (tmp_path / "elsewhere").write_bytes((path / "optimizer.bin").read_bytes())
    (path / "optimizer.bin").unlink()
    (path / "optimizer.bin").symlink_to(tmp_path / "elsewhere")
    assert "optimizer.bin is a link" in verify_checkpoint(path).reasons[0]


def test_a_compressed_zip_file_is_refused(tmp_path: Path) -> None:
    """A few kilobytes that unpack to gigabytes."""
    torch.save({"values": torch.zeros(100_000)}, tmp_path / "plain.pt")
    packed = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    assert len(packed.getvalue()) < 10_000
    with pytest.raises(ValueError, match=r"not as torch\.save writes it"):
        Archive(packed)
    (tmp_path / "bomb.pt").write_bytes(packed.getvalue())
    assert verify_checkpoint(tmp_path / "bomb.pt").verdict == "bad"


def test_objects_of_a_sharded_folder_are_whole(tmp_path: Path) -> None:
    """Nobody reads them: their length is all there is."""
    dcp.save({"state_dict": {}, "note": "x" * 1000}, checkpoint_id=tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved").verdict == "good"
    _cut(tmp_path / "saved" / "__0_0.distcp", 0.9)
    [reason] = verify_checkpoint(tmp_path / "saved").reasons
    assert reason.startswith("__0_0.distcp is cut off")


def test_safetensors_agree_with_their_own_reader(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = WRITERS["accelerate"](tmp_path / "saved", model.state_dict(), optimizer.state_dict())
    names = {name.removeprefix("module.") for name in load_file(path / "model.safetensors")}
    assert names == {"embed.weight", "frozen", "mask", "scale"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}})[:-3])
    assert verify_checkpoint(path, expected=expected_of(model)).reasons == (
        "model.safetensors.index.json: it is cut off, or no JSON",
    )
