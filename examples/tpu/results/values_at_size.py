"""Models of published size on an NVIDIA GPU: what the TPU path computes, by JAX on CUDA, beside upstream's own on CUDA.

    python values_at_size.py OUT.jsonl [CASE ...] [--small]
    python values_at_size.py OUT.jsonl --record      what OUT.jsonl says goes into values-at-size.json

Same weights, same inputs, one card. Weights are random; they and the inputs are numbers that bfloat16 has, so that the error of a run in
bfloat16 is of its arithmetic alone. The call is the one that the published pipeline makes (`diffusers.tpu.planner`), its hidden states random.

    error(x) = |x - o| / |o|, the largest over the output tensors;  o: upstream in float32, products in float32 (no TF32)

Cases of gradients go back from the sum of an output's elements, each by a fixed random factor, over the root of how many there are, in
evaluation mode, with upstream's gradient checkpointing where the model has it. Compared are the gradients of every weight and of every random
input, and the error is the largest of any. A gradient whose root mean square in o is below 1e-3 of the largest one's, among weights or among
inputs, counts as noise (those of keys' biases are differences of almost equal numbers): its error is |x - o| over the norm of a tensor of
that root mean square. One that either side does not have counts as zeros.

Limits: 1e-4 in float32; in bfloat16 1.1 times upstream's own error, or 1e-2, of gradients for the median of the errors too (which JAX's CPU
backend misses where it sums bfloat16 gradients of a broadcast, rounding each partial sum). Kernels for TPUs run in Pallas's interpret mode, in the cases whose configuration
asks for them; elsewhere attention is `kernels/attention/reference.py`. `--small`: few layers, small pictures, on JAX's CPU backend where
there is no GPU, to try this script.
"""

import argparse
import functools
import gc
import io
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path


RECORD = Path(__file__).with_name("values-at-size.json")
DRAWN = {  # arguments that a model of zeros has made zeros
    "hidden_states", "sample", "z", "x", "encoder_hidden_states", "encoder_hidden_states_2", "pooled_projections", "text_embeds",
}  # fmt: skip
FLOAT32_LIMIT, BFLOAT16_FACTOR, BFLOAT16_LIMIT = 1e-4, 1.1, 1e-2
NOISE = 1e-3  # of the largest root mean square of a gradient
INPUT = "input "  # begins the name of an input's gradient
# "high" is TF32 to XLA's compiler for CUDA.
TRUE_FLOAT32 = {"matmul_precision": "highest", "convolution_precision": "highest"}


@dataclass(frozen=True)
class Case:
    """One model's call. `small`: its configuration where all is to be small. `what`: its name in a new row of the record."""

    model: str
    component: str
    entry: str = "forward"
    call: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    small: dict = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeat: bool = True
    steps: int = 0  # of a whole loop; 0: one call
    gradients: bool = False
    what: str = ""


WAN, KERNELS = "wan2.1-t2v-1.3b", {"attention": "kernel", "layers": "kernel"}
TWO = {"num_layers": 2}
BACK = {"dtypes": ("float32", "bfloat16"), "repeat": False, "gradients": True}
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
    "wan-1.3b-gradients": Case(
        WAN, "transformer", call={"num_frames": 17}, small=TWO, **BACK,
        what="Wan 2.1 1.3B, 480 x 832 x 17, gradients of every weight and input",
    ),
    "sd3.5-medium-gradients": Case(
        "stabilityai/stable-diffusion-3.5-medium", "transformer", small=TWO | {"dual_attention_layers": [0]}, **BACK,
        what="Stable Diffusion 3.5 medium, 1024, both guidance branches, gradients of every weight and input",
    ),
    "ltx-gradients": Case(
        "Lightricks/LTX-Video", "transformer", call={"num_frames": 33}, small=TWO, **BACK,
        what="LTX-Video, 480 x 704 x 33, both guidance branches, gradients of every weight and input",
    ),
    "sdxl-gradients": Case(
        "stabilityai/stable-diffusion-xl-base-1.0", "unet", call={"height": 512, "width": 512}, **BACK,
        small={"block_out_channels": [64, 128, 256], "attention_head_dim": [1, 2, 4], "transformer_layers_per_block": [1, 1, 2]},
        what="SDXL's UNet, 512, both guidance branches, gradients of every weight and input",
    ),
    "wan-vae-gradients": Case(
        WAN, "vae", "decode", {"height": 240, "width": 416, "num_frames": 9}, small={"base_dim": 16}, **BACK,
        what="Wan 2.1's VAE, decode, 240 x 416 x 9, gradients of every weight and input",
    ),
}  # fmt: skip


# One case, in a process of its own


def run(name: str, out: Path, small: bool):
    os.environ["DIFFUSERS_TPU"], os.environ["DIFFUSERS_TPU_CACHE"] = "off", "off"  # upstream's torch, till it is done
    import torch

    case, on_gpu, began = CASES[name], torch.cuda.is_available(), time.perf_counter()
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if on_gpu else "cpu"
    # Trying algorithms takes a minute for each program in float32, and gigabytes.
    if case.component == "transformer" or case.gradients:
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    say = functools.partial(_say, out, case=name + "-small" * small, started=began)

    pipe, args, kwargs, narrow, module = _recorded(case, "cuda" if on_gpu else "cpu", small)
    facts = {"parameters": sum(p.numel() for p in module.parameters()), "inputs": _shapes((args, kwargs))}
    say(stage="built", **facts)
    if case.steps:
        work = functools.partial(_loop, pipe, case, small)
    elif case.gradients:
        module.requires_grad_()
        if module._supports_gradient_checkpointing:
            module.enable_gradient_checkpointing()
        work = functools.partial(_gradients, module, case.entry, args, kwargs, narrow)
    else:
        work = functools.partial(_call, module, case.entry, args, kwargs, narrow)
    oracle, seconds = _timed(work, torch.float32, case.repeat)
    say(stage="upstream", dtype="float32", seconds=seconds, **_spread(oracle))
    upstream = {"float32": {"error": 0.0}}
    if "bfloat16" in case.dtypes:
        _cast(module, torch.bfloat16)
        own, seconds = _timed(work, torch.bfloat16, case.repeat)
        upstream["bfloat16"] = _compared(own, oracle)
        say(stage="upstream", dtype="bfloat16", seconds=seconds, **upstream["bfloat16"])
        del own
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
        compared, own = _compared(ours, oracle), upstream[dtype]
        limits = _limits(dtype, own)
        ok = all(compared[name] <= limit for name, limit in limits.items())
        row = {
            "stage": "ours", "dtype": dtype, **compared, "upstream_error": own["error"], "limit": limits["error"], "ok": ok,
            "first_seconds": first, "compile_seconds": sum(p["compile_seconds"] for p in found["programs"]),
            "programs": len(found["programs"]), "eager": str(found["eager"]), "explain": tpu.explain(whole)[:300], **_where(), **_spread(ours),
        }  # fmt: skip
        say(**row)
        if case.repeat:
            again, seconds = _timed(work, getattr(torch, dtype), repeat=False)
            say(stage="again", dtype=dtype, seconds=seconds, same=_compared(again, ours)["error"])
        tpu.uninstall(whole)
        del ours
    calls = [f"{how.kernel} {how.q} {how.k} {how.dtype} {how.mask} {how.reason}" for how in api.explain()]
    say(stage="attention", calls=calls)


def _recorded(case: Case, device: str, small: bool):
    """(the pipeline, the component's first call in it with the dtypes that it has in bfloat16, the component, random, on the device)."""
    import torch
    from accelerate import init_empty_weights

    from diffusers.tpu.planner import building

    # In another process, as it imports torchax: with that, torch has no gradients on CUDA.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        saved = io.BytesIO(apart.submit(_arguments, case, small).result())
    args, kwargs, narrow = torch.load(saved, weights_only=False)
    pipe = building.build(building.configuration_of(case.model), torch.float32, tiled=False)
    module = getattr(pipe, case.component)
    with init_empty_weights():  # what upstream keeps as plain attributes stays on the host, where all goes later
        module = type(module).from_config({**module.config, **(case.small if small else {})})
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            owner._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device=device), requires_grad=False)
    _fill(module.eval().to(device))
    setattr(pipe, case.component, module)
    return pipe, _drawn(args, "", case.gradients), _drawn(kwargs, "", case.gradients), narrow, module


def _arguments(case: Case, small: bool) -> bytes:
    """Saved by torch: the arguments of the component's first call, by place and by name, and their leaves' dtypes in bfloat16."""
    import torch
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
    saved = io.BytesIO()
    torch.save((args, kwargs, narrow), saved)
    return saved.getvalue()


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


def _drawn(given, name: str, gradients: bool):
    """The arguments, those named in `DRAWN` random, and asking for gradients if these are compared."""
    import torch

    if isinstance(given, dict):
        return {key: _drawn(x, key, gradients) for key, x in given.items()}
    if isinstance(given, (list, tuple)):
        names = (name or ("hidden_states" if n == 0 else "") for n in range(len(given)))
        return type(given)(_drawn(x, name, gradients) for x, name in zip(given, names))
    if isinstance(given, torch.Tensor) and given.is_floating_point():
        if name in DRAWN:
            return torch.randn(given.shape).to(torch.bfloat16).float().requires_grad_(gradients)
        return given.float().contiguous().clone()
    return given.clone() if isinstance(given, torch.Tensor) else given


def _cast(module, dtype):
    """As `from_pretrained` casts."""
    import torch

    kept = set() if dtype == torch.float32 else {*(module._keep_in_fp32_modules or ())}
    saved = module.state_dict().keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and name in saved and not kept & {*name.split(".")}:
            tensor.data = tensor.data.to(dtype)


def _call(module, entry: str, args, kwargs, narrow: list, dtype):
    """The output's tensors in float32, on the host. `narrow`: the dtype of each leaf of the arguments in a run in bfloat16."""
    import torch

    args, kwargs = _placed((args, kwargs), next(module.parameters()).device, narrow, dtype)
    with torch.no_grad():
        return [t.float().cpu() for t in _floating(getattr(module, entry)(*args, **kwargs))]


def _gradients(module, entry: str, args, kwargs, narrow: list, dtype) -> dict:
    """By name, in float32, on the host: gradients of the inputs that ask for one, and of every weight. Arguments are those of `_call`."""
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    device, draw = next(module.parameters()).device, torch.Generator().manual_seed(3)
    given = _placed((args, kwargs), device, narrow, dtype)
    outputs = _floating(getattr(module, entry)(*given[0], **given[1]))
    factors = [torch.randn(t.shape, generator=draw).to(device) for t in outputs]
    loss = sum((t.float() * factor).sum() / t.numel() ** 0.5 for t, factor in zip(outputs, factors))
    loss.backward()
    inputs = {f"{INPUT}{keystr(path[1:])}": leaf for path, leaf in tree_flatten_with_path(given)[0]}
    found = {}
    for name, t in (*inputs.items(), *module.named_parameters()):
        if isinstance(t, torch.Tensor) and t.grad is not None:
            found[name], t.grad = t.grad.float().cpu(), None
    return found


def _placed(given, device, narrow: list, dtype):
    """The arguments on the device, in the dtypes of a run in `dtype`; what asks for gradients does so there."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(given)
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            there = leaf.detach().to(device, narrow[n] if dtype == torch.bfloat16 else leaf.dtype)
            leaves[n] = there.requires_grad_(leaf.requires_grad)
    return tree_unflatten(leaves, spec)


def _floating(output) -> list:
    """The tensors of an output that are floating."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


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


def _compared(values, oracle) -> dict:
    """The largest error; of gradients also whose it is, the median of those that are no noise, and how many are."""
    if isinstance(oracle, dict):
        return _compared_gradients(values, oracle)
    assert [v.shape for v in values] == [o.shape for o in oracle]
    errors = [_size(v.double() - o.double()) / _size(o) for v, o in zip(values, oracle)]
    return {"error": max(errors) if not any(map(math.isnan, errors)) else math.nan}


def _compared_gradients(values: dict, oracle: dict) -> dict:
    import torch

    assert all(values[name].shape == oracle[name].shape for name in values.keys() & oracle.keys())
    zero = torch.zeros(())
    sizes = {name: _size(oracle.get(name, zero)) for name in oracle | values}
    of_inputs, of_weights = ([x for name, x in sizes.items() if _is_input(name) is kind] for kind in (True, False))
    least = {True: NOISE * max(of_inputs), False: NOISE * max(of_weights)}
    errors, plain = {}, []
    for name, size in sizes.items():
        floor = least[_is_input(name)]
        errors[name] = _size(values.get(name, zero) - oracle.get(name, zero)) / max(size, floor)
        plain += [errors[name]] if size >= floor else []
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    noise = len(errors) - len(plain)
    return {"error": errors[worst], "worst": worst, "median": statistics.median(plain), "noise": noise}


def _limits(dtype: str, own: dict) -> dict:
    """What the figures of `_compared` may be at most, by name. `own`: upstream's in this dtype."""
    if dtype == "float32":
        return {"error": FLOAT32_LIMIT}
    return {name: max(BFLOAT16_FACTOR * own[name], BFLOAT16_LIMIT) for name in ("error", "median") if name in own}


def _size(t) -> float:
    """The root mean square of a tensor's elements."""
    import torch

    return torch.linalg.vector_norm(t, dtype=torch.float64).item() / t.numel() ** 0.5


def _is_input(name: str) -> bool:
    return name.startswith(INPUT)


def _spread(values) -> dict:
    """Shapes and standard deviations; of gradients, how many they are, and the root mean square of all their elements."""
    if isinstance(values, dict):
        squares = sum(_size(v) ** 2 * v.numel() for v in values.values()) / sum(v.numel() for v in values.values())
        return {"gradients": len(values), "std": [float(f"{squares**0.5:.4g}")]}
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


def record(out: Path) -> str | None:
    """Put what the file says of each case and dtype into the record; of cases with `--small` nothing. What is not ok is left out, and returned."""
    kept, failed = json.loads(RECORD.read_text()), []
    rows = {row["case"]: row for row in kept["rows"]}
    for said in map(json.loads, out.read_text().splitlines()):
        name, dtype = said["case"], said.get("dtype")
        if name not in CASES:
            continue
        row = rows.setdefault(name, {"case": name, "what": CASES[name].what or name})
        if said["stage"] == "built":
            row["parameters"] = said["parameters"]
        elif (said["stage"], dtype) == ("upstream", "float32"):
            row["std"] = said["std"][0]
        elif said["stage"] == "ours" and said["device"] == kept["card"] and said["ok"]:
            own = None if dtype == "float32" else said["upstream_error"]
            row[dtype] = {"error": said["error"], "upstream_error": own}
            row[dtype] |= {"median": said["median"]} if "median" in said else {}
        elif said["stage"] == "ours":
            failed.append(f"{name} in {dtype}, on {said['device']}: error {said['error']}, limit {said['limit']}")
    kept["rows"] = [row for row in rows.values() if row.keys() & {"float32", "bfloat16"}]
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    return "\n".join(failed) or None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--each", type=float, default=600, help="seconds that a case may take")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", action="store_true", help="this case, in this process")
    parser.add_argument("--record", action="store_true", help="put what OUT.jsonl says into values-at-size.json")
    given = parser.parse_intermixed_args()
    if given.record:
        return record(given.out)
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
