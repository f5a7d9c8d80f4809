"""Runs one case of `values_at_size.py` in its own process: upstream in torch, then the same module on the TPU path."""

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from value_errors import INPUT, compared, limits, spread
from value_inputs import Case, floating, placed, recorded


# "high" is TF32 to XLA's compiler for CUDA.
TRUE_FLOAT32 = {"matmul_precision": "highest", "convolution_precision": "highest"}


def main(
    script: str, doc: str, cases: dict, run: Callable, record: Callable, kept: Path, seconds: float
) -> str | None:
    """The command line of a script; returns its message at exit, None for success.

    Args:
        cases: by name; each runs as `run(name, case, out, small)` in its own process, for at most `seconds`.
        record: copies the results in a file to `kept`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    parser.add_argument("--each", type=float, default=seconds, help="seconds that a case may take")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", action="store_true", help="this case, in this process")
    parser.add_argument("--record", action="store_true", help=f"put what OUT.jsonl says into {kept.name}")
    given = parser.parse_intermixed_args()
    if given.record:
        return record(given.out)
    if given.one:
        return run(given.cases[0], cases[given.cases[0]], given.out, given.small)
    failed, variables = [], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    for name in given.cases or cases:
        words = [sys.executable, script, str(given.out), name, "--one"] + ["--small"] * given.small
        try:
            subprocess.run(words, env=variables, timeout=given.each, check=True)
        except subprocess.SubprocessError as error:
            failed.append(f"{name}: {error}")
    return "\n".join(failed) or None


def begin(name: str, out: Path, small: bool, tries: bool = False) -> tuple[bool, Callable]:
    """Turns upstream's torch on, in true float32; returns whether there is a GPU, and `write_row` for this case.

    Args:
        tries: whether XLA tries algorithms, which takes a minute for each program in float32, and gigabytes.
    """
    os.environ["DIFFUSERS_TPU"], os.environ["DIFFUSERS_TPU_CACHE"] = "off", "off"  # till it is done
    import torch

    on_gpu = torch.cuda.is_available()
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if on_gpu else "cpu"
    if not tries:
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    return on_gpu, functools.partial(write_row, out, case=name + "-small" * small, started=time.perf_counter())


def run(name: str, case: Case, out: Path, small: bool):
    """Appends a line of JSON to `out` for each stage."""
    on_gpu, say = begin(name, out, small, tries=case.component != "transformer" and not case.gradients)
    import torch

    from diffusers.tpu.planner.building import cast_module

    pipe, args, kwargs, narrow, module = recorded(case, "cuda" if on_gpu else "cpu", small)
    facts = {"parameters": sum(p.numel() for p in module.parameters()), "inputs": _shapes((args, kwargs))}
    say(stage="built", **facts)
    if case.steps:
        work = functools.partial(_loop, pipe, case, small)
    elif case.gradients:
        module.requires_grad_()
        if module._supports_gradient_checkpointing:
            module.enable_gradient_checkpointing()
        work = functools.partial(_gradients, module, case.entry, args, kwargs, narrow, case.clamped)
    else:
        work = functools.partial(_call, module, case.entry, args, kwargs, narrow)
    oracle, seconds = _timed(work, torch.float32, case.repeat)
    say(stage="upstream", dtype="float32", seconds=seconds, **spread(oracle))
    upstream = {"float32": {"error": 0.0}}
    if "bfloat16" in case.dtypes:
        cast_module(module, torch.bfloat16)
        own, seconds = _timed(work, torch.bfloat16, case.repeat)
        upstream["bfloat16"] = compared(own, oracle)
        say(stage="upstream", dtype="bfloat16", seconds=seconds, **upstream["bfloat16"])
        del own
    enter_path(module, on_gpu)
    from diffusers import tpu
    from diffusers.tpu.kernels.attention import api

    for dtype in case.dtypes:
        cast_module(module, getattr(torch, dtype))
        config = tpu.TPUConfig(**TRUE_FLOAT32, **case.config)
        began, whole = time.perf_counter(), pipe if case.steps else module
        tpu.install(whole, config)
        ours, _ = _timed(work, getattr(torch, dtype), repeat=False)
        first = time.perf_counter() - began
        found = tpu.report(whole)
        found = found["components"]["transformer"] if "components" in found else found
        errors, own = compared(ours, oracle), upstream[dtype]
        most = limits(dtype, own)
        ok = all(errors[name] <= limit for name, limit in most.items())
        row = {
            "stage": "ours", "dtype": dtype, **errors, "upstream_error": own["error"], "limit": most["error"], "ok": ok,
            "first_seconds": first, "compile_seconds": sum(p["compile_seconds"] for p in found["programs"]),
            "programs": len(found["programs"]), "eager": str(found["eager"]), "explain": tpu.explain(whole)[:300], **where(), **spread(ours),
        }  # fmt: skip
        say(**row)
        if case.repeat:
            again, seconds = _timed(work, getattr(torch, dtype), repeat=False)
            say(stage="again", dtype=dtype, seconds=seconds, same=compared(again, ours)["error"])
        tpu.uninstall(whole)
        del ours
    calls = [f"{how.kernel} {how.q} {how.k} {how.dtype} {how.mask} {how.reason}" for how in api.explain()]
    say(stage="attention", calls=calls)


def _call(module, entry: str, args, kwargs, narrow: list, dtype):
    """Returns the output's tensors in float32 on the host. `narrow`: the dtype of each leaf of the arguments in bfloat16."""
    import torch

    args, kwargs = placed((args, kwargs), next(module.parameters()).device, narrow, dtype)
    with torch.no_grad():
        return [t.float().cpu() for t in floating(getattr(module, entry)(*args, **kwargs))]


def _gradients(module, entry: str, args, kwargs, narrow: list, clamped: bool, dtype) -> dict:
    """Returns by name the gradients of inputs that require one and of all weights, in float32 on the host. Arguments: see `_call`.

    A rounding decides whether a clamped element at its limit has a gradient, so factors of elements fall to zero towards the limits.
    """
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    device, draw = next(module.parameters()).device, torch.Generator().manual_seed(3)
    given = placed((args, kwargs), device, narrow, dtype)
    outputs = floating(getattr(module, entry)(*given[0], **given[1]))
    factors = [torch.randn(t.shape, generator=draw).to(device) for t in outputs]
    if clamped:
        factors = [factor * (1 - t.detach().float() ** 2) for t, factor in zip(outputs, factors)]
    loss = sum((t.float() * factor).sum() / t.numel() ** 0.5 for t, factor in zip(outputs, factors))
    loss.backward()
    inputs = {f"{INPUT}{keystr(path[1:])}": leaf for path, leaf in tree_flatten_with_path(given)[0]}
    found = {}
    for name, t in (*inputs.items(), *module.named_parameters()):
        if isinstance(t, torch.Tensor) and t.grad is not None:
            found[name], t.grad = t.grad.float().cpu(), None
    return found


def _loop(pipe, case: Case, small: bool, dtype):
    """Returns the latents after a few steps with guidance, from noise of the host's generator."""
    import torch

    from diffusers.tpu.planner import building

    call = {**building.configuration_of(case.model).call, **case.call, "num_inference_steps": case.steps}
    if small:
        call |= {"height": 64, "width": 96, "num_frames": 9}
    draw = torch.Generator().manual_seed(1)
    words = (torch.randn(1, 512, 4096, generator=draw).to(torch.bfloat16).to(dtype) for _ in range(2))
    positive, negative = words
    pipe.set_progress_bar_config(disable=True)
    # An old scheduler keeps tensors of its last run.
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    with torch.no_grad():
        device = pipe.transformer.device
        given = {"prompt_embeds": positive, "negative_prompt_embeds": negative}
        if device.type == "cuda" and os.environ["DIFFUSERS_TPU"] == "off":
            given = {key: t.to(device) for key, t in given.items()}
            type(pipe)._execution_device = property(lambda self: device)  # the other components hold no weights
        latents = pipe(**call, **given, generator=torch.Generator().manual_seed(2), output_type="latent").frames
    return [latents.float().cpu()]


def _timed(work, dtype, repeat: bool):
    """Returns the output and seconds, of a second run if `repeat`."""
    for _ in range(1 + repeat):
        began = time.perf_counter()
        output = work(dtype)
        seconds = time.perf_counter() - began
    return output, seconds


def enter_path(module, on_gpu: bool):
    """Moves the module to the host and turns the TPU path on, with one CUDA device in place of simulated chips if `on_gpu`."""
    import torch

    module.to("cpu")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    os.environ["DIFFUSERS_TPU"], os.environ["DIFFUSERS_TPU_DEVICES"] = "cpu", "1"
    if not on_gpu:
        return
    import jax

    from diffusers.tpu.chips import devices
    from diffusers.tpu.compile import module_programs
    from diffusers.tpu.pipelines import attach

    card = (jax.devices("cuda")[0],)
    devices.jax_devices = lambda target: card
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("diffusers") and "jax_devices" in vars(module):
            module.jax_devices = devices.jax_devices
    of_programs = next(c for c in vars(module_programs).values() if isinstance(c, type) and "settings" in vars(c))
    original = of_programs.settings.fget

    def settings(self):
        found = original(self)
        return replace(found, interpret=True) if found.kernel == "kernel" else found

    of_programs.settings = property(settings)
    assert attach.target_devices() == card


# What is said


def write_row(out: Path, case: str, started: float, **facts):
    row = {"case": case, "at": round(time.perf_counter() - started, 1), **facts}
    line = json.dumps({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in row.items()})
    with open(out, "a") as file:
        file.write(line + "\n")
    print(line[:600], flush=True)


def _shapes(given) -> list:
    import torch
    from torch.utils._pytree import tree_leaves

    return [[str(t.dtype)[6:], *t.shape] for t in tree_leaves(given) if isinstance(t, torch.Tensor)]


def where() -> dict:
    """Returns JAX's device and its peak memory."""
    import jax

    device = jax.devices()[0]
    used = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"device": device.device_kind, "jax_gib": round(used / 2**30, 2)}
