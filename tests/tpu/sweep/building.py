"""A tiny pipeline of any class that upstream exports, and a call of it, from signatures, annotations and `recipes`."""

import inspect
import sys
import typing

import torch
from components import FRAMES, component, noise_image, noise_mask, noise_video
from recipes import recipes_of

import diffusers
from diffusers import DiffusionPipeline


LEFT_OUT = {"DiffusionPipeline", "ModularPipeline"}
STEPS, SIZE = 2, 64
PROMPTS = ("a red circle moving left", "two green squares")


def exported() -> list[str]:
    """Names of upstream's pipelines, all of them."""
    return [name for name in dir(diffusers) if name.endswith("Pipeline") and name not in LEFT_OUT]


def build(name: str, seed: int = 0) -> DiffusionPipeline:
    """A tiny pipeline of random weights. Raises what upstream's constructors raise, TypeError where nothing is known of a component."""
    torch.manual_seed(seed)
    cls = getattr(diffusers, name)
    hints = typing.get_type_hints(cls.__init__)
    changes, _ = recipes_of(name)
    of_small_maps(sys.modules[cls.__module__])
    made = {}
    for key, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        change = changes.get(key, {} if parameter.default is parameter.empty else parameter.default)
        made[key] = (
            component(hints[key], change) if isinstance(change, dict) else change() if callable(change) else change
        )
    pipe = cls(**made)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def of_small_maps(module):
    """Where a pipeline's module makes a megapixel of every image, whatever is asked: 64 x 64 pixels of it, in either run."""
    dimensions = getattr(module, "calculate_dimensions", None)
    if dimensions is not None and not hasattr(dimensions, "plain"):
        module.calculate_dimensions = lambda area, ratio: dimensions(area // 256, ratio)
        module.calculate_dimensions.plain = dimensions
    joy = sys.modules.get("diffusers.pipelines.joyimage.image_processor")
    if joy is not None and "joyimage" in module.__name__:
        joy.BUCKETS[1024] = [(SIZE, SIZE)]


def arguments(name: str, seed: int = 0, size: int = SIZE, prompt: str = PROMPTS[0]) -> dict:
    """A small call of this pipeline; a generator is not among them."""
    cls = getattr(diffusers, name)
    takes = inspect.signature(cls.__call__).parameters
    _, changes = recipes_of(name)
    known = {
        "prompt": prompt, "height": size, "width": size, "num_frames": FRAMES, "num_inference_steps": STEPS, "output_type": "np",
        "image": noise_image, "mask_image": noise_mask, "control_image": noise_image,
        "video": noise_video, "control_video": noise_video, "conditioning_frames": noise_video, "control_mask": noise_mask,
        "use_resolution_binning": False,
    }  # fmt: skip
    if "strength" in takes:
        known |= {"strength": 0.5, "num_inference_steps": 2 * STEPS}
    given = {key: value for key, value in {**known, **changes}.items() if key in takes and value is not None}
    return {key: value(seed, size, size) if callable(value) else value for key, value in given.items()}
