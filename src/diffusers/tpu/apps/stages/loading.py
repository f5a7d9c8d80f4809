"""Loads the pipeline of one stage: its own components with their weights, the others as configurations."""

import hashlib
import inspect
import json

import torch
from accelerate import init_empty_weights

import diffusers

from .... import tpu
from ....configuration_utils import ConfigMixin
from ....pipelines.pipeline_utils import DiffusionPipeline


STAGES = ("text", "denoise", "decode")
_TWO = ("prompt_embeds", "negative_prompt_embeds")
_HUNYUAN_15 = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
STAGED = {  # pipelines that can run in three stages -> names of what one call of their `encode_prompt` returns
    **dict.fromkeys(("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"), _TWO),
    **dict.fromkeys(("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline"), _TWO),
    "HunyuanVideo15Pipeline": _HUNYUAN_15,
    "HunyuanVideo15ImageToVideoPipeline": _HUNYUAN_15,
}
DENOISERS = ("transformer", "transformer_2")
ENCODERS = (
    "tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "image_processor", "feature_extractor", "image_encoder",
)  # fmt: skip
LOOP = ("scheduler", "guider")  # used by the loop before its first step and at each
PIXELS = {"image", "video"}  # arguments that the VAE encodes before the first step
CONFIGURED = (*LOOP, "vae", "text_encoder", "text_encoder_2", "image_encoder", *DENOISERS)
CONFIG_NAMES = {"scheduler": "scheduler_config.json", "guider": "guider_config.json"}  # of others config.json
VERSIONS = ("_diffusers_version", "_name_or_path", "transformers_version")  # in configurations, not part of a model


def components_of(cls: type, stage: str) -> set[str]:
    """The components that this stage of a pipeline uses."""
    if stage == "decode":
        return {"vae"}
    if stage == "denoise":
        return {*LOOP, *DENOISERS}
    return {*LOOP, *ENCODERS, *(["vae"] if PIXELS & set(inspect.signature(cls.__call__).parameters) else [])}


def load(model: str, stage: str, dtype: torch.dtype | None = None, vae_dtype: torch.dtype | None = None):
    """The pipeline of `model` with the components of `stage`. Models that its `__call__` only inspects are `Absent`.

    `vae_dtype`: of the VAE that encoded pixels, if it is not loaded. Raises NotImplementedError for a pipeline that cannot run
    in stages.
    """
    index = DiffusionPipeline.load_config(model)
    name, there = index["_class_name"], _components(index)
    if name not in STAGED:
        raise NotImplementedError(
            f"expected a pipeline that can run in stages ({', '.join(STAGED)}), got {name}: leave --stage out"
        )
    cls = getattr(diffusers, name)
    needed = components_of(cls, stage)
    given = {} if dtype is None else {"dtype": dtype}
    asked = {"vae", *DENOISERS} & there.keys() - needed if stage != "decode" else ()
    absent = {n: Absent(model, n, getattr(diffusers, there[n]), vae_dtype or dtype or torch.float32) for n in asked}
    left_out = {name: absent[name].empty if name in absent else None for name in there if name not in needed}
    # The class's own from_pretrained: DiffusionPipeline's would load optional components in spite of None.
    pipe = cls.from_pretrained(model, **given, **left_out)
    if tpu.is_active():
        tpu.uninstall(pipe)
    _, options = cls._get_signature_keys(cls)
    options = {name: pipe.config[name] for name in options if name in pipe.config and name not in pipe.components}
    made = cls(**{**pipe.components, **absent}, **options)
    made.register_to_config(_name_or_path=model)
    for part in absent.values():
        part.pipe = made
    if stage == "text":
        made.set_progress_bar_config(disable=True)  # no step is taken
    return tpu.install(made) if tpu.is_active() else made


def fingerprint(model: str) -> str:
    """SHA-256 over `model_index.json` and the configurations of all models, scheduler and guider; weights are not read."""
    index = DiffusionPipeline.load_config(model)
    configurations = {"": index}
    for name in _components(index).keys() & set(CONFIGURED):
        reader = type("Configuration", (ConfigMixin,), {"config_name": CONFIG_NAMES.get(name, "config.json")})
        configurations[name] = reader.load_config(model, subfolder=name)
    kept = {part: {k: v for k, v in c.items() if k not in VERSIONS} for part, c in configurations.items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _components(index: dict) -> dict[str, str]:
    """Component -> class name, of those that `model_index.json` lists with a class."""
    return {name: entry[1] for name, entry in index.items() if isinstance(entry, (list, tuple)) and entry[0]}


class Reached(Exception):
    """Raised when the run calls a component of a later stage. `value`: the latents for `vae.decode`, else None."""

    def __init__(self, value=None):
        self.value = value


class Absent:
    """A model of another stage, without weights. Its attributes are those of `empty`, the model on meta tensors.

    A call raises `Reached`. It is deliberately no module, so that neither upstream nor the TPU path moves it.
    """

    def __init__(self, model: str, name: str, cls: type, dtype: torch.dtype):
        with init_empty_weights():
            self.empty = cls.from_config(cls.load_config(model, subfolder=name))
        self.dtype, self.pipe = dtype, None

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    def modules(self):
        """No modules; upstream searches them for hooks."""
        return iter(())

    def __getattr__(self, name: str):
        return getattr(self.__dict__["empty"], name)

    def __call__(self, *args, **kwargs):
        raise Reached
