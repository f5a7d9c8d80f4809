"""Loading weights from disk to simulated chips beside `dd` of the same files, measured on this machine.

A random checkpoint of 4 GiB, a Wan transformer in bfloat16 in shards with an index, is loaded as in a run (`from_pretrained` and
`.to("cuda")`). Before each load and each `dd` the files are dropped from the page cache (POSIX_FADV_DONTNEED). Simulated chips use the
host's memory. `seconds` are of a process that keeps the memory of a model it loaded and deleted before, since a TPU's memory needs no
allocation by the kernel; `first_seconds` are of a process that allocates every page.
"""

import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from diffusers.tpu.chips.figures import GIB, MIB

from . import run_module, versions


# 4.1 GiB in bfloat16.
MODEL = {"num_attention_heads": 16, "attention_head_dim": 128, "ffn_dim": 8192, "num_layers": 32}
SHARD_BYTES = GIB
ROUNDS = 5
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc's
LIMIT_SECONDS = 1800


def answer(chips: int, model: tuple = tuple(MODEL.items()), rounds: int = ROUNDS) -> dict:
    """Returns seconds and bytes per second of a load and of `dd`, medians of `rounds` by turns, and the host's peak memory.

    Args:
        model: items of the transformer's configuration.

    Raises:
        RuntimeError: the process that loads failed.
    """
    folder = made_checkpoint(model)
    fast = _in_a_process(folder, chips, rounds, KEEPS_MEMORY)
    first = _in_a_process(folder, chips, 0, {})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds, dd = statistics.median(fast["seconds"]), statistics.median(fast["dd_seconds"])
    return {
        "gib": size / GIB,
        "seconds": seconds,
        "bytes_per_second": size / seconds,
        "dd_seconds": dd,
        "dd_bytes_per_second": size / dd,
        "of_dd": dd / seconds,
        "all_seconds": fast["seconds"],
        "all_dd_seconds": fast["dd_seconds"],
        "first_seconds": first["first_seconds"],
        "host_peak_mib": first["host_peak_mib"],
        "versions": versions(torch=torch.__version__, machine=f"{platform.machine()}, {os.cpu_count()} cores"),
    }


@functools.cache
def _kept_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="diffusers-tpu-load-")  # removed when the process ends


@functools.cache
def made_checkpoint(model: tuple) -> Path:
    """Returns a folder with configuration, shards and index of a Wan transformer of this configuration, with random values."""
    from diffusers import WanTransformer3DModel

    folder = Path(_kept_folder().name) / f"model-{abs(hash(model))}"
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**dict(model)).bfloat16()
    noise = 0.02 * torch.randn(1 << 22).bfloat16()
    for weight in transformer.to_empty(device="cpu").parameters():
        for some in weight.data.view(-1).split(len(noise)):
            some.copy_(noise[: len(some)])
    transformer.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    return folder


def _in_a_process(folder: Path, chips: int, rounds: int, settings: dict[str, str]) -> dict:
    environment = {"DIFFUSERS_TPU_DEVICES": str(chips), **settings}
    return run_module("load_row", str(folder), str(rounds), seconds=LIMIT_SECONDS, **environment)


# In the process that loads


def _measured(folder: Path, rounds: int) -> dict:
    from diffusers.tpu.chips.devices import find_target, jax_devices
    from diffusers.tpu.common.config import read_environment

    jax_devices(find_target(read_environment()))
    files = sorted(folder.glob("*.safetensors"))
    _drop(files)
    before = time.perf_counter()
    peak, model = _peak(lambda: _loaded(folder))
    answer = {"first_seconds": time.perf_counter() - before, "host_peak_mib": (peak - _on_chips(model)) / MIB}
    del model
    answer |= {"seconds": [], "dd_seconds": []}
    for _ in range(rounds):
        gc.collect()
        _drop(files)
        answer["dd_seconds"].append(_timed(lambda: [_dd(file) for file in files]))
        _drop(files)
        answer["seconds"].append(_timed(lambda: _loaded(folder)))
    return answer


def _loaded(folder: Path):
    import jax

    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    jax.block_until_ready(model._tpu_runner.plan_weights().arrays)
    return model


def _on_chips(model) -> int:
    arrays = model._tpu_runner.plan_weights().arrays.values()
    buffers = {s.data.unsafe_buffer_pointer(): s.data.nbytes for array in arrays for s in array.addressable_shards}
    return sum(buffers.values())  # what several simulated chips hold is one memory


def _drop(files: list[Path]):
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _dd(file: Path):
    subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)


def _timed(action: Callable) -> float:
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _peak(action: Callable) -> tuple[int, object]:
    """Returns the peak growth in bytes of the process's anonymous memory during `action`, and the result of `action`."""
    before, over = _own_memory(), threading.Event()
    highest = [before]

    def watch():
        while not over.wait(0.01):
            highest.append(_own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = action()
    finally:
        over.set()
        thread.join()
    return max(*highest, _own_memory()) - before, result


def _own_memory() -> int:
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


if __name__ == "__main__":
    print(json.dumps(_measured(Path(sys.argv[1]), int(sys.argv[2]))))
