"""Models of published size on an NVIDIA GPU: what the TPU path computes, by JAX on CUDA, beside upstream's own on CUDA.

    python values_at_size.py OUT.jsonl [CASE ...] [--small]

Same weights, same inputs, one card. Weights are random; they and the inputs are numbers that bfloat16 has, so that the error of a run in
bfloat16 is of its arithmetic alone. The call is the one that the published pipeline makes (`diffusers.tpu.planner`), its hidden states random.

    error(x) = |x - o| / |o|, the largest over the output tensors;  o: upstream in float32, products in float32 (no TF32)

Limits: 1e-4 in float32; in bfloat16 1.1 times upstream's own error, or 1e-2. Kernels for TPUs run in Pallas's interpret mode, in the
cases whose configuration asks for them; elsewhere attention is `kernels/attention/reference.py`. `--small`: few layers, small pictures,
on JAX's CPU backend where there is no GPU, to try this script.
"""

import argparse
import functools
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path


DRAWN = {  # arguments that a model of zeros has made zeros
    "hidden_states", "sample", "z", "x", "encoder_hidden_states", "encoder_hidden_states_2", "pooled_projections", "text_embeds",
}  # fmt: skip
FLOAT32_LIMIT, BFLOAT16_FACTOR, BFLOAT16_LIMIT = 1e-4, 1.1, 1e-2
# "high" is TF32 to XLA's compiler for CUDA.
TRUE_FLOAT32 = {"matmul_precision": "highest", "convolution_precision": "highest"}


@dataclass(frozen=True)
class Case:
    """One model's call. `small`: its configuration where all is to be small."""

    model: str
    component: str
    entry: str = "forward"
    call: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    small: dict = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeat: bool = True
    steps: int = 0  # of a whole loop; 0: one call


WAN, KERNELS = "wan2.1-t2v-1.3b", {"attention": "kernel", "layers": "kernel"}
TWO = {"num_layers": 2}
# Upstream rounds 1000 times the scale to bfloat16: of 3500 that makes 3504, an error of 0.5 in upstream's and ours.
GUIDANCE = {"guidance_scale": 3.504}
CASES = {
    "wan-1.3b": Case(WAN, "transformer", call={"num_frames": 33}, small=TWO),
    "wan-vae": Case(WAN, "vae", "decode", {"num_frames": 17}),
    "sdxl": Case("stabilityai/stable-diffusion-xl-base-1.0", "unet", small={"transformer_layers_per_block": [1, 1, 1]}),
    "cogvideox-5b": Case("THUDM/CogVideoX-5b", "transformer", call={"num_frames": 17}, small=TWO),
    "sd3.5-medium": Case("stabilityai/stable-diffusion-3.5-medium", "transformer", small=TWO | {"dual_attention_layers": [0]}),
    "wan-1.3b-kernels": Case(WAN, "transformer", call={"num_frames": 17}, config=KERNELS, small=TWO),
    "hunyuan-1.5": Case(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "transformer", call={"num_frames": 17},
        small=TWO | {"num_refiner_layers": 1},
    ),
    "wan-1.3b-loop": Case(WAN, "transformer", call={"num_frames": 17}, small=TWO, dtypes=("float32", "bfloat16"), steps=3),
    "sdxl-vae": Case("stabilityai/stable-diffusion-xl-base-1.0", "vae", "decode"),
    "flux.1-dev": Case("black-forest-labs/FLUX.1-dev", "transformer", call=GUIDANCE, small=TWO | {"num_single_layers": 2}),
    "ltx": Case("Lightricks/LTX-Video", "transformer", call={"num_frames": 97}, small=TWO),
    "ltx-vae": Case("Lightricks/LTX-Video", "vae", "decode", {"num_frames": 33}),
    "hunyuan-1.5-vae": Case("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "vae", "decode", {"num_frames": 17}),
    "cogvideox-vae": Case("THUDM/CogVideoX-5b", "vae", "decode", {"num_frames": 9}),
    "kandinsky-5": Case(
        "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", "transformer", call={"num_frames": 17},
        small={"num_text_blocks": 1, "num_visual_blocks": 2},
    ),
    "wan-2.2-vae": Case("wan2.2-ti2v-5b", "vae", "decode", {"num_frames": 9}),
    "flux.1-dev-kernels": Case("black-forest-labs/FLUX.1-dev", "transformer", call=GUIDANCE, config=KERNELS, dtypes=("bfloat16",), small=TWO | {"num_single_layers": 2}),
    "wan-1.3b-81": Case(WAN, "transformer", repeat=False, small=TWO),
}  # fmt: skip


# One case, in a process of its own


def run(name: str, out: Path, small: bool):
    os.environ["DIFFUSERS_TPU"], os.environ["DIFFUSERS_TPU_CACHE"] = "off", "off"  # upstream's torch, till it is done
    import torch

    case, on_gpu, began = CASES[name], torch.cuda.is_available(), time.perf_counter()
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if on_gpu else "cpu"
    if case.component == "transformer":  # trying algorithms takes a minute for each program in float32, and gigabytes
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    say = functools.partial(_say, out, case=name + "-small" * small, started=began)

    pipe, args, kwargs, narrow, module = _recorded(case, "cuda" if on_gpu else "cpu", small)
    facts = {"parameters": sum(p.numel() for p in module.parameters()), "inputs": _shapes((args, kwargs))}
    say(stage="built", **facts)
    if case.steps:
        work = functools.partial(_loop, pipe, case, small)
    else:
        work = functools.partial(_call, module, case.entry, args, kwargs, narrow)
    oracle, seconds = _timed(work, torch.float32, case.repeat)
    say(stage="upstream", dtype="float32", seconds=seconds, **_spread(oracle))
    upstream = {"float32": 0.0}
    if "bfloat16" in case.dtypes:
        _cast(module, torch.bfloat16)
        own, seconds = _timed(work, torch.bfloat16, case.repeat)
        upstream["bfloat16"] = _error(own, oracle)
        say(stage="upstream", dtype="bfloat16", seconds=seconds, error=upstream["bfloat16"])
    module.to("cpu")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()

    _enter_path(on_gpu)
    from diffusers import tpu
    from diffusers.tpu.kernels.attention import api

    api._dispatched.clear()  # those of the recording
    for dtype in case.dtypes:
        _cast(module, getattr(torch, dtype))
        config = tpu.TPUConfig(**TRUE_FLOAT32, **case.config)
        began, whole = time.perf_counter(), pipe if case.steps else module
        tpu.install(whole, config)
        ours, _ = _timed(work, getattr(torch, dtype), repeat=False)
        first = time.perf_counter() - began
        found = tpu.report(whole)
        found = found["components"]["transformer"] if "components" in found else found
        error, own = _error(ours, oracle), upstream[dtype]
        limit = FLOAT32_LIMIT if dtype == "float32" else max(BFLOAT16_FACTOR * own, BFLOAT16_LIMIT)
        row = {
            "stage": "ours", "dtype": dtype, "error": error, "upstream_error": own, "limit": limit, "ok": error <= limit,
            "first_seconds": first, "compile_seconds": sum(p["compile_seconds"] for p in found["programs"]),
            "programs": len(found["programs"]), "eager": str(found["eager"]), "explain": tpu.explain(whole)[:300], **_where(), **_spread(ours),
        }  # fmt: skip
        say(**row)
        if case.repeat:
            again, seconds = _timed(work, getattr(torch, dtype), repeat=False)
            say(stage="again", dtype=dtype, seconds=seconds, same=_error(again, ours))
        tpu.uninstall(whole)
    calls = [f"{how.kernel} {how.q} {how.k} {how.dtype} {how.mask} {how.reason}" for how in api.explain()]
    say(stage="attention", calls=calls)


def _recorded(case: Case, device: str, small: bool):
    """(the pipeline, the component's first call in it with the dtypes that it has in bfloat16, the component, random, on the device)."""
    import torch
    from accelerate import init_empty_weights
    from torch.utils._pytree import tree_leaves

    from diffusers.tpu.planner import building, recording

    class Stop(Exception):
        pass

    class Runner(recording.RecordingRunner):
        def run(self, entry, args, kwargs, back=False):
            if (self.component, entry) == (case.component, case.entry):
                raise Stop(args, kwargs)
            return super().run(entry, args, kwargs)

    configuration = building.configuration_of(case.model)
    call = {**configuration.call, **case.call, "num_inference_steps": 4}
    if small:
        call |= {"height": 64, "width": 96} | ({"num_frames": 9} if "num_frames" in call else {})

    def arguments(dtype):
        try:
            recording.record(building.build(configuration, dtype, tiled=False), call, runner=Runner)
            raise RuntimeError(f"expected a call of {case.component}.{case.entry}")
        except Stop as stop:
            return stop.args

    args, kwargs = arguments(torch.float32)
    narrow = [getattr(leaf, "dtype", None) for leaf in tree_leaves(arguments(torch.bfloat16))]
    pipe = building.build(configuration, torch.float32, tiled=False)
    module = getattr(pipe, case.component)
    with init_empty_weights():  # what upstream keeps as plain attributes stays on the host, where all goes later
        module = type(module).from_config({**module.config, **(case.small if small else {})})
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            owner._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device=device), requires_grad=False)
    _fill(module.eval().to(device))
    setattr(pipe, case.component, module)
    return pipe, _drawn(args, ""), _drawn(kwargs, ""), narrow, module


def _fill(module):
    """Every weight random: matrices keep a vector's size, norms are near one, biases near zero; all are numbers of bfloat16's."""
    import torch

    of_norms = (m for m in module.modules() if "norm" in type(m).__name__.lower())
    norms = {id(p) for m in of_norms for p in m.parameters(recurse=False)}
    for name, p in module.named_parameters():
        if p.ndim > 1 and id(p) not in norms:
            p.data.normal_(0, 1 / math.sqrt(max(1, p[0].numel())))
        else:
            p.data.normal_(1.0 if name.endswith(("weight", "gamma")) else 0.0, 0.1)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(torch.bfloat16))


def _drawn(given, name: str):
    """The arguments, those named in `DRAWN` random."""
    import torch

    if isinstance(given, dict):
        return {key: _drawn(x, key) for key, x in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_drawn(x, name or ("hidden_states" if n == 0 else "")) for n, x in enumerate(given))
    if isinstance(given, torch.Tensor) and given.is_floating_point():
        if name in DRAWN:
            return torch.randn(given.shape).to(torch.bfloat16).float()
        return given.float().contiguous().clone()
    return given.clone() if isinstance(given, torch.Tensor) else given


def _cast(module, dtype):
    """As `from_pretrained` casts."""
    import torch

    from diffusers.tpu.compare.pipelines import cast_module

    if dtype == torch.float32:
        saved = module.state_dict().keys()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and name in saved:
                tensor.data = tensor.data.float()
    else:
        cast_module(module, dtype)


def _call(module, entry: str, args, kwargs, narrow: list, dtype):
    """The output's tensors in float32, on the host. `narrow`: the dtype of each leaf of the arguments in a run in bfloat16."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

    device = next(module.parameters()).device
    leaves, spec = tree_flatten((args, kwargs))
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[n] = leaf.to(device, narrow[n] if dtype == torch.bfloat16 else leaf.dtype)
    args, kwargs = tree_unflatten(leaves, spec)
    with torch.no_grad():
        output = getattr(module, entry)(*args, **kwargs)
    return [t.float().cpu() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _loop(pipe, case: Case, small: bool, dtype):
    """The latents after a few steps, and guidance; noise of the host's generator."""
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
    """(output, seconds): of a second run where it is repeated."""
    for _ in range(1 + repeat):
        began = time.perf_counter()
        output = work(dtype)
        seconds = time.perf_counter() - began
    return output, seconds


def _enter_path(on_gpu: bool):
    """Our path from here on; on one CUDA device in place of simulated chips."""
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


def _say(out: Path, case: str, started: float, **facts):
    row = {"case": case, "at": round(time.perf_counter() - started, 1), **facts}
    line = json.dumps({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in row.items()})
    with open(out, "a") as file:
        file.write(line + "\n")
    print(line[:600], flush=True)


def _error(values: list, oracle: list) -> float:
    assert [v.shape for v in values] == [o.shape for o in oracle]
    errors = [((v.double() - o.double()).norm() / o.double().norm()).item() for v, o in zip(values, oracle)]
    return max(errors) if not any(map(math.isnan, errors)) else math.nan


def _spread(values: list) -> dict:
    return {"output": [list(v.shape) for v in values], "std": [float(f"{v.std().item():.4g}") for v in values]}


def _shapes(given) -> list:
    import torch
    from torch.utils._pytree import tree_leaves

    return [[str(t.dtype)[6:], *t.shape] for t in tree_leaves(given) if isinstance(t, torch.Tensor)]


def _where() -> dict:
    """JAX's device that computed, and what JAX held of its memory at most."""
    import jax

    device = jax.devices()[0]
    used = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"device": device.device_kind, "jax_gib": round(used / 2**30, 2)}


# All cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--each", type=float, default=600, help="seconds that a case may take")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", action="store_true", help="this case, in this process")
    given = parser.parse_intermixed_args()
    if given.one:
        return run(given.cases[0], given.out, given.small)
    failed, variables = [], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    for name in given.cases or CASES:
        words = [sys.executable, __file__, str(given.out), name, "--one"] + ["--small"] * given.small
        try:
            subprocess.run(words, env=variables, timeout=given.each, check=True)
        except subprocess.SubprocessError as error:
            failed.append(f"{name}: {error}")
    return "\n".join(failed) or None


if __name__ == "__main__":
    sys.exit(main())
