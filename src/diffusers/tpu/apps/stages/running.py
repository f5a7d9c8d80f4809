"""Runs a stage on a loaded pipeline: upstream's `__call__` up to the stage's end, with earlier stages' results from a file."""

import itertools

import torch

from ....models.autoencoders.vae import DiagonalGaussianDistribution
from ....models.modeling_outputs import AutoencoderKLOutput
from ....utils.torch_utils import get_module_execution_device
from ...compile.state.watch import replaced
from .loading import STAGED, Reached


IMAGE = "image_embeds"
ENCODED = "encoded"  # and a number: the result of each call of the VAE's encoder
LATENTS = "latents"  # what `vae.decode` takes


def run_text(pipe, call: dict, seed: int) -> dict[str, torch.Tensor]:
    """The outputs of this call's encoders, on the host: embeddings [B, T, C], masks [B, T], encoded pixels [B, 2C, F, H, W]."""
    kept: dict[str, torch.Tensor] = {}

    def watched(owner, method: str, tensors_of):
        theirs, numbers = getattr(owner, method), itertools.count()

        def run(*args, **kwargs):
            answer = theirs(*args, **kwargs)
            names = _names(pipe, method, next(numbers))
            tensors = zip(names, tensors_of(answer), strict=True)
            kept.update((name, _on_host(x)) for name, x in tensors if x is not None)
            return answer

        return vars(owner), method, run

    encoders = (
        (pipe, "encode_prompt", tuple),
        (pipe, "encode_image", lambda answer: [answer]),
        (pipe.vae, "encode", lambda answer: [answer.latent_dist.parameters]),
    )
    with replaced(watched(*encoder) for encoder in encoders if hasattr(*encoder[:2])):
        _until_cut(pipe, call, seed)
    return kept


def run_denoise(pipe, call: dict, seed: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """The latents that this call would pass to `vae.decode`, [B, C, F, H, W] in the VAE's dtype, on the host.

    `kept`: what `run_text` returned for the same call and seed; `call` may have callbacks in addition.

    Raises ValueError if guidance needs a prompt that `run_text` did not encode.
    """

    def from_file(owner, method: str, answer_of):
        numbers = itertools.count()

        def run(*args, **kwargs):
            names = _names(pipe, method, next(numbers))
            if not kept.keys() & set(names):
                raise ValueError(
                    f"expected {', '.join(names)} from the stage text, got {', '.join(kept)}: its guidance was another; run it"
                    " again with the guider that this pipeline has"
                )
            return answer_of(*(kept[name].to(pipe._execution_device) if name in kept else None for name in names))

        return vars(owner), method, run

    def cut(latents, *args, **kwargs):
        raise Reached(latents)

    places = (
        from_file(pipe, "encode_prompt", lambda *tensors: tensors),
        from_file(pipe, "encode_image", lambda tensor: tensor),
        from_file(pipe.vae, "encode", lambda x: AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(x))),
        (vars(pipe.vae), "decode", cut),
    )
    with replaced(places):
        return _on_host(_until_cut(pipe, call, seed))


def run_decode(pipe, latents: torch.Tensor, output_type: str = "np"):
    """The frames of these latents as the pipeline returns them: "np" [B, F, H, W, C] in [0, 1], "pil" lists of pictures.

    Raises ValueError for latents of another VAE.
    """
    config = pipe.vae.config
    channels = config.z_dim if "z_dim" in config else config.latent_channels
    expected, got = (pipe.vae.dtype, channels), (latents.dtype, latents.shape[1])
    if expected != got:
        raise ValueError(f"expected latents of dtype and channels {expected}, as the VAE has them, got {got}")
    if "_tpu" not in vars(pipe):
        return _decoded(pipe, latents, output_type)
    from ...pipelines.pipeline import entered

    return entered(_decoded)(pipe, latents, output_type)


@torch.no_grad()
def _decoded(pipe, latents: torch.Tensor, output_type: str):
    latents = latents.to(get_module_execution_device(pipe.vae))
    video = pipe.vae.decode(latents, return_dict=False)[0]
    return pipe.video_processor.postprocess_video(video, output_type)


def _names(pipe, method: str, number: int) -> list[str]:
    """Names of the tensors of a method's call. Of `encode_prompt`, call 0 is for both prompts or the first, 1 for the other."""
    if method == "encode_prompt":
        return [f"{name}.{number}" if number else name for name in STAGED[type(pipe).__name__]]
    return [IMAGE] if method == "encode_image" else [f"{ENCODED}.{number}"]


def _until_cut(pipe, call: dict, seed: int):
    """Run the call until it raises `Reached`, and return its value. Raises ValueError if it ends without."""
    try:
        pipe(**call, generator=torch.Generator().manual_seed(seed), output_type="np")
    except Reached as cut:
        return cut.value
    raise ValueError("expected at least one denoising step, got none: give --num-inference-steps of 1 or more")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of any device to the host, bit for bit."""
    if not hasattr(tensor, "jax"):
        return tensor.detach().cpu()
    from ... import bridge

    return bridge.from_numpy(tensor.jax())
