"""Steps that commands share: choose the device, read the arguments of the call, load the pipeline."""

import os
import random
import re
from pathlib import Path

import torch
import transformers

import diffusers

from .... import tpu
from ...chips import hosts
from ...chips.devices import Target, find_target, jax_devices, why_off
from ...common.config import TPUConfig, parse_mesh, read_environment
from . import arguments
from .errors import loading


MODES = {"auto": None, "tpu": "auto", "simulated": "cpu", "upstream": "off"}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def choose_target(device: str) -> Target | None:
    """The device that this process runs on, None for plain upstream; sets DIFFUSERS_TPU for the rest of the process.

    Raises ValueError if there is no TPU and neither `device` nor DIFFUSERS_TPU names another device.
    """
    forced = device == os.environ.get("DIFFUSERS_TPU", "").strip().lower() == "tpu"
    if MODES[device] is not None and not forced:
        os.environ["DIFFUSERS_TPU"] = MODES[device]
    environment = read_environment()
    target = find_target(environment)
    if target is None and environment.mode == "auto":
        raise ValueError(
            f"expected a TPU, found none ({why_off(environment)}). DIFFUSERS_TPU=cpu (or --device simulated) runs the same path on"
            " simulated chips, slowly: for small models and checks. --device upstream runs plain diffusers."
        )
    if target is None and "idioms" in vars(tpu):  # switched on by `import diffusers`, by the environment of then
        tpu.idioms.off()
    return target


def chosen(options) -> Target | None:
    """`choose_target` of the command's `--device`. Raises ValueError for flags that plain diffusers does not have."""
    target = choose_target(options.device)
    if target is None and (ours := arguments.config_of(options, mesh=None)):
        raise ValueError(f"expected no {arguments.flag([*ours][0])} without the TPU path: plain diffusers has none")
    return target


def is_first(target: Target | None) -> bool:
    """Whether this process is the one of its run that writes and prints; the others log errors only. Processes join here."""
    if target is None:
        return True
    hosts.join(target.platform)
    if not (first := hosts.number(target.platform) == 0):
        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
    return first


def seed_of(given: int | None) -> int:
    """`--seed`, else a random one, which is the same in all processes of a run."""
    return int(hosts.of_first(str(random.randrange(2**31)))) if given is None else given


def asked(options, rest: list[str]) -> tuple[type, dict]:
    """The class of the model's pipeline, and the arguments of its call that the command line gives."""
    cls = pipeline_class(options.model)
    return cls, arguments.call_arguments(cls, arguments.given_arguments(options, rest))


def begin(options, rest: list[str]) -> tuple:
    """Target, whether this process is the first, mesh, pipeline class and arguments of a command that runs a pipeline."""
    target = chosen(options)
    return target, is_first(target), mesh_of(options.mesh, target), *asked(options, rest)


def pipeline_class(model: str) -> type:
    """The class that the model's `model_index.json` names; only that file is read."""
    if not Path(model).is_dir() and not HUB_ID.fullmatch(model):
        raise ValueError(f"expected a model directory or a hub id (name/model), got {model!r}: no such directory")
    with loading():
        name = diffusers.DiffusionPipeline.load_config(model).get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"expected model_index.json of {model} to name a pipeline of diffusers, got {name!r}")
    return found


def mesh_of(text: str | None, target: Target | None) -> tuple[int, int, int] | None:
    """`--mesh` as degrees, or None without it. Raises ValueError if it or the environment's mesh does not fit the chips."""
    if target is None:
        return None
    from ...chips.mesh import plan_degrees

    wanted = read_environment().mesh if text is None else parse_mesh(text)
    degrees = plan_degrees(len(jax_devices(target)), wanted)
    return None if text is None else degrees


def load(options, target: Target | None, mesh):
    """The pipeline of `from_pretrained`, on the TPU path if that is active, with its weights on the device."""
    with loading():
        dtype = {"dtype": getattr(torch, options.dtype)} if options.dtype else {}
        pipe = diffusers.DiffusionPipeline.from_pretrained(options.model, **dtype)
    return placed(pipe, options, target, mesh)


def placed(pipe, options, target: Target | None, mesh):
    if target is None:
        return pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    if not tpu.is_main_process():
        pipe.set_progress_bar_config(disable=True)
    from ...pipelines.pipeline import installation

    config = arguments.config_of(options)
    if mesh is not None or config:
        tpu.install(pipe, TPUConfig(mesh=mesh, **config))
    pipe.to("tpu")
    installation(pipe).hbm_manager.ready()
    return pipe
