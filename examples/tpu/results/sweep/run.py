"""The sweep: runs every pipeline that upstream exports, each in its own process, and adds results to examples/tpu/results/coverage.json.

    python examples/tpu/results/sweep/run.py                    every pipeline without a result
    python examples/tpu/results/sweep/run.py 'Flux.*' Wan       those whose names match one of these, also if recorded
    python examples/tpu/results/sweep/run.py --layouts          one pipeline of each class on the meshes that its record lacks

A process that has imported torch, transformers, JAX and diffusers forks for each pipeline. A sweep that was stopped resumes. Pipelines that
upstream itself does not run here are recorded with the reason.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path


ROOT = Path(__file__).resolve().parents[4]
RECORD = ROOT / "examples/tpu/results/coverage.json"
SECONDS, PATIENCE, BYTES = 900, 3600, 20 * 2**30  # of processor time; on the clock; of memory
LIBRARIES = ("/torch/", "/torchax/", "/jax/", "/jaxlib/", "/diffusers/tpu/")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "DIFFUSERS_VERBOSITY": "critical",
    "TRANSFORMERS_VERBOSITY": "critical", "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",  # beside torchax's device upstream's torch.compile stops: it runs uncompiled
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", help="of names, without 'Pipeline'; none: all that have no result")
    parser.add_argument(
        "--layouts", action="store_true", help="one pipeline of each class of denoisers, on more meshes"
    )
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    folders = ("examples/tpu/results/sweep", "examples/tpu/results", "tests/tpu", "src")
    sys.path[:0] = [str(ROOT / folder) for folder in folders]
    from building import exported

    from diffusers.tpu.common.files import write_whole

    import_what_all_need()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    names = exported()
    chosen = one_of_each_class(record) if given.layouts else [name for name in names if wanted(name, given, record)]

    for name in chosen:
        found = examined(name, given, record.get(name, {}).get("layouts", {}))
        found = record[name] = {**record[name], "layouts": found} if given.layouts else found
        write_whole(RECORD, json.dumps({name: record[name] for name in names if name in record}, indent=1) + "\n")
        print(f"{found.get('seconds', 0):6.1f} s  {name}: {summary(found)}", flush=True)


def wanted(name: str, given, record: dict) -> bool:
    if given.patterns:
        return any(re.fullmatch(pattern, name.removesuffix("Pipeline")) for pattern in given.patterns)
    return name not in record


def one_of_each_class(record: dict) -> list[str]:
    """Returns the quickest pipeline of each class of denoisers, without those whose layouts are all recorded."""
    from examining import LAYOUTS

    found = {}
    for name in sorted(
        (name for name in record if "error" in record[name]), key=lambda name: -record[name]["seconds"]
    ):
        found |= {one["class"]: name for one in record[name]["denoisers"].values() if not one["eager"]}
    return [name for name in dict.fromkeys(found.values()) if {*LAYOUTS} - {*record[name].get("layouts", ())}]


def import_what_all_need():
    import examining  # noqa: F401
    import torch

    import diffusers.tpu.compare.pipelines  # noqa: F401
    import tiny

    torch.set_num_threads(1)
    tiny.byte_pairs()
    os.environ["DIFFUSERS_TPU"] = "cpu"  # from here on: what was imported is upstream's
    os.environ.setdefault("DIFFUSERS_TPU_CACHE", "off")


def examined(name: str, given, layouts: dict) -> dict:
    """Returns the result of one pipeline, examined in a fork of this process; `layouts` are those already recorded."""
    start, context = time.monotonic(), multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(name, given, layouts, writing))
    child.start()
    writing.close()
    late = not reading.poll(PATIENCE)
    if late:
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return reading.recv()
    except EOFError:
        child.join()
    late = late or child.exitcode == -signal.SIGXCPU
    reason = f"no end within {SECONDS} s of processor time" if late else f"its process ended with {child.exitcode}"
    return {"status": "not", "reason": reason, "seconds": round(time.monotonic() - start, 1)}


def in_child(name: str, given, layouts: dict, answers):
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    from examining import NotUpstream, examine, in_layouts

    import diffusers

    found = {} if given.layouts else {"module": getattr(diffusers, name).__module__}
    try:
        found |= in_layouts(name, layouts) if given.layouts else examine(name)
    except NotUpstream as stopped:
        found |= {"status": "not built", "reason": reason_of(stopped.__cause__)}
    except Exception as error:
        found |= {"status": "not", "reason": reason_of(error)}
    answers.send(json.loads(json.dumps(found)))


def reason_of(error: BaseException) -> str:
    """Returns the error in words, with the innermost line of upstream's code or the sweep's."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)] or frames)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"


def summary(found: dict) -> str:
    if "layouts" in found:
        return str(found["layouts"])
    if "error" not in found:
        return f"{found['status'].upper()} {found.get('reason', '')[:150]}"
    denoisers = ", ".join(f"{one['error']:.0e}" for one in found["denoisers"].values())
    return f"{found['status']}, error {found['error']:.1e}, denoisers {denoisers}, executables {found['executables']}"


if __name__ == "__main__":
    main()
