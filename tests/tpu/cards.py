"""Model-card scripts, word for word, and what surrounds them: a web of local pictures, small sizes, the same without the path.

The scripts are those that upstream's installed files carry in their docstrings, the code of the model cards. Nothing of
them is changed for the TPU path; the surroundings are:

- `requests.get` answers every address with a picture or a clip made here;
- every pipeline's `__call__` is told at most `LIMITS`: height, width, frames, steps, and pictures in the arguments no larger;
- `cv2` is a stand-in with edges enough for `Canny` where it is not installed.

The same script without the path (`without_path`) is the oracle: there "cuda" means "cpu", and what needs a GPU is left out.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import requests
import torch

import diffusers
import web
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.tpu.compare.pipelines import relative_error
from diffusers.tpu.pipelines.pipeline import tpu_class
from diffusers.utils import BaseOutput
from diffusers.video_processor import VideoProcessor


ROOT = Path(diffusers.__file__).parent
NEED_A_GPU = {"enable_model_cpu_offload", "enable_xformers_memory_efficient_attention", "enable_group_offload"}
# What lets a pipeline choose a size by itself, near a million pixels.
OWN_CHOICE = {"use_resolution_binning": False, "_auto_resize": False, "max_area": 64 * 96}


# The most that a pipeline's call is asked for; `pixels` of a side of a picture among its arguments.
LIMITS = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "pixels": 96}


@dataclass(frozen=True)
class Card:
    """Script `number` of upstream's file `source` below `diffusers`.

    Args:
        renamed: of the checkpoints that the script's comments name, the one to take instead.
        after: what is added where a docstring ends before the pipeline is called.
        given: names that a script uses and does not define.
        limits: where they are not `LIMITS`.
    """

    source: str
    number: int = 0
    renamed: dict = field(default_factory=dict)
    after: str = ""
    given: tuple = ()
    limits: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        suffix = [str(self.number)] * bool(self.number) + [name.split("/")[-1] for name in self.renamed.values()]
        return "-".join([Path(self.source).stem.removeprefix("pipeline_"), *suffix])

    def script(self) -> str:
        script = scripts(ROOT / self.source)[self.number]
        for old, new in self.renamed.items():
            script = script.replace(old, new)
        return script + self.after


@functools.cache
def scripts(path: Path) -> list[str]:
    """The scripts in the strings of a Python file: fenced code that loads something, its prompts taken off."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    strings = [node for node in nodes if isinstance(node.value, str) and "from_pretrained" in node.value]
    found = []
    for string in sorted(strings, key=lambda node: node.lineno):
        for fence in re.findall(r"```py(?:thon)?\n(.*?)```", string.value, re.DOTALL):
            lines = [re.sub(r"^(>>>|\.\.\.) ?", "", line) for line in textwrap.dedent(fence).splitlines()]
            if any("from_pretrained" in line for line in lines):
                found.append("\n".join(lines) + "\n")
    return found


# Which scripts are run: of upstream's installed files, video first.
ROWS = json.loads(Path(__file__).with_suffix(".json").read_text())
CARDS = [Card(source, **(facts[0] if facts else {})) for source, *facts in ROWS]
# In the fast set: the video that is compiled soonest (Wan's takes 20 s).
FAST = [card for card in CARDS if card.name == "ltx"]


def repositories(script: str) -> list[str]:
    """The strings of a script that look like names of repositories."""
    names = [node.value for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Constant)]
    return sorted({name for name in names if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name)})


def without_path(script: str, float32: bool = False) -> str:
    """The script for a host without an accelerator; with `float32`, in float32 throughout."""
    calls = rf"^( *)[\w.]+\.({'|'.join(NEED_A_GPU)})\(([^()]|\([^()]*\))*\)"
    script = re.sub(calls, r"\1pass", script, flags=re.M).replace('"cuda"', '"cpu"')
    return in_float32(script) if float32 else script


def in_float32(script: str) -> str:
    """The script in float32 throughout."""
    return re.sub(r"torch\.b?float16\b", "torch.float32", script)


def _smaller(value, limits: dict):
    """A picture, or a clip of pictures, among a call's arguments, of sides and length within the limits."""
    if isinstance(value, PIL.Image.Image) and max(value.size) > limits["pixels"]:
        scale = limits["pixels"] / max(value.size)
        return value.resize([max(32, round(side * scale) // 32 * 32) for side in value.size])
    if isinstance(value, list) and value and isinstance(value[0], PIL.Image.Image):
        return [_smaller(picture, limits) for picture in value[: limits["num_frames"]]]
    return value


def _limited(call, limits: dict):
    """A pipeline's `__call__` within the limits: where a script leaves a size to the model, the limit is what it gets."""
    parameters = inspect.signature(call).parameters

    @functools.wraps(call)
    def limited(self, *args, **kwargs):
        bound = inspect.signature(call).bind(self, *args, **kwargs)
        arguments = {name: _smaller(value, limits) for name, value in bound.arguments.items()}
        for name in parameters.keys() & limits.keys():
            asked = arguments.get(name, parameters[name].default)
            arguments[name] = min(asked, limits[name]) if asked else limits[name]
        arguments |= {name: value for name, value in OWN_CHOICE.items() if name in parameters}
        bound.arguments = {name: arguments[name] for name in parameters if name in arguments}
        return call(*bound.args, **bound.kwargs)

    limited.limits = limits
    return limited


def _values(value) -> list:
    """The arrays in what a script ends with: tensors, pictures, outputs of pipelines and lists of them."""
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().float().numpy()]
    if isinstance(value, (PIL.Image.Image, np.ndarray)):
        return [np.asarray(value)]
    value = value.to_tuple() if isinstance(value, BaseOutput) else value
    return [array for part in value for array in _values(part)] if isinstance(value, (list, tuple)) else []


@dataclass
class Ran:
    """What a script left: arrays by the name of the variable, tensors before they became pictures, files."""

    values: dict
    pixels: list
    files: dict

    def shapes(self) -> dict:
        return {name: [array.shape for array in arrays] for name, arrays in self.values.items()}

    def exact(self) -> list:
        """What the runs are compared by: floats before they became pictures, and tensors the script keeps; else all."""
        return self.pixels or [array for arrays in self.values.values() for array in arrays]


def distance(ours: Ran, oracle: Ran) -> float:
    """The relative error of what both left; bytes that are a level apart are equal."""
    assert ours.exact()
    pairs = zip(ours.exact(), oracle.exact(), strict=True)
    near = [np.where(np.abs(x.astype(int) - y) <= 1, y, x) if x.dtype == np.uint8 else x for x, y in pairs]
    return relative_error(near, oracle.exact())


@contextlib.contextmanager
def surroundings(monkeypatch, limits: dict, pixels: list):
    """What scripts find: addresses that answer, pipelines within the limits; float pictures are kept in `pixels`."""
    for file in ROOT.glob("pipelines/*/*_flax.py"):  # first: they keep the calls of those that they stand for
        importlib.import_module(f"diffusers.pipelines.{file.parent.name}.{file.stem}")
    with monkeypatch.context() as patch:
        patch.setattr(requests, "get", web.get)
        if importlib.util.find_spec("cv2") is None:
            patch.setitem(sys.modules, "cv2", types.SimpleNamespace(Canny=web.canny))

        def kept(post):
            @functools.wraps(post)
            def keep(self, *args, **kwargs):
                pixels.extend(_values([*args[:1], *kwargs.values()][0]))
                return post(self, *args, **kwargs)

            return keep

        patch.setattr(VaeImageProcessor, "postprocess", kept(VaeImageProcessor.postprocess))
        patch.setattr(VideoProcessor, "postprocess_video", kept(VideoProcessor.postprocess_video))
        register = DiffusionPipeline.register_modules

        def registered(self, **modules):
            owner = next(base for base in type(self).__mro__ if "__call__" in vars(base))
            if not hasattr(owner.__call__, "limits"):
                patch.setattr(owner, "__call__", _limited(owner.__call__, limits))
            return register(self, **modules)

        patch.setattr(DiffusionPipeline, "register_modules", registered)
        tpu_class.cache_clear()  # these classes hold the calls of those that they stand for
        yield
    tpu_class.cache_clear()


def run(script: str, card: Card, monkeypatch, folder: Path, seed: int) -> Ran:
    """Execute a script in `folder`, from this seed of torch's."""
    folder.mkdir()
    (folder / "snowy_mountains.png").write_bytes(web.picture("snowy_mountains.png"))
    before, pixels = os.listdir(folder), []
    torch.manual_seed(seed)
    names = {"__name__": "__main__"}
    names |= {name: torch if name == "torch" else getattr(diffusers.utils, name) for name in card.given}
    with surroundings(monkeypatch, LIMITS | card.limits, pixels):
        monkeypatch.chdir(folder)
        exec(compile(script, card.name, "exec"), names)
    values = {name: _values(value) for name, value in names.items()}
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name not in before}
    return Ran({name: arrays for name, arrays in values.items() if arrays}, pixels, files)
