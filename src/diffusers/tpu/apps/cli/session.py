"""What commands share: the device asked for, and a pipeline loaded."""

import os
import random
import re
from pathlib import Path

import transformers

import diffusers

from ...chips import hosts
from ...chips.devices import Target, find_target, jax_devices, why_off
from ...config import parse_mesh, read_environment
from .errors import BadInput, loading


MODES = {"auto": None, "tpu": "auto", "simulated": "cpu", "upstream": "off"}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def choose_target(device: str) -> Target | None:
    """What this process runs on, None for plain upstream; sets DIFFUSERS_TPU for the rest of the process.

    Raises BadInput where a TPU is wanted, or nothing was said, and there is none.
    """
    forced = device == os.environ.get("DIFFUSERS_TPU", "").strip().lower() == "tpu"
    if MODES[device] is not None and not forced:
        os.environ["DIFFUSERS_TPU"] = MODES[device]
    with loading():
        environment = read_environment()
    target = find_target(environment)
    if target is None and environment.mode == "auto":
        raise BadInput(
            f"expected a TPU, found none ({why_off(environment)}). DIFFUSERS_TPU=cpu (or --device simulated) runs the same path on"
            " simulated chips, slowly: for small models and checks. --device upstream runs plain diffusers."
        )
    return target


def is_first(target: Target | None) -> bool:
    """Whether this process is the one of its run that writes and tells; the processes of a run on several hosts join here.

    The others say errors only.
    """
    if target is None:
        return True
    with loading():
        hosts.join(target.platform)
    first = hosts.is_main(target.platform)
    if not first:
        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
    return first


def seed_of(given: int | None) -> int:
    """`--seed`, else one that is drawn: the same in all processes of a run."""
    return int(hosts.of_first(str(random.randrange(2**31)))) if given is None else given


def pipeline_class(model: str) -> type:
    """The class that the model's `model_index.json` names; only that file is read."""
    if not Path(model).is_dir() and not HUB_ID.fullmatch(model):
        raise BadInput(
            f"expected a model directory or a hub id (name/model), got {model!r}: there is no such directory"
        )
    with loading():
        name = diffusers.DiffusionPipeline.load_config(model).get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if found is None:
        raise BadInput(f"expected model_index.json of {model} to name a pipeline of diffusers, got {name!r}")
    return found


def load(model: str, dtype=None):
    """The pipeline as `from_pretrained` gives it, on the TPU path where that is active."""
    with loading():
        return diffusers.DiffusionPipeline.from_pretrained(model, **({} if dtype is None else {"dtype": dtype}))


def mesh_of(text: str | None, target: Target | None) -> tuple[int, int, int] | None:
    """`--mesh` as degrees, or None where none is given. Raises BadInput where it or the environment's does not fit the chips."""
    if target is None and text is None:
        return None
    if target is None:
        raise BadInput("expected no --mesh without the TPU path: plain diffusers has none")
    from ...chips.mesh import plan_degrees

    with loading():
        wanted = read_environment().mesh if text is None else parse_mesh(text)
        degrees = plan_degrees(len(jax_devices(target)), wanted, paired=False)
    return None if text is None else degrees
