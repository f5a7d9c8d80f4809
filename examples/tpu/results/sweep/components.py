"""Makes a tiny component of any class of upstream or transformers from its class, the names of its parameters, and `sizes.json`.

Models have upstream's classes; `sizes.json` has values of constructor parameters by name and by class. Text is `WIDTH` wide, a head has
size 16, and heads times head size are `WIDTH`, so that separately made models of one pipeline fit together.
"""

import contextlib
import inspect
import json
import tempfile
import types
import typing
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import diffusers
import tiny as parts
from diffusers import ModelMixin, SchedulerMixin
from diffusers.pipelines.deprecated.blip_diffusion.modeling_blip2 import Blip2QFormerModel
from diffusers.pipelines.deprecated.paint_by_example.image_encoder import PaintByExampleImageEncoder
from diffusers.pipelines.kolors.text_encoder import ChatGLMModel
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertModel  # noqa: F401
from diffusers.schedulers import KarrasDiffusionSchedulers


SIZES = json.loads(Path(__file__).with_name("sizes.json").read_text())
BY_NAME, BY_CLASS = SIZES["by_name"], SIZES["by_class"]
LARGEST = 16_000_000  # parameters


def tiny(cls: type, **changes) -> torch.nn.Module:
    """Returns a tiny model of this class with random weights; `changes` replace values of `sizes.json`.

    Changes that the constructor does not take are added to the configuration only, as upstream does for published ones.
    """
    takes = inspect.signature(cls.__init__).parameters
    unread = {name: changes.pop(name) for name in changes.keys() - takes.keys()}
    of_class = BY_CLASS.get(cls.__name__, {})  # several share what some of them do not take
    wanted = {**{name: value for name, value in of_class.items() if name in takes}, **changes}
    for name, parameter in takes.items():
        if name in BY_NAME and parameter.default is not None:  # None: off
            wanted.setdefault(name, BY_NAME[name])
    made = small(lambda: cls(**wanted).eval(), cls)
    made.register_to_config(**unread)
    return made


def of_transformers(cls: type, **changes) -> torch.nn.Module:
    """Returns the same for a class of transformers. A class without a row takes values of `of_language_models` by name."""
    config, wanted = cls.config_class, SIZES["of_transformers"].get(cls.__name__)
    if wanted is None:
        known = inspect.signature(config.__init__).parameters.keys() | vars(config()).keys()
        wanted = {name: value for name, value in SIZES["of_language_models"].items() if name in known}
    wanted = {name: parts.id_of(value) if value in parts.SPECIALS else value for name, value in wanted.items()}
    if "text_config" in wanted:
        changes = {"text_config": {**wanted["text_config"], **changes}}
    return small(lambda: cls(config(**{**wanted, **changes})).eval(), cls)


def small(make: Callable[[], torch.nn.Module], cls: type) -> torch.nn.Module:
    """Returns the result of `make`, `filled`. Raises TypeError if it is not tiny, which a first call on the meta device finds."""
    with contextlib.suppress(RuntimeError, NotImplementedError), torch.device("meta"):  # constructors that want values
        numbers = sum(parameter.numel() for parameter in make().parameters())
        if numbers > LARGEST:
            raise TypeError(
                f"expected a tiny model, got {numbers / 1e6:.0f} million parameters: of {cls.__name__} too little is known"
            )
    with torch.no_grad():  # a weight that is computed of others (weight_norm) is copied then
        return filled(make())


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with random values in parameters that upstream initialises with a constant or leaves uninitialised.

    Zeros (a ControlNet's last layers, gates of a block) would hide the layers before them.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            uneven = not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3
            if uneven or (parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all()):
                one = 1.0 if not uneven and parameter.flatten()[0] == 1 else 0.0
                parameter.copy_(one + 0.2 * torch.randn_like(parameter))
    return model


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# By class: what makes one, and its arguments. All else is made by its class and sizes.
MAKERS = SIZES["makers"]


class Passes:
    """Replaces a checker of texts and videos that upstream requires and that is not installed; everything passes."""

    def to(self, *args, **kwargs):
        return self

    def check_text_safety(self, text):
        return True

    def check_video_safety(self, video):
        return video


# Contents are texts, or lists of texts and pictures.
CHAT_OF_PARTS = parts.CHAT.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)


def bert_tokenizer(length: int = 77):
    return parts.tokenizer(length, before="<bos>", after="</s>")


def llama_tokenizer(length: int = 512):
    return parts.tokenizer(length, before="<bos>")


def ending_chat_tokenizer():
    """Returns a tokenizer with Qwen's end of text."""
    return parts.tokenizer(1024, pad="<|endoftext|>", eos_token="<|im_end|>", chat_template=parts.CHAT)


def glm_tokenizer():
    """Returns a tokenizer with `position_ids` in its output, as ChatGLM's has."""
    tokenizer = parts.tokenizer(256)
    tokenizer.padding_side = "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask", "position_ids"]

    class WithPositions(type(tokenizer)):
        def __call__(self, *args, **kwargs):
            found = super().__call__(*args, **kwargs)
            found["position_ids"] = torch.clamp(found["attention_mask"].cumsum(-1) - 1, min=0)
            return found

    tokenizer.__class__ = WithPositions
    return tokenizer


def qwen_vl_processor(cls: type = transformers.Qwen2_5_VLProcessor, patch_size: int = 14):
    """Returns a processor of text and pictures, without videos, which need torchvision."""
    processor, pixels = object.__new__(cls), (2 * patch_size) ** 2
    processor.tokenizer, processor.chat_template = parts.chat_tokenizer(), CHAT_OF_PARTS
    processor.image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=patch_size, merge_size=2, min_pixels=pixels, max_pixels=4 * pixels
    )
    for kind in ("image", "video"):
        setattr(processor, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(processor, f"{kind}_token_id", parts.id_of(f"<|{kind}_pad|>"))
    return processor


def glm_image_processor():
    tokenizer = parts.chat_tokenizer()
    tokenizer.image_token, tokenizer.bos_token = "<|image_pad|>", "<bos>"
    tokenizer.grid_bos_token, tokenizer.grid_eos_token = "<|vision_start|>", "<|vision_end|>"
    return transformers.GlmImageProcessor(transformers.GlmImageImageProcessorPil(), tokenizer, parts.CHAT)


def blip_qformer():
    """Returns the model with a BERT vocabulary in a file, as upstream reads it from there."""
    folder = Path(tempfile.mkdtemp())
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat")))
    return of_transformers(Blip2QFormerModel, tokenizer=str(folder))


def qwen3_vl_processor():
    return qwen_vl_processor(transformers.Qwen3VLProcessor, 16)


def clip_by_example():
    config = transformers.CLIPVisionConfig(
        hidden_size=parts.WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
    )  # fmt: skip
    return filled(PaintByExampleImageEncoder(config, proj_size=parts.WIDTH).eval())


def chat_glm():
    """Returns the model with initialised parameters, which upstream leaves uninitialised."""
    made = of_transformers(ChatGLMModel)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return made


def allegro_vae():
    """Returns the VAE with tiling, without which upstream's does not decode."""
    made = tiny(diffusers.AutoencoderKLAllegro)
    made.enable_tiling()
    return made


def t5_gemma_encoder():
    return of_transformers(transformers.T5GemmaEncoderModel).encoder


def prior():
    made = tiny(diffusers.PriorTransformer)
    made.clip_std.data.fill_(0.5)
    return made


def protein_vae():
    """Returns a VAE that allows every residue for every token, and every atom in a residue."""
    residues, kinds = 147, 7
    tables = {"atom37_mask": [[True] * 37] * residues, "allowed_residue_types": [[True] * residues] * kinds}
    return tiny(diffusers.RFD4ProteinaAutoencoder, **tables)


def target_properties():
    return {"target_names": ["albedo", "roughness"]}


def named(name: str):
    """Returns a function or class by name, from this module, the tiny models, upstream or transformers."""
    return globals().get(name) or getattr(parts, name, None) or parts.found(name)


def component(hint, change):
    """Returns the component of an annotation with a recipe's changes.

    Args:
        change: arguments, with `_class_name` for another class; "@NAME" calls a maker; any other value is returned.
    """
    if isinstance(change, str) and change.startswith("@"):
        return named(change[1:])()
    if not isinstance(change, dict):
        return change
    if "_class_name" in change:
        return of_class(**change)
    for cls in candidates(hint):
        name = "KarrasDiffusionSchedulers" if issubclass(cls, KarrasDiffusionSchedulers) else cls.__name__
        if name in MAKERS:
            maker, *known = MAKERS[name]
            return named(maker)(**{**(known[0] if known else {}), **change})
        if issubclass(cls, SchedulerMixin) and cls is not SchedulerMixin:
            takes = inspect.signature(cls.__init__).parameters
            return cls(**{**{name: value for name, value in BETAS.items() if name in takes}, **change})
        if issubclass(cls, ModelMixin):
            return tiny(cls, **change)
        if issubclass(cls, transformers.PreTrainedModel) and getattr(cls, "config_class", None):
            return of_transformers(cls, **change)
    raise TypeError(f"expected an annotation of which a component can be made, got {hint}")


def of_class(_class_name: str, **sizes):
    cls = named(_class_name)
    if issubclass(cls, ModelMixin):
        return tiny(cls, **sizes)
    return of_transformers(cls, **sizes) if issubclass(cls, transformers.PreTrainedModel) else cls(**sizes)


def candidates(hint) -> list[type]:
    """Returns the class of an annotation, or all classes of a union."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [cls for arg in typing.get_args(hint) for cls in candidates(arg)]
    return [hint] if isinstance(hint, type) and hint is not type(None) else []
