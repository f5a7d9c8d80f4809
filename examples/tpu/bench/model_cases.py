"""A denoising step of popular models at their published size, on one chip and on slices of eight."""

from diffusers.tpu.kernels.attention.softmax_modes import BOUND
from diffusers.tpu.planner import PLANS, Question, request_of

from .cases import DENOISERS, IMAGE, LTX, Case


# Short name -> what of the call is not the model card's.
PUBLISHED = {
    "sd1.5": {}, "animatediff": {}, "sdxl": {}, "sdxl-controlnet": {}, "stable-diffusion-3.5-large": {},
    "stable-diffusion-3.5-medium": {}, "flux.1-dev": {}, "flux.1-schnell": {}, "flux.1-kontext-dev": {},
    "flux.2-dev": {}, "flux.2-klein-4b": {}, "flux.2-klein-9b": {}, "qwen-image": IMAGE, "z-image-turbo": {},
    "cogview4": {}, "chroma1-hd": {}, "sana-1.6b": {}, "pixart-sigma": {}, "lumina-image-2.0": {}, "auraflow": {},
    "hidream-i1": {}, "wan2.1-t2v-1.3b": {}, "wan2.1-t2v-14b": {}, "wan2.1-i2v-14b-480p": {},
    "wan2.1-i2v-14b-720p": {}, "wan2.1-vace-14b": {}, "wan2.2-t2v-a14b": {}, "wan2.2-ti2v-5b": {},
    "wan2.2-animate-14b": {}, "hunyuanvideo-1.5-480p-t2v": {}, "hunyuanvideo-1.5-720p-t2v": {},
    "hunyuanvideo-1.5-720p-i2v": {}, "hunyuanvideo": {}, "cogvideox-2b": {}, "cogvideox-5b": {},
    "cogvideox1.5-5b": {}, "ltx-video": LTX, "ltx-2": {}, "kandinsky-5.0-lite": {}, "mochi-1": {}, "svd-xt": {},
    "hunyuandit": {}, "allegro": {}, "text-to-video-ms-1.7b": {},
}  # fmt: skip
TOPOLOGIES = ("v6e-1", "v6e-8")
ON_V5E = (
    "sd1.5", "sdxl", "flux.1-dev", "flux.2-klein-4b", "z-image-turbo", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-ti2v-5b",
    "cogvideox-5b", "ltx-video",
)  # fmt: skip


def model_cases() -> list[Case]:
    slices = {name: (*TOPOLOGIES, "v5e-8") if name in ON_V5E else TOPOLOGIES for name in PUBLISHED}
    return [_model(name, topology, PUBLISHED[name]) for name in PUBLISHED for topology in slices[name]]


def training_cases() -> list[Case]:
    """A training step of adapters or of all weights: forward and backward pass, gradient clipping and AdamW."""
    flux = [("flux.1-dev", "lora", {"height": side, "width": side}) for side in (512, 1024)]
    wan = {"height": 480, "width": 832, "num_frames": 81}
    cases = [
        *((*case, topology) for case in flux for topology in ("v5e-8", "v6e-4")),
        ("sdxl", "full", {}, "v6e-8"),
        ("wan2.1-t2v-1.3b", "lora", wan | {"num_frames": 33}, "v6e-1"),
        ("wan2.1-t2v-14b", "lora", wan, "v6e-8"),
        ("wan2.1-t2v-14b", "full", wan, "v7x-16"),
    ]
    return [_model(name, topology, call, train) for name, train, call, topology in cases]


def _model(name: str, topology: str, call: dict, train: str | None = None) -> Case:
    def read(answer):
        parts = [part for part in answer["parts"] if part["stage"] == "denoise"]
        of_mode = answer["by_way"].get(BOUND, {"seconds": {"total": None}, "slower": None})  # none: no room
        return {
            "fits": answer["fits"],
            "hbm_gib_per_chip": answer["hbm_gib_per_chip"],
            "seconds_per_step": of_mode["seconds"]["total"],
            "slower": of_mode["slower"],
            "seconds": of_mode["seconds"],
            "mfu": answer["mfu"],
            "mesh": parts[0]["mesh"],
            "layout": [*dict.fromkeys(part["layout"] for part in parts)],
            "scans": sum(part["scans"] for part in parts),
            "trace_seconds": answer["trace_seconds"],
            "compile_seconds": max((part["compile_seconds"] for part in parts if not part["refused"]), default=None),
        }

    question = Question(PLANS, request_of(name, topology, arguments=call, only=DENOISERS, train=train), 1200)
    of_training = {} if train is None else {"train": train, **call}
    return Case({"model": name, "topology": topology, **of_training}, question, read, anyway=train is None)
