"""Private names of other libraries that the package relies on. Oracle: the installed libraries. An upgrade names here what moved."""

import ast
import importlib
import inspect
import re

import pytest

from diffusers.tpu import bridge  # noqa: F401  torchax needs what it puts in place first


PRIVATE = re.compile(r"_[a-zA-Z]\w*")
OWN = re.compile(r"_(tpu|TOKEN|allowed_effects|\w*flax)")  # left on modules by the package, and ends of names

# module or module:class -> private names, its attributes or, of instances, names in its source
CONTRACT = {
    # Python
    "collections:namedtuple": "_fields",
    "functools": "_lru_cache_wrapper",
    "os": "_Environ",
    "os:_Environ": "_data",
    "sys": "_getframe",
    # JAX
    "jax._src.cloud_tpu_init": "cloud_tpu_init",
    "jax._src.clusters:ClusterEnv": "_cluster_types",
    "jax._src.config": "traceback_filtering",
    "jax._src.distributed": "global_state",
    "jax._src.effects": "control_flow_allowed_effects",
    "jax._src.xla_bridge": "backends_are_initialized",
    # torch
    "torch": "_C _has_compatible_shallow_copy_type _ops",
    "torch._C": "_nn DisableTorchFunction",
    "torch._C._nn": "_parse_to",
    "torch._ops:OpOverload": "_schema",
    "torch:Tensor": "_make_subclass",
    "torch.jit._builtins": "_builtin_table _find_builtin _register_builtin",
    "torch.nn:Module": "_forward_hooks _forward_pre_hooks _parameters",
    "torch.nn.parameter": "_is_param",
    "torch.ops:aten": "_is_all_true _local_scalar_dense _scaled_dot_product_attention_math _unique2",
    "torch.storage": "_StorageBase",
    "torch.utils._device": "DeviceContext",
    "torch.utils._mode_utils": "no_dispatch",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten register_pytree_node TreeSpec",
    # torchax
    "torchax.tensor:Environment": "_get_op_or_decomp _should_use_torchax_tensor",
    "torchax.tensor:Tensor": "_elem",
    # accelerate, peft
    "accelerate.hooks": "_hf_hook",
    "peft.tuners.tuners_utils:BaseTunerLayer": "_active_adapter _disable_adapters",
    "peft.tuners.lora.layer:LoraLayer": "_caches",
    # diffusers
    "diffusers.configuration_utils:ConfigMixin": "_class_name _diffusers_version",
    "diffusers.guiders.guider_utils:BaseGuidance": "_enabled",
    "diffusers.hooks._helpers:TransformerBlockMetadata": "_get_parameter_from_args_kwargs",
    "diffusers.hooks.first_block_cache:FBCHeadBlockHook": "_is_stateful _metadata _should_compute_remaining_blocks",
    "diffusers.hooks.hooks:HookRegistry": "_fn_refs",
    "diffusers.hooks.hooks:StateManager": "_context _init_kwargs _state_cache _state_cls",
    "diffusers.hooks.hooks": "_diffusers_hook",
    "diffusers.hooks.taylorseer_cache:TaylorSeerCacheHook": "_measure_should_compute",
    "diffusers.models._modeling_parallel": "ContextParallelInput",
    "diffusers.models.attention_dispatch": "_AttentionBackendRegistry",
    "diffusers.models.attention_dispatch:_AttentionBackendRegistry": "_active_backend",
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15:HunyuanVideo15Downsample": "_dcae_downsample_rearrange",
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15:HunyuanVideo15Upsample": "_dcae_upsample_rearrange",
    "diffusers.models.autoencoders.autoencoder_kl_wan:AutoencoderKLWan": "_cached_conv_counts",
    "diffusers.models.modeling_utils:ModelMixin": "_cp_plan _keep_in_fp32_modules _no_split_modules _repeated_blocks",
    "diffusers.models.transformers.transformer_qwenimage:QwenEmbedRope": "_compute_video_freqs _get_device_freqs",
    "diffusers.models.transformers.transformer_qwenimage:QwenEmbedLayer3DRope": "_compute_condition_freqs",
    "diffusers.models.transformers.transformer_wan": "_get_qkv_projections",
    "diffusers.models.transformers.transformer_wan:WanAttnProcessor": "_attention_backend",
    "diffusers.modular_pipelines.components_manager:ComponentsManager":
        "_auto_offload_device _auto_offload_enabled _offload_strategy",
    "diffusers.pipelines.pipeline_utils:DiffusionPipeline": "_get_signature_keys _name_or_path",
    "diffusers.utils.hub_utils": "_add_variant _get_checkpoint_shard_files _get_model_file",
    "diffusers.utils.import_utils": "_torch_xla_available",
    "diffusers.utils.torch_utils:TorchDeviceBackend": "_detect_device_type",
    # transformers
    "transformers.modeling_utils:PreTrainedModel": "_keep_in_fp32_modules_strict _tp_plan",
}  # fmt: skip


@pytest.mark.parametrize("place", CONTRACT)
def test_private_names_are_still_there(place):
    module, _, owner = place.partition(":")
    found = importlib.import_module(module) if module != "torch.ops" else importlib.import_module("torch").ops
    found = getattr(found, owner) if owner else found
    gone = [name for name in CONTRACT[place].split() if not (hasattr(found, name) or in_source(found, name))]
    assert gone == [], f"{place} has no {', '.join(gone)}"


def in_source(found, name: str) -> bool:
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(found)) is not None
    except (OSError, TypeError):
        return False


def test_every_private_name_that_the_package_reads_is_listed(root):
    """Read as an attribute, imported, or named in a string, and defined nowhere in the package."""
    overlay = root / "src/diffusers"
    defined, read = set(), {}
    for file in (*overlay.glob("tpu/**/*.py"), *overlay.glob("**/*_flax.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            defined |= names_defined(node)
            read |= {name: f"{file.relative_to(root)}:{node.lineno}" for name in names_read(node)}
    listed = set(" ".join(CONTRACT.values()).split()) | {
        part for place in CONTRACT for part in re.split("[.:]", place)
    }
    missing = {n: where for n, where in read.items() if n not in defined | listed and not OWN.match(n)}
    assert missing == {}
    used = {*read} | {name for file in overlay.glob("tpu/**/*.py") for name in re.findall(r"\b_\w+", file.read_text())}
    assert {name for name in " ".join(CONTRACT.values()).split() if PRIVATE.fullmatch(name)} - used == set()


def names_defined(node) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    return {node.attr} if own and node.value.id == "self" else set()


def names_read(node) -> list[str]:
    names = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom):
        names = [*(alias.name for alias in node.names), *(node.module or "").split(".")]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value]
    return [name for name in names if PRIVATE.fullmatch(name)]
