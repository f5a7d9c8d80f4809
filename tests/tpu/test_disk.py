"""Checkpoint files mapped and read in parallel. Oracles: safetensors' own loader, the bytes that were written, numpy's slices."""

import json
import os
import threading

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError

from diffusers.tpu.weights import disk, transfer
from diffusers.tpu.weights.checkpoint import FileTensor
from diffusers.tpu.weights.transfer import PlacementRequest, Transfer


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def path(tmp_path):
    some = torch.randn(48, 40, 33)
    tensors = {
        "float": some,
        "half": some.bfloat16(),
        "eight": some.to(torch.float8_e4m3fn),
        "whole": torch.arange(1000).reshape(10, 100),
        "bits": some > 0,
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def test_a_mapped_file_is_what_safetensors_reads_and_a_cut_one_is_refused(path, tmp_path):
    ours, theirs = disk.load_file(path), safetensors.torch.load_file(path)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert all(getattr(ours[name], key) == getattr(tensor, key) for key in ("dtype", "shape"))
        assert ours[name].stride() == tensor.stride()
        assert bits(ours[name]) == bits(tensor), name
        assert ours[name].untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    safetensors.torch.save_file(ours, tmp_path / "again.safetensors", {"format": "pt"})  # which refuses shared memory
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    os.truncate(tmp_path / "again.safetensors", path.stat().st_size - 1)
    with pytest.raises(SafetensorError):
        disk.load_file(tmp_path / "again.safetensors")


def test_a_file_whose_tensors_lie_across_their_size_is_the_librarys(tmp_path):
    """A header of an odd length, as others write it."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (1 + -len(header) % 2)
    values = np.arange(3, dtype=np.float32)
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    assert disk.load_file(tmp_path / "odd.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.fault("weights-cut-while-read")
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_leaves_no_thread(path, make_mesh, monkeypatch):
    monkeypatch.setattr(transfer, "SMALL", 0)
    tensor = disk.load_file(path)["float"]
    aval = jax.ShapeDtypeStruct(tensor.shape, np.float32, sharding=NamedSharding(make_mesh(1, 1, 1), PartitionSpec()))
    with Transfer() as some:
        os.truncate(path, 4096)
        with pytest.raises(OSError, match="bytes of x in .* was cut while it was loaded"):
            list(some.arrays([PlacementRequest("x", aval, [tensor], False)]))
    assert not [t for t in threading.enumerate() if t.name.startswith("diffusers-tpu-weights")]


def as_for_real_chips(monkeypatch):
    """Values are copied to chips, and the host's memory is used again."""
    monkeypatch.setattr(PlacementRequest, "simulated", False)
    monkeypatch.setattr(transfer, "device_put", lambda values, device: jax.device_put(np.array(values), device))


@pytest.mark.parametrize(
    "spec, dtype, simulated",
    [
        ((), None, False), (("sp",), torch.bfloat16, True), ((None, "sp"), None, True),
        (("dp", None, "tp"), torch.bfloat16, False),
    ],
    ids=str,
)  # fmt: skip
def test_parts_are_numpys_slices_of_what_is_stored(path, make_mesh, monkeypatch, spec, dtype, simulated):
    monkeypatch.setattr(transfer, "SMALL", 0)
    monkeypatch.setattr(transfer, "LARGE_ELEMENTS", 0)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 5 * 40 * 33 * 4)  # five rows: pieces end within parts
    if not simulated:
        monkeypatch.setattr(transfer, "STAGED_BYTES", 70_000)
        as_for_real_chips(monkeypatch)
    stored = disk.load_file(path)["float"][:, :, :32].contiguous() if "tp" in spec else disk.load_file(path)["float"]
    expected = stored if dtype is None else stored.half().to(dtype)  # each conversion rounds
    tensor = stored if dtype is None else FileTensor.of(stored, torch.float16, dtype)
    short = torch.ones(2, *stored.shape[1:], dtype=expected.dtype)
    kind = np.dtype(np.float32 if dtype is None else jax.numpy.bfloat16)
    mesh = make_mesh(2, 2, 2)

    def aval(shape, *axes):
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, PartitionSpec(*axes, *spec)))

    asked = [
        PlacementRequest("one", aval(stored.shape), [tensor], False),
        PlacementRequest("stack", aval((4, *stored.shape), None), [tensor, None, short, tensor], True),
    ]
    counted, put = [], transfer.device_put
    noted = lambda values, device: counted.append(values.size) or put(values, device)  # noqa: E731
    monkeypatch.setattr(transfer, "device_put", noted)
    with Transfer() as some:
        arrays = dict(some.arrays(asked))
    once = 1 if not simulated else 4 if "sp" in spec else 8  # to real chips a part each, which they hand on
    assert sum(counted) == once * 5 * stored.numel()
    padded = torch.cat([short, torch.zeros(len(stored) - 2, *stored.shape[1:], dtype=expected.dtype)])
    for name, oracle in (("one", expected), ("stack", torch.stack([expected, 0 * expected, padded, expected]))):
        for shard in arrays[name].addressable_shards:
            part = oracle[shard.index].float().numpy()
            assert np.array_equal(np.asarray(shard.data, np.float32), part), (name, shard.index)
