"""`diffusers-tpu generate --stage`: runs one of three stages, with files between them. See the package `stages`."""

import dataclasses
import time

import torch

from .. import stages
from ..generation import media
from . import arguments, generate, output, session
from .errors import loading
from .timing import Stopwatch


BEFORE = {"denoise": "text", "decode": "denoise"}
OUTPUTS = {"text": ((".safetensors",), "-text"), "denoise": ((".safetensors",), "-latents"), "decode": ()}


def run(options, rest: list[str]) -> int:
    start = time.perf_counter()
    target, first, mesh, cls, call = session.begin(options, rest)
    with loading():
        settings, tensors = (_first if options.stage == "text" else _next)(options, cls, call)
    path = output.output_path(options.output, settings.call.get("prompt"), *OUTPUTS[options.stage])
    if options.input is not None and path.exists() and path.samefile(options.input):
        raise ValueError(f"expected --output to be another file than --input, got {path} twice")
    with loading():
        dtypes = (name and getattr(torch, name) for name in (settings.dtype, settings.vae_dtype))
        pipe = stages.load(options.model, options.stage, *dtypes)
    pipe = session.placed(pipe, options, target, mesh)
    stopwatch = Stopwatch(pipe, start)
    with stopwatch.running(whole=False):
        result = _run(options.stage, stopwatch, settings, tensors)
    ran = f"{generate.where(pipe, target)}; attention {options.attention}"
    elsewhere = [f"stage {stage} ran on {place}" for stage, place in settings.ran.items() if place != ran]
    if not first:
        return 0
    if options.stage == "decode":
        files = media.write(result, path, options.fps)
    else:
        changes = {"ran": {**settings.ran, options.stage: ran}}
        if options.stage == "text" and isinstance(pipe.vae, torch.nn.Module):
            changes["vae_dtype"] = str(pipe.vae.dtype).removeprefix("torch.")
        kept = {**tensors, **result} if options.stage == "text" else result
        stages.save(path, dataclasses.replace(settings, stage=options.stage, **changes), kept)
        files = [path]
    generate.tell(stopwatch, f"stage {options.stage}; {ran}; seed {settings.seed}", files)
    for place in elsewhere:
        print(f"{place}: the last bits may differ from those of one run")
    return 0


def _first(options, cls: type, call: dict) -> tuple[stages.Settings, dict]:
    """Settings of a new run, from the command line, and the tensors of its pictures."""
    seed, tensors = session.seed_of(options.seed), {}
    extra = generate.call_extras(cls, options, seed)
    arguments.require(cls, [*call, *extra])
    settings = stages.Settings(
        stage="text",
        model=options.model,
        fingerprint=stages.fingerprint(options.model),
        pipeline=cls.__name__,
        dtype=options.dtype,
        seed=seed,
        call=_packed(call, extra, tensors),
    )
    return settings, tensors


def _next(options, cls: type, call: dict) -> tuple[stages.Settings, dict]:
    """Settings and tensors of the file that the previous stage wrote. Raises ValueError for flags that contradict them."""
    settings, tensors = stages.read(options.input, BEFORE[options.stage])
    if stages.fingerprint(options.model) != settings.fingerprint:
        raise ValueError(
            f"expected the model of {options.input}, {settings.model}, got {options.model}, whose configuration is another"
        )
    extra = generate.call_extras(cls, options, settings.seed)
    kept = {n: p.default for n, p in arguments.parameters_of(cls).items()} | settings.call
    for name, value in [*_packed(call, extra, {}).items(), ("seed", options.seed), ("dtype", options.dtype)]:
        there = getattr(settings, name) if name in ("seed", "dtype") else kept[name]
        if value is not None and value != there:
            raise ValueError(
                f"expected {arguments.flag(name)} as in {options.input}, {_shown(there)}, got {_shown(value)}: leave it"
                " out, or begin with the stage text"
            )
    return settings, tensors


def _packed(call: dict, extra: dict, tensors: dict) -> dict:
    given = {**call, **{name: value for name, value in extra.items() if name == "image"}}
    return {name: stages.pack(f"call.{name}", value, tensors) for name, value in given.items()}


def _shown(packed) -> str:
    return f"the picture {packed['sha256'][:12]}" if isinstance(packed, dict) else repr(packed)


def _run(stage: str, stopwatch: Stopwatch, settings: stages.Settings, tensors: dict):
    """The stage's result: tensors by name, or frames."""
    pipe = stopwatch.pipe
    if stage == "decode":
        return stages.run_decode(pipe, tensors[stages.LATENTS], "pil")
    call = {name: stages.unpack(value, tensors) for name, value in settings.call.items()}
    if stage == "text":
        return stages.run_text(pipe, call, settings.seed)
    latents = stages.run_denoise(pipe, {**call, **stopwatch.callback}, settings.seed, tensors)
    return {stages.LATENTS: latents}
