"""Tiny pipelines and models of random weights, of the real classes and settings, built without a network.

`tiny.json` says what each consists of. `_` is a class or a function of this file, `_then` a function for what was made; `@` is
another entry, which the other arguments change: a dictionary without `_` or `@` changes the entry's own. `tiny.NAME(**changes)`
makes one. All text is of width `WIDTH` and one vocabulary, so that a denoiser's sizes need not follow its encoders'.
"""

import functools
import importlib
import json
from pathlib import Path

import PIL.Image
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import diffusers
from diffusers import ClassifierFreeGuidance, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline


TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
WIDTH, VOCABULARY = 32, 1024
SPECIALS = (
    "<pad>", "</s>", "<unk>", "<bos>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[gMASK]",
    "<sop>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|end_header_id|>",
)  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "a red circle moving left"


def make(name: str, seed: int = 0, **changes):
    """The model or pipeline `name` of the table, its weights from `seed`; the caller's draws go on as before."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _built({"@": name, **changes})


def part(name: str) -> torch.nn.Module:
    """The model `name`, or `name.model` of a pipeline."""
    name, *models = name.split(".")
    return functools.reduce(getattr, models, make(name))


def __getattr__(name: str):
    if name not in TABLE:
        raise AttributeError(f"expected a name of tiny.json, got {name!r}")
    return functools.partial(make, name)


def _resolved(value):
    """A dictionary without `@`, whatever stood for it; anything else as it is."""
    if isinstance(value, str) and value.startswith("@"):
        value = {"@": value[1:]}
    if not isinstance(value, dict) or "@" not in value:
        return value
    made = dict(_resolved(TABLE[value["@"]]))
    for key, change in value.items():
        before = _resolved(made.get(key))
        if isinstance(change, dict) and isinstance(before, dict) and not {"_", "@"} & {*change}:
            change = {**before, **change}
        if key != "@":
            made[key] = change
    return made


def _built(value):
    value = _resolved(value)
    if not isinstance(value, dict):
        return value
    parts = {name: _built(part) for name, part in value.items() if name not in ("_", "_then")}
    if "_" not in value:
        return parts
    cls = value["_"] if not isinstance(value["_"], str) else found(value["_"])
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        made = cls(cls.config_class(**parts))
    else:
        made = cls(**parts)
    if isinstance(made, torch.nn.Module):
        made.eval()
    if isinstance(made, diffusers.DiffusionPipeline):
        made.set_progress_bar_config(disable=True)
    return globals()[value["_then"]](made) if "_then" in value else made


def found(name: str):
    module, _, name = name.rpartition(".")
    if module:
        return getattr(importlib.import_module(module), name)
    return globals()[name] if name in globals() else getattr(diffusers, name, None) or getattr(transformers, name)


# Tokenizers


def id_of(special: str) -> int:
    return SPECIALS.index(special)


@functools.cache
def byte_pairs() -> str:
    """A byte-level vocabulary of upstream's own prompts and templates: their lengths in tokens are near the real ones."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIALS], initial_alphabet=alphabet, show_progress=False
    )
    folder = Path(diffusers.__file__).parent / "pipelines"
    families = ("wan", "hunyuan_video", "qwenimage", "flux")
    made.train([str(path) for f in families for path in sorted((folder / f).glob("pipeline_*.py"))], trainer)
    return made.to_str()


def tokenizer(length: int, before: str = "", after: str = "", pad: str = "<pad>", **kwargs):
    """A tokenizer of at most `length` tokens that puts the specials `before` and `after` around a text."""
    made = Tokenizer.from_str(byte_pairs())
    around = [token for token in (before, after) if token]
    if around:
        made.post_processor = processors.TemplateProcessing(
            single=f"{before} $A {after}".strip(), special_tokens=[(token, id_of(token)) for token in around]
        )
    ends = {name: token for name, token in (("bos_token", before), ("eos_token", after)) if token}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=length, unk_token="<unk>", pad_token=pad, **ends, **kwargs
    )


def chat_tokenizer(length: int = 1024):
    return tokenizer(length, pad="<|endoftext|>", chat_template=CHAT)


def words_tokenizer():
    """A word a token, for templates cut short."""
    text = "You are a helpful assistant. a red circle moving left <|im_start|>system <|im_start|>user <|im_end|>"
    words = ("<|endoftext|>", "<unk>", *sorted(set(text.split())))
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<|endoftext|>", chat_template=CHAT
    )


# What is done to what was made


def with_uneven_norms(module: torch.nn.Module) -> torch.nn.Module:
    """The module; its norms, which are all alike while they are new, have weights and biases of their own."""
    for part in module.modules():
        if "norm" in type(part).__name__.lower():
            for parameter in part.parameters(recurse=False):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def with_last_layers(net, scale: float = 0.5):
    """A ControlNet with weights in its last layers, which upstream begins with zeros."""
    for layer in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=scale)
    return net


def with_deviation(prior):
    prior.clip_std.data.fill_(0.5)
    return prior


def with_short_texts(pipe):
    """HunyuanVideo-1.5 with token counts of a test: they are attributes, not configuration, upstream."""
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 20, 12, 4
    pipe.prompt_template_encode_start_idx = 3
    return pipe


def short_texts(patch):
    """From here on every HunyuanVideo-1.5 pipeline has these token counts, those that are loaded too; `patch` undoes it."""
    for cls in (HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline):

        def init(self, *args, original=cls.__init__, **kwargs):
            original(self, *args, **kwargs)
            with_short_texts(self)

        patch.setattr(cls, "__init__", functools.wraps(cls.__init__)(init))


def ip_adapter(unet, tokens: int = 4) -> dict:
    """Weights of an IP-Adapter for this UNet and `clip_vision_projected`, as its files hold them."""
    width, weights = unet.config.cross_attention_dim, {}
    for number, name in enumerate(name for name in unet.attn_processors if "attn2" in name):
        features = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(features, width) * 0.3
    projection = {"proj.weight": torch.randn(tokens * width, WIDTH) * 0.3, "proj.bias": torch.zeros(tokens * width)}
    norm = {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return {"image_proj": projection | norm, "ip_adapter": weights}


def modular(blocks: type, name: str, guidance_scale: float):
    """The pipeline `name` of modular blocks."""
    pipe = blocks().init_pipeline()
    parts = {k: v for k, v in make(name).components.items() if k in pipe.components and v is not None}
    pipe.update_components(**parts, guider=ClassifierFreeGuidance(guidance_scale=guidance_scale))
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Calls


def picture(height: int, width: int, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PIL.Image.fromarray(noise.numpy()).convert(mode)


def pictures(count: int, height: int, width: int, mode: str = "RGB") -> list:
    return [picture(height, width, seed, mode) for seed in range(count)]


def fresh(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# `calls`: by pipeline, a small call; after "=" an expression of the video's frames, height and width. Other sizes that are asked for count in
# it too. `without`: what is not given for all that. `staged`: pipelines of every kind that runs in stages: name of the table, its changes,
# changes of the call.
CALLS, STAGED = json.loads(Path(__file__).with_name("calls.json").read_text()).values()
SIZES = ("num_frames", "height", "width")
WAN = [name for name in CALLS if name.startswith("wan")]


def call_of(name: str) -> dict:
    own = CALLS[name]
    return {**(call_of(own["like"]) if "like" in own else {}), **own}


def valued(value, **names):
    return eval(value[1:], globals(), names) if isinstance(value, str) and value.startswith("=") else value


def arguments(name: str, **changes) -> dict:
    """Arguments of a small call of the pipeline `name`, fresh generator included; None leaves one out."""
    given = {"prompt": WORDS, "output_type": "np", "generator": fresh(), **call_of(name if name in CALLS else "image")}
    if name in CALLS:
        for key in SIZES:
            if changes.get(key):
                coarser = 2 if name.startswith("wan_ti2v") and key != "num_frames" else 1
                given[key] = coarser * changes.pop(key)
        frames, height, width = map(given.get, SIZES)
        given = {key: valued(value, frames=frames, height=height, width=width) for key, value in given.items()}
        given |= dict.fromkeys(given.get("without", ()))
    unsaid = ("like", "without", "why")
    return {key: value for key, value in (given | changes).items() if value is not None and key not in unsaid}


def staged(name: str) -> tuple:
    """(pipeline, arguments of a small call without a generator)."""
    kind, changes, call = STAGED[name]
    if kind.startswith("wan"):
        changes = {**changes, "transformer": {"num_layers": 2, **changes.get("transformer", {})}}
    call = {key: valued(value) for key, value in call.items()}
    given = arguments(kind if kind in CALLS else "wan", generator=None, output_type=None, **call)
    return make(kind, seed=1 + list(STAGED).index(name), **changes), given
