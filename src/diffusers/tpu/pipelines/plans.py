"""What is special about upstream's classes on the TPU.

A model's plan is `PLAN` of the module beside its own: that of `diffusers.models.transformers.transformer_wan` lies in
`transformer_wan_flax`, its form in plain JAX, if there is one, in `..._nnx_flax`. Plans of pipelines are rows of `PIPELINES`.
"""

import fnmatch
import functools
import importlib.util
import inspect
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jax.sharding import PartitionSpec as P

from ...hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from ...models.modeling_utils import ModelMixin
from ..chips.sharding import BY_OUTPUT, INFERRED, STORAGE_AXES, ModelPlan, Packed, Rules, rule_of, unwrapped
from ..compile.tracing.scan import is_repeated, own_lists, undeclared
from . import glue


VAE_ENTRIES = ("encode", "decode")
# Modules whose frames lie between a pipeline's code and a model's.
CALLED_THROUGH = ("contextlib", "accelerate.", "peft.", "torch.", "transformers.", __package__.rpartition(".")[0])
FLAX = "AutoencoderKLWan", "AutoencoderKLHunyuanVideo15", "AutoencoderKLCogVideoX"  # in plain JAX too


@dataclass(frozen=True)
class PipelinePlan:
    """What is special about one pipeline class on the TPU."""

    glue: str = "host"  # "resident" if upstream's loop is known to run on device tensors
    once_per_branch: bool = False  # the denoiser is called once per guidance branch, not with all of them in one batch
    guided_in_batch: bool = False  # it is called with all of them in one batch, which `dp` splits
    host: tuple[str, ...] = ()  # models that stay on the host: upstream's loop asks for gradients through them

    def branches(self, pipe=None) -> int:
        """How many guidance branches of a step `dp` can run side by side: the guider's number, two without a guider."""
        if self.guided_in_batch:
            return 2
        guider = getattr(pipe, "guider", None)
        branches = 2 if guider is None else guider.num_conditions if guider._enabled else 1
        return branches if self.once_per_branch else 1


RESIDENT = PipelinePlan("resident")
PER_BRANCH, IN_BATCH = replace(RESIDENT, once_per_branch=True), replace(RESIDENT, guided_in_batch=True)
PIPELINES = {  # of upstream's classes
    f"{name}Pipeline": plan
    for plan, names in {
        PER_BRANCH: "Wan WanImageToVideo WanVideoToVideo WanVACE WanAnimate HunyuanVideo15 HunyuanVideo15ImageToVideo QwenImage"
        " QwenImageImg2Img QwenImageInpaint CogView4 CogView4Control Chroma ChromaImg2Img SkyReelsV2 SkyReelsV2ImageToVideo LucyEdit"
        " ChronoEdit OvisImage Kandinsky5T2V Kandinsky5I2V Kandinsky5T2I Kandinsky5I2I",
        IN_BATCH: "CogVideoX CogVideoXImageToVideo CogVideoXVideoToVideo CogVideoXFunControl LTX LTXImageToVideo LTXCondition"
        " StableDiffusion3 StableDiffusion3Img2Img StableDiffusion3Inpaint",
        RESIDENT: "HunyuanVideo HunyuanVideoImageToVideo HunyuanVideoFramepack HunyuanSkyreelsImageToVideo Flux FluxImg2Img"
        " FluxInpaint FluxKontext FluxKontextInpaint FluxFill FluxControl FluxControlImg2Img FluxControlInpaint FluxControlNet"
        " StableDiffusionXL",
        PipelinePlan(host=("unet",)): "StableDiffusionAttendAndExcite StableDiffusionPix2PixZero",
    }.items()
    for name in names.split()
}


def pipeline_plan(cls: type) -> PipelinePlan:
    """The row of the first of the class's bases that has one; upstream's loop runs on the host where none has."""
    rows = (PIPELINES.get(base.__name__) for base in cls.__mro__ if base.__module__.startswith("diffusers."))
    return next(filter(None, rows), PipelinePlan())


def model_plan(cls: type) -> ModelPlan | None:
    """`PLAN` beside the first of the class's bases that has one there; None where none has."""
    bases = (base for base in cls.__mro__ if issubclass(base, ModelMixin) and base.__module__.startswith("diffusers."))
    return next(filter(None, (_plan_beside(base.__module__) for base in bases)), None)


@functools.cache
def _plan_beside(module: str) -> ModelPlan | None:
    name = f"{module}_flax"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name).PLAN


def flax_class(name: str) -> type:
    """The form in plain JAX of upstream's class of this name. Raises ValueError where there is none."""
    if name not in FLAX:
        raise ValueError(f"expected a class that has a form in plain JAX ({', '.join(FLAX)}), got {name}")
    upstream = getattr(importlib.import_module("diffusers"), name)
    return getattr(importlib.import_module(f"{upstream.__module__}_nnx_flax"), f"Flax{name}")


def module_plan(module: torch.nn.Module) -> ModelPlan:
    """The plan of the module's class, completed by what upstream declares. With `parallel`, layers that compute scales and shifts,
    which read no tokens, are split by their outputs: those of blocks, and with `whole` all others as well."""
    plan = _plan_of(module)
    vectors = _of_vectors(module, "" if plan.whole else "*") if plan.parallel else ()
    if not vectors:
        return plan
    rules = (*vectors, *_of_others(plan.rules, vectors, module))
    packed = {name: one for name, one in plan.packed.items() if _is_split(name, one.axis, rules)}
    return replace(plan, rules=rules, packed=packed)


def _of_others(rules: Rules, first: Rules, module: torch.nn.Module) -> Rules:
    """The rules that match a weight that the `first` rules do not, or no weight at all."""
    taken = {name: rule_of(name, first)[1] is not None for name, _ in module.named_parameters()}
    named = {rule: [name for name in taken if rule_of(name, (rule,))[1] is not None] for rule in rules}
    return tuple(rule for rule, names in named.items() if not names or not all(map(taken.get, names)))


def _is_split(name: str, axis: int, rules: Rules) -> bool:
    """Whether the first rule that matches a weight splits this axis of it over `tp`."""
    _, spec = rule_of(name, rules)
    return spec is not None and spec[axis : axis + 1] == ("tp",)


def _of_vectors(module: torch.nn.Module, of: str) -> Rules:
    """A rule for the linear layers that compute scales and shifts of a timestep's embedding: behind a SiLU, with at least twice as
    many outputs as inputs. `of`: a text that their names contain, with blocks as `blocks.*.`."""
    found = set()
    for name, part in module.named_modules():
        children = ((key, getattr(one, "base_layer", one)) for key, one in part.named_children())  # PEFT wraps it
        layers = [(key, one) for key, one in children if isinstance(one, (torch.nn.SiLU, torch.nn.Linear))]
        if [type(one) for _, one in layers] == [torch.nn.SiLU, torch.nn.Linear]:
            key, layer = layers[1]
            glob = re.sub(r"\.\d+\.", ".*.", f"{name}.{key}", count=1)
            if layer.out_features >= 2 * layer.in_features and of in glob:
                found.add(glob)
    return ((rf"^({_either(sorted(found))})\.(weight|bias)$", BY_OUTPUT),) if found else ()


def _either(globs: Iterable[str]) -> str:
    """A regular expression of these names; in a weight's name a run of blocks has `*` or a range in place of the number."""
    return "|".join(re.escape(glob).replace(r"\*", r"[^.]+") for glob in globs)


def _plan_of(module: torch.nn.Module) -> ModelPlan:
    if (plan := model_plan(type(module))) is not None:
        found = None if plan.activation_spec is None else declared_plan(module, plan.rules)
        return plan if found is None else replace(plan, rules=(*plan.rules, *found.rules), packed=found.packed)
    if not isinstance(module, ModelMixin):
        parameters = inspect.signature(module.forward).parameters
        hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        fills_a_cache = "use_cache" in parameters or ("past_key_values" in parameters and hands_on)
        return ModelPlan(decide=_without_cache if fills_a_cache else None)
    entries = tuple(entry for entry in VAE_ENTRIES if hasattr(module, entry))
    return ModelPlan(entries=("forward", *entries)) if entries else declared_plan(module)


def _without_cache(arguments: dict) -> dict:
    """`use_cache=False` for a text encoder in a pipeline, which reads its prompt once: only scripts read the key-value cache."""
    given = {**arguments.get("kwargs", {}), **arguments}
    return {} if given.get("use_cache") is not None or not _in_a_pipeline() else {"use_cache": False}


def _in_a_pipeline() -> bool:
    """Whether a pipeline's code calls the model; also upstream's without the TPU path, as where calls are recorded."""
    if glue.in_a_call():
        return True
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    caller = next((name for name in names if not name.startswith(CALLED_THROUGH)), "")
    return caller.startswith(__package__.split(".")[0])


# Plans from what upstream's classes declare. Between repeated blocks the sequence is split over `sp`. `_tp_plan` has a style for
# each glob of linear layers' names, weight [out, in] and bias: "colwise" splits the outputs over `tp`, "rowwise" the inputs.


STYLES = {
    "colwise": {"weight": P("tp", STORAGE_AXES), "bias": P("tp")},
    "rowwise": {"weight": P(STORAGE_AXES, "tp")},
}
PACKED = {PackedColwiseParallel: "colwise", PackedRowwiseParallel: "rowwise"}


def declared_plan(module: torch.nn.Module, beside: Rules = ()) -> ModelPlan:
    """A plan from what the model declares: it splits the sequence between blocks, and weights that no rule of `beside` names."""
    named = getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None)
    repeated = {*(named or undeclared(module))}
    by_blocks = any(is_repeated(block, repeated) for blocks in own_lists(module) for block in blocks)
    declared = getattr(module, "_tp_plan", None) or (_in_and_out(module) if by_blocks else {})
    names = {re.sub(r"\.\d+\.", ".0.", unwrapped(name), count=1) for name, _ in module.named_parameters()}
    names = [name for name in names if rule_of(name, beside)[1] is None]
    rules, packed = _declared_rules(names, declared), _declared_packed(module, declared)
    return ModelPlan(rules=rules, packed=packed, activation_spec=INFERRED if by_blocks else None)


def _in_and_out(module: torch.nn.Module) -> dict:
    """`_tp_plan` for a model without one: "colwise" into an attention's heads or a feed-forward's width, "rowwise" out of them."""
    found = {}
    for name, part in module.named_modules():
        linear = ((key, layer) for key, layer in part.named_modules() if isinstance(layer, torch.nn.Linear))
        layers = {unwrapped(key): layer for key, layer in linear if "lora_" not in key}
        if "to_q" in layers:
            outward = [key for key in layers if re.fullmatch(r"to_out(\.0|_t)?|to_add_out", key)]
            inward = [key for key in layers if re.fullmatch("(to|add)_[qkv](_proj|_t)?", key)]
        else:
            outward = [key for key, layer in layers.items() if layer.in_features > layer.out_features]
            inward = [key for key in layers if key not in outward]
        widths = {layers[key].in_features for key in outward}
        times = {key: layers[key].out_features / min(widths) for key in inward} if len(widths) == 1 else {}
        if times and all(n in (1, 2) for n in times.values()):
            styles = {key: "colwise" if n == 1 else PackedColwiseParallel([1, 1]) for key, n in times.items()}
            found |= {f"{name}.{key}": style for key, style in {**styles, **dict.fromkeys(outward, "rowwise")}.items()}
    return {re.sub(r"\.\d+\.", ".*.", name, count=1): style for name, style in found.items()}


def _declared_rules(names: list[str], declared: dict) -> Rules:
    """A rule for each kind of weight, among these names, that is declared split over `tp`."""
    rules = []
    for style, specs in STYLES.items():
        globs = [glob for glob, what in declared.items() if PACKED.get(type(what), what) == style]
        for kind, spec in specs.items():
            there = [glob for glob in globs if fnmatch.filter(names, f"{glob}.{kind}")]
            rules += [(rf"^({_either(there)})\.{kind}$", spec)] if there else []
    return tuple(rules)


def _declared_packed(module: torch.nn.Module, declared: dict) -> dict[str, Packed]:
    """By weight name, the projections that one weight holds; their proportions are the style's, or the layer's own."""
    found = {}
    packed = {glob: style for glob, style in declared.items() if type(style) in PACKED}
    for name, layer in module.named_modules() if packed else ():
        style = next((style for glob, style in packed.items() if fnmatch.fnmatch(name, glob)), None)
        if style is not None:
            axis = 1 if PACKED[type(style)] == "rowwise" else 0
            layer = getattr(layer, "base_layer", layer)  # PEFT wraps it
            blocks = style.blocks or (layer._tp_packed_row_blocks if axis else layer._tp_packed_col_blocks)
            unit = layer.weight.shape[axis] // sum(blocks)
            one = Packed(axis, tuple(unit * block for block in blocks))
            found |= {f"{name}.weight": one} | ({f"{name}.bias": one} if axis == 0 else {})
    return found
