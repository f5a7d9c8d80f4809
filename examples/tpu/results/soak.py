"""A soak test: memory of the host and the chips over many generations in one process.

    python examples/tpu/results/soak.py [GENERATIONS]        prints one line of JSON; exit status 1 where memory grows
    python examples/tpu/results/soak.py SIZES any            the same for so many sizes, each used once

A tiny Wan runs on two simulated chips. Phases: the same call; alternating sizes; alternating scales of a LoRA; pipelines that are made, run
and deleted. A phase compares the host's anonymous memory (RssAnon) and the bytes of JAX's live arrays after its first generations, which
compile and fill caches, with those after its last. Of sizes used once, a model keeps `PROGRAMS` programs.
"""

import ctypes
import gc
import json
import os
import statistics
import sys
import threading
from pathlib import Path


sys.path.append(str(Path(__file__).resolve().parents[3] / "tests/tpu"))
os.environ.setdefault("DIFFUSERS_TPU", "cpu")
os.environ.setdefault("DIFFUSERS_TPU_DEVICES", "2")

import jax  # noqa: E402
from peft import LoraConfig  # noqa: E402

import tiny  # noqa: E402
from diffusers import tpu  # noqa: E402


LIMIT = 0.02
LIMIT_OF_SIZES = 0.05
PROGRAMS = 16
WARM = 0.25  # of a phase
CALL = tiny.arguments("wan", height=16, width=16, num_frames=1, num_inference_steps=2)
SIZES = ((16, 16), (16, 32), (32, 16), (32, 32))


def installed(layers: int = 2, **settings):
    return tpu.install(tiny.wan(transformer={"num_layers": layers}), tpu.TPUConfig(**settings)).to("cuda")


def held() -> tuple[float, int]:
    """Returns the MiB held by the host and the bytes held by the chips."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        host = next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024
    return host, sum(array.nbytes for array in jax.live_arrays())


def phase(count: int, generate, limit: float = LIMIT) -> dict:
    """Returns the memory after the warm part and at the end: means over several generations, as allocation varies."""
    warm, tenth = int(WARM * count), max(1, count // 20)
    first, last = [], []
    for number in range(count):
        generate(number)
        if warm - tenth <= number < warm:
            first.append(held())
        elif number >= count - tenth:
            last.append(held())
    (host, device), (host_end, device_end) = (map(statistics.mean, zip(*some)) for some in (first, last))
    growth = [host_end / host - 1, device_end / device - 1]
    answer = {"generations": count, "host_mib": [host, host_end], "device_bytes": [device, device_end]}
    answer |= {"growth": growth, "flat": max(growth) <= limit}
    print(json.dumps(answer), file=sys.stderr, flush=True)  # the rest takes a while
    return answer


def any_size(count: int) -> dict:
    """Generates latents of `count` sizes, each once."""
    pipe = installed(1, programs=PROGRAMS)

    def run(number: int):
        pipe(**CALL | {"height": 16 * (1 + number // 16), "width": 16 * (1 + number % 16), "output_type": "latent"})

    answer = phase(count, run, LIMIT_OF_SIZES)
    part = tpu.report(pipe)["components"]["transformer"]
    return {**answer, "programs": len(part["programs"]), "evicted": part["evicted"]}


def with_one_pipeline(count: int) -> dict:
    pipe, few = installed(), max(16, count // 5)

    def sizes(number: int):
        pipe(**CALL | dict(zip(("height", "width"), SIZES[number % len(SIZES)])))

    def scales(number: int):
        pipe.transformer.set_adapters("default", 0.1 * (1 + number % 7))
        pipe(**CALL)

    found = {"same": phase(count, lambda number: pipe(**CALL)), "sizes": phase(few, sizes)}
    targets = ["to_q", "to_v", "net.2"]
    pipe.transformer.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    return found | {"scales": phase(few, scales)}


def main(count: int, kind: str = "") -> int:
    if kind == "any":
        answer = any_size(count)
        right = answer["flat"] and answer["programs"] == PROGRAMS
    else:
        answer = with_one_pipeline(count)
        gc.collect()
        answer["device_bytes_after_del"] = held()[1]
        # The allocator stands after some fifteen.
        answer["pipelines"] = phase(max(8, count // 3), lambda number: installed()(**CALL))
        others = (t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon)
        answer["threads"] = sorted(t.name for t in others)
        right = all(part["flat"] for part in answer.values() if isinstance(part, dict)) and not answer["threads"]
    print(json.dumps(answer))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, *sys.argv[2:]))
