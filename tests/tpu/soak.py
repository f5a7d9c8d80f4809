"""Many generations in one process: what the host and the chips hold after each.

    python tests/tpu/soak.py [GENERATIONS]        prints one line of JSON; exit status 1 where something grows

A tiny Wan on two simulated chips. Phases: the same call; sizes by turns; scales of a LoRA by turns; pipelines that are made, run
and deleted. Of each phase: the host's own memory (RssAnon) and bytes of JAX's live arrays after the first generations, which compile and
fill what is kept on purpose, and after the last ones.
"""

import ctypes
import gc
import json
import os
import sys
import threading


os.environ.setdefault("DIFFUSERS_TPU", "cpu")
os.environ.setdefault("DIFFUSERS_TPU_DEVICES", "2")

import jax  # noqa: E402
from peft import LoraConfig  # noqa: E402

import tiny  # noqa: E402
from diffusers import tpu  # noqa: E402


LIMIT = 0.02
WARM = 0.25  # of a phase
CALL = {
    "prompt": "a red circle",
    "height": 16,
    "width": 16,
    "num_frames": 1,
    "num_inference_steps": 2,
    "output_type": "np",
}
SIZES = ((16, 16), (16, 32), (32, 16), (32, 32))


def installed():
    pipe = tpu.install(tiny.wan(layers=2))
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda")


def held() -> tuple[float, int]:
    """MiB of the host, bytes of the chips."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        host = next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024
    return host, sum(array.nbytes for array in jax.live_arrays())


def phase(count: int, generate) -> dict:
    """What is held after the warm part and at the end: means of some, as the allocator breathes."""
    warm, tenth = int(WARM * count), max(1, count // 20)
    first, last = [], []
    for number in range(count):
        generate(number)
        if warm - tenth <= number < warm:
            first.append(held())
        elif number >= count - tenth:
            last.append(held())
    means = [[sum(x[i] for x in some) / len(some) for i in (0, 1)] for some in (first, last)]
    growth = [last / first - 1 for first, last in zip(*means)]
    answer = {
        "generations": count,
        "host_mib": [means[0][0], means[1][0]],
        "device_bytes": [means[0][1], means[1][1]],
        "growth": growth,
        "flat": max(growth) <= LIMIT,
    }
    print(json.dumps(answer), file=sys.stderr, flush=True)  # the rest takes a while
    return answer


def same(pipe):
    return lambda number: pipe(**CALL)


def sizes(pipe):
    def run(number: int):
        height, width = SIZES[number % len(SIZES)]
        pipe(**{**CALL, "height": height, "width": width})

    return run


def scales(pipe):
    targets = ["to_q", "to_v", "net.2"]
    pipe.transformer.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))

    def run(number: int):
        pipe.transformer.set_adapters("default", 0.1 * (1 + number % 7))
        pipe(**CALL)

    return run


def made_and_deleted(number: int):
    installed()(**CALL)


def with_one_pipeline(count: int) -> dict:
    pipe, few = installed(), max(16, count // 5)
    return {"same": phase(count, same(pipe)), "sizes": phase(few, sizes(pipe)), "scales": phase(few, scales(pipe))}


def main(count: int) -> int:
    answer = with_one_pipeline(count)
    gc.collect()
    answer["device_bytes_after_del"] = held()[1]
    answer["pipelines"] = phase(max(8, count // 3), made_and_deleted)  # the allocator stands after some fifteen
    answer["threads"] = sorted(
        t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon
    )
    print(json.dumps(answer))
    return (
        0 if all(part["flat"] for part in answer.values() if isinstance(part, dict)) and not answer["threads"] else 1
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
