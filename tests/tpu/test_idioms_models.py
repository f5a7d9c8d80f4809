"""Idioms of scripts for CUDA around models and pipelines. Oracle: upstream's pipeline of the same weights in this process."""

import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import tiny
from conftest import relative
from diffusers import PixArtSigmaPipeline, PixArtTransformer2DModel, tpu
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.tpu.common import notices
from diffusers.tpu.pipelines.components import installation


pytestmark = [pytest.mark.usefixtures("idioms"), pytest.mark.filterwarnings("ignore")]
idiom = pytest.mark.idiom


def call(pipe, **changes) -> torch.Tensor:
    """Two steps with guidance; latents unless told otherwise."""
    given = {
        "prompt": "a red circle", "negative_prompt": "", "num_inference_steps": 2, "height": 16, "width": 16, "generator": tiny.fresh(),
        "max_sequence_length": 8, "output_type": "latent", "use_resolution_binning": False, "clean_caption": False,
    }  # fmt: skip
    return pipe(**{**given, **changes}).images


@pytest.fixture(scope="module")
def folder(idioms, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pixart")
    tiny.pixart().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def pipe(folder):
    """Loaded and moved as scripts do, in inference mode; resident, so that what runs between models meets device tensors."""
    with torch.inference_mode():
        return tpu.install(PixArtSigmaPipeline.from_pretrained(folder), tpu.TPUConfig(glue="resident")).to("cuda")


@pytest.fixture(scope="module")
def upstream(idioms):
    """A function from changed arguments to what upstream's pipeline of the same weights gives."""
    return functools.partial(call, tiny.pixart())


@pytest.fixture
def right(pipe, upstream):
    """A check that a call of the pipeline gives what upstream's does."""

    def check(**changes):
        assert relative(call(pipe, **changes), upstream(**changes)) < 1e-5

    return check


def inputs(**changes) -> dict:
    """Of the transformer, made as a script for CUDA makes them."""
    given = {
        "hidden_states": torch.randn(2, 4, 8, 8, device="cuda"),
        "encoder_hidden_states": torch.randn(2, 8, 32, device="cuda"),
        "timestep": torch.tensor([500, 500], device="cuda"),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }
    return {**given, **changes}


@idiom("inference-load", "inference-call", "generator-pipe", "device-pipe", "encode-prompt", "free-memory")
def test_a_call_as_scripts_make_it(pipe, right, upstream, new_garbage):
    """In inference mode, with noise made where the pipeline is, of prompts encoded there; memory is freed at the end."""
    assert not any(p.is_inference() for p in pipe.transformer.parameters())

    @torch.inference_mode()
    def generate():
        return right(output_type="pt")

    generate()
    expected = upstream()
    for device in ("cuda", pipe.device, pipe._execution_device):
        assert relative(call(pipe, generator=torch.Generator(device).manual_seed(11)), expected) < 1e-5
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator("cuda").manual_seed(5), device=pipe.device)
    names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    made = pipe.encode_prompt("a red circle", negative_prompt="", device="cuda", max_sequence_length=8)
    assert all(type(x) is torch.Tensor and x.device.type == "cpu" for x in made)
    embeds = dict(zip(names, (x.to("cuda") for x in made)))
    right(prompt=None, negative_prompt=None, latents=latents.to(pipe.device), **embeds)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    right()


@idiom("inference-lora")
def test_inference_mode_and_lora(folder):
    theirs = tiny.pixart()
    with torch.inference_mode():
        ours = PixArtSigmaPipeline.from_pretrained(folder).to("cuda")
        for made in (ours, theirs):
            torch.manual_seed(3)
            config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
            inject_adapter_in_model(config, made.transformer)
        x = inputs()
        assert relative(ours.transformer(**x)[0], theirs.transformer(**x)[0]) < 1e-5


@idiom("compile-module", "compile-method", "compile-in-place", "compile-repeated", "dynamo-config")
def test_models_are_not_torchs_to_compile(pipe, said, right):
    loaded = tiny.pixart()
    torch._dynamo.config.cache_size_limit = 64
    torch._inductor.config.conv_1x1_as_mm = True
    for one in (pipe, loaded):
        decode = one.vae.decode
        one.transformer = torch.compile(one.transformer, mode="max-autotune", fullgraph=True)
        one.vae.decode = torch.compile(one.vae.decode, mode="reduce-overhead", fullgraph=True)
        assert type(one.transformer) is PixArtTransformer2DModel and one.vae.decode == decode
        one.text_encoder = torch.compile(one.text_encoder)
        one.transformer.compile(fullgraph=True)
        one.transformer.transformer_blocks[0].compile()
        assert one.transformer._compiled_call_impl is None

    @torch.compile(fullgraph=True)
    def denoise(**kwargs):
        return pipe.transformer(**kwargs)

    class Studio:
        def decode(self, z):
            return self.pipe.vae.decode(z)

    studio = Studio()
    studio.pipe = pipe
    assert not hasattr(denoise, "_torchdynamo_orig_callable")
    assert torch.compile(studio.decode).__func__ is Studio.decode
    pipe.transformer._repeated_blocks = ["BasicTransformerBlock"]
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    right()
    assert len([s for s in said if "torch.compile" in s]) == 1  # beside what is said of long compilations


def test_what_is_not_finite_is_told_of_the_call_that_gave_it(pipe):
    """A NaN that a script got of `vae.decode` is not in the picture that follows."""
    noise, told = torch.randn(1, 4, 16, 16, device="cuda"), lambda: installation(pipe).not_finite
    assert pipe.vae.decode(noise * torch.nan).sample.isnan().all()
    call(pipe, output_type="pt")
    assert told() == []
    call(pipe, latents=noise * torch.nan, output_type="pt")
    assert told() == ["vae"]
    call(pipe, output_type="pt")
    assert told() == []


@idiom("training-mode")
def test_a_model_left_in_training_mode_drops_what_upstreams_drops():
    """As models are that were built by hand: dropout of layers and of attention draws by the CPU generator."""
    latents = []
    for device in ("cpu", "cuda"):
        made = tiny.flux(transformer={"num_layers": 1, "num_single_layers": 1})
        for module in made.text_encoder.train().modules():
            if hasattr(module, "dropout"):  # of its attention, by SDPA; T5 has layers of dropout
                module.dropout = 0.3
        made.text_encoder_2.train()
        made.to(device)
        torch.manual_seed(5)
        given = {"num_inference_steps": 1, "height": 16, "width": 16, "max_sequence_length": 8}
        given["output_type"] = "latent"
        latents.append([made(prompt, **given).images for prompt in ("a red circle", "a blue circle", "a red circle")])
    theirs, ours = latents
    assert relative(theirs[2], theirs[0]) > 1e-3
    assert max(map(relative, ours, theirs)) < 1e-5


@idiom("attention-backend", "attention-env")
def test_attention_backends_of_packages_for_gpus(pipe, said, monkeypatch):
    backends = "flash _flash_3 _flash_3_hub flash_hub sage sage_hub flex xformers _native_flash aiter_fa2_hub".split()
    for backend in backends:
        said.clear(), notices._said.clear()
        pipe.transformer.set_attention_backend(backend)
        with attention_backend(backend):
            pass
        pipe.transformer.reset_attention_backend()
        assert len(said) == 1 and backend in said[0] and "TPU kernel" in said[0]
    pipe.transformer.set_attention_backend("native")
    assert len(said) == 1
    with pytest.raises(ValueError, match="must be one of"):
        pipe.transformer.set_attention_backend("no such")
    assert AttentionBackendName(tpu.attention_backend("flash")) is AttentionBackendName.NATIVE
    assert tpu.attention_backend("tpu_kernel") == "tpu_kernel"
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    assert tpu.attention_backend("flash") == "flash"


@idiom("float16")
def test_float16_weights_are_told_of_bfloat16_once(said):
    pipe = tiny.pixart().to("cuda", torch.bfloat16)
    assert pipe.transformer._tpu_runner.place().arrays["proj_out.weight"].dtype == "bfloat16" and not said
    assert pipe.to(torch.float32).transformer.proj_out.weight.dtype == torch.float32
    given, theirs = inputs(), tiny.pixart().transformer
    made = tiny.pixart().to(torch.float16).to("cuda")
    half = {name: given[name].half() for name in ("hidden_states", "encoder_hidden_states")}
    assert relative(made.transformer(**{**given, **half})[0], theirs(**given)[0]) < 3e-3
    made.text_encoder(torch.tensor([[3, 4, 1]]))
    assert len(said) == 1 and "torch_dtype=torch.bfloat16" in said[0]


@idiom("xformers", "group-offload-pipeline", "group-offload-model", "group-offload-function")
def test_what_is_about_one_gpus_memory_is_waived(pipe, said, right):
    pipe.enable_xformers_memory_efficient_attention()
    pipe.transformer.enable_xformers_memory_efficient_attention()
    assert "xformers" in said.pop()
    pipe.enable_group_offload(onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    pipe.transformer.enable_group_offload(onload_device="cuda", offload_type="block_level", num_blocks_per_group=1)
    apply_group_offloading(pipe.text_encoder, onload_device=torch.device("cuda"), offload_type="leaf_level")
    assert "group offloading" in said.pop() and not said
    assert not hasattr(pipe.transformer, "_diffusers_hook")
    right()
    made = tiny.pixart()  # by hand: it goes to the TPU
    made.enable_group_offload(onload_device=torch.device("cuda"), offload_type="leaf_level")
    assert hasattr(made.transformer, "_tpu_runner")


@idiom("quantization-gpu")
def test_quantization_that_needs_a_gpu_is_refused_first(folder):
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig

    def load(cls, config, **more):
        return lambda: cls.from_pretrained(folder, quantization_config=config, **more)

    given = {"quant_kwargs": {"load_in_4bit": True}, "components_to_quantize": ["text_encoder"]}
    own = PipelineQuantizationConfig(quant_backend="bitsandbytes_4bit", **given)
    other = SimpleNamespace(quant_method="modelopt")
    for asked, words in (
        (
            lambda: BitsAndBytesConfig(load_in_4bit=True),
            "needs a GPU: load the model without quantization_config, in bfloat16",
        ),
        (load(PixArtTransformer2DModel, other, subfolder="transformer"), "'modelopt', which needs a GPU"),
        (load(PixArtSigmaPipeline, own), "'bitsandbytes', which needs a GPU"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            asked()


class Quantized(torch.Tensor):
    """A weight as quantization packages make them: its bytes are not its values."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.int8 = (weight * 10).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda q: q.int8.float() / 10, (args, kwargs or {}))
        return cls(args[0]) if func is torch.ops.aten.detach.default else func(*args, **kwargs)


@idiom("quantization-weights")
@pytest.mark.parametrize("when", ["before", "after"])
def test_quantized_weights_are_refused_where_they_would_go_to_the_chips(when):
    made = tiny.pixart()
    block = made.transformer.transformer_blocks[1].attn1
    if when == "after":
        made.to("cuda")
        made.transformer(**inputs())
    block.to_q.weight = torch.nn.Parameter(Quantized(block.to_q.weight.detach()), requires_grad=False)
    named = "transformer_blocks.1.attn1.to_q.weight of class Quantized.*bfloat16"
    with pytest.raises(NotImplementedError, match=named):
        made.to("cuda")
        made.transformer(**inputs())


@idiom("gradients", "forgotten-no-grad")
def test_gradients_and_a_forgotten_no_grad_are_as_upstream(pipe):
    x, theirs = torch.randn(2, 4, 8, 8, requires_grad=True), tiny.pixart().transformer
    given = inputs(hidden_states=x)
    losses = (model(**given)[0].square().mean() for model in (pipe.transformer, theirs))
    found, expected = (torch.autograd.grad(loss, x)[0] for loss in losses)
    assert relative(found, expected) < 1e-5
    block = pipe.transformer.transformer_blocks[0]
    hook = block.register_forward_hook(lambda *_: torch.rand(1).item() and None)  # the model runs eagerly with it
    loss = pipe.transformer(**given)[0].sum()
    with pytest.raises(NotImplementedError, match="is not compiled.*uninstall"):
        loss.backward()
    pipe.transformer.train()
    (found,) = torch.autograd.grad(pipe.transformer(**given)[0].square().mean(), x)  # on the host
    assert relative(found, expected) < 1e-5
    pipe.transformer.eval()
    hook.remove()
    given = inputs()
    ours = pipe.transformer(**given)[0]
    assert relative(ours, theirs(**given)[0]) < 1e-5
    ours += 1
    with pytest.raises(RuntimeError, match="requires grad"):
        ours.numpy()
    with torch.no_grad():
        assert not pipe.transformer(**given)[0].requires_grad
    pipe.transformer.requires_grad_(False)
    assert not pipe.transformer(**given)[0].requires_grad
    pipe.transformer.requires_grad_(True)
    tpu.install(pipe, tpu.TPUConfig(host=("transformer",)))
    pipe.transformer(**inputs(hidden_states=x))[0].sum().backward()
    assert x.grad.any()
