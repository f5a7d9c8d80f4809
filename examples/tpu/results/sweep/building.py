"""Builds a tiny pipeline of any class that upstream exports, and a call of it, from signatures, annotations and `recipes.json`.

All recipes whose pattern matches a pipeline's whole name apply, in order. `parts` has changes of components and settings, null for none (see
`components.component`). `call` has arguments; for "@NAME NUMBERS" the function NAME of this module is called with seed, height, width and
the numbers.
"""

import inspect
import json
import re
import sys
import typing
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from components import component

import diffusers
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.tpu import uninstall


LEFT_OUT = {"DiffusionPipeline", "ModularPipeline"}
STEPS, SIZE, FRAMES = 2, 64, 9
PROMPTS = ("a red circle moving left", "two green squares")
RECIPES = json.loads(Path(__file__).with_name("recipes.json").read_text())
RESULTS = ("images", "videos", "audios", "audio")
PICTURES = {
    **dict.fromkeys(("image", "control_image"), "@noise_image"), **dict.fromkeys(("mask_image", "control_mask"), "@noise_mask"),
    **dict.fromkeys(("video", "control_video", "conditioning_frames"), "@noise_video"),
}  # fmt: skip


def recipes_of(name: str) -> tuple[dict, dict]:
    """Returns the changes of components and settings, and the arguments of a call, for a pipeline's name."""
    components, call = {}, {}
    for one in RECIPES:
        if re.fullmatch(one["pattern"], name.removesuffix("Pipeline")):
            for key, value in one.get("parts", {}).items():
                both = isinstance(value, dict) and isinstance(components.get(key), dict)
                components[key] = {**components[key], **value} if both else value
            call.update(one.get("call", {}))
    return components, call


def exported() -> list[str]:
    """Returns the names of all of upstream's pipelines."""
    return [name for name in dir(diffusers) if name.endswith("Pipeline") and name not in LEFT_OUT]


def build(name: str, seed: int = 0) -> DiffusionPipeline:
    """Returns a tiny pipeline with random weights.

    Raises:
        TypeError: a component that cannot be made; also what upstream's constructors raise.
    """
    torch.manual_seed(seed)
    cls, (changes, _) = getattr(diffusers, name), recipes_of(name)
    of_small_maps(sys.modules[cls.__module__])
    if issubclass(cls, ModularPipeline):
        return of_blocks(cls(), changes)
    made, hints = {}, typing.get_type_hints(cls.__init__)
    for key, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        change = changes.get(key, {} if parameter.default is parameter.empty else parameter.default)
        made[key] = component(hints.get(key), change)
    pipe = cls(**made)
    if getattr(pipe, "default_sample_size", None) == 128:  # of some the area, whatever is asked
        pipe.default_sample_size = SIZE // 8
    pipe.set_progress_bar_config(disable=True)
    return pipe


def of_blocks(pipe: ModularPipeline, changes: dict) -> ModularPipeline:
    """Returns the modular pipeline, off the TPU path, with tiny components in place of those that it would load or a recipe names."""
    blocks, made = pipe.blocks, {}
    for spec in blocks.expected_components:
        if spec.default_creation_method == "from_pretrained" or spec.name in changes:
            made[spec.name] = component(spec.type_hint, changes.get(spec.name, {}))
    settings = {one.name: changes[one.name] for one in blocks.expected_configs if one.name in changes}
    pipe.update_components(**{name: one for name, one in made.items() if one is not None}, **settings)
    pipe.set_progress_bar_config(disable=True)
    return uninstall(pipe)  # the oracle's is this one


def of_small_maps(module):
    """Patches modules of pipelines that resize every image to a megapixel, so that it has 64 x 64 pixels in both runs."""
    dimensions = getattr(module, "calculate_dimensions", None)
    if dimensions is not None and not hasattr(dimensions, "plain"):
        module.calculate_dimensions = lambda area, ratio: dimensions(area // 256, ratio)
        module.calculate_dimensions.plain = dimensions
    joy = sys.modules.get("diffusers.pipelines.joyimage.image_processor")
    if joy is not None and "joyimage" in module.__name__:
        joy.BUCKETS[1024] = [(SIZE, SIZE)]


def arguments(name: str, seed: int = 0, size: int = SIZE, prompt: str = PROMPTS[0]) -> dict:
    """Returns the arguments of a small call of this pipeline, without a generator."""
    cls, known, (_, call) = getattr(diffusers, name), {}, recipes_of(name)
    takes = {*inspect.signature(cls.__call__).parameters}
    if issubclass(cls, ModularPipeline):  # pictures would lead it elsewhere
        inputs, outputs = cls().blocks.inputs, cls().blocks.output_names
        takes = {one.name for one in inputs if one.required or one.name not in PICTURES or one.name in call}
        takes.add("output")
        known = {"output": next((one for one in RESULTS if one in outputs), None)}
    known |= {"prompt": prompt, "height": size, "width": size, "num_frames": FRAMES, "num_inference_steps": STEPS}
    known |= {"output_type": "np", "use_resolution_binning": False, **PICTURES}
    if "strength" in takes:
        known |= {"strength": 0.5, "num_inference_steps": 2 * STEPS}
    given = {**known, **call}
    return {key: argument(v, seed, size, size) for key, v in given.items() if key in takes and v is not None}


def argument(value, *size: int):
    if isinstance(value, list):
        return [argument(one, *size) for one in value]
    if isinstance(value, str) and value.startswith("@"):
        name, *numbers = value[1:].split()
        return globals()[name](*size, *map(int, numbers))
    return value


def edit_prompt(*_) -> str:
    return json.dumps({"short_description": PROMPTS[0], "edit_instruction": "make it blue"})


def noise_image(seed: int, height: int, width: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def noise_mask(seed: int, height: int, width: int) -> PIL.Image.Image:
    """Returns a mask that is white where a picture is to be repainted."""
    return noise_image(seed + 1, height, width).convert("L").point(lambda value: 255 * (value > 127))


def latent_mask(seed: int, height: int, width: int) -> PIL.Image.Image:
    return noise_mask(seed, height // 8, width // 8)


def noise_video(seed: int, height: int, width: int) -> list[PIL.Image.Image]:
    return [noise_image(seed + frame, height, width) for frame in range(FRAMES)]


def small_video(seed: int, height: int, width: int) -> list[PIL.Image.Image]:
    return noise_video(seed, 16, 16)


def embeds(seed: int, height: int, width: int, *shape: int) -> torch.Tensor:
    """Returns random embeddings in place of those of an encoder or another pipeline."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(seed: int, height: int, width: int, most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


def flags(seed: int, height: int, width: int, number: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, bool(number))


def of_residues(*given: int) -> dict:
    """Returns conditions for a protein of so many residues: its sequence and the interactions of its atoms."""
    *size, count = given
    whole = ("molecule_iid", "molecule_entity_id", "condition_index-group_1_token", "condition_sequence_1_residue")
    atoms = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
    return {
        **{name: numbers(*size, 1, 1, count) for name in whole},
        **{f"condition_{name}_1_atom": numbers(*size, 2, 1, count, 37) for name in atoms},
        "token_bond_path_length": numbers(*size, 8, 1, count, count),
    }


def pixels(seed: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Returns a random video as a tensor."""
    return torch.rand((1, channels, FRAMES, height, width), generator=torch.Generator().manual_seed(seed))


def scaled(seed: int, height: int, width: int, numerator: int, denominator: int = 1) -> int:
    return height * numerator // denominator


def nothing(*_):
    """Returns None, to pass it as an argument."""
