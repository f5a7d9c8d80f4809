"""Shared by the tables: names of models, sizes, seconds, and Markdown."""

from collections.abc import Sequence


MODELS = {
    "wan2.1-t2v-14b": "Wan 2.1 14B",
    "wan2.1-i2v-14b-720p": "Wan 2.1 14B image-to-video",
    "wan2.2-t2v-a14b": "Wan 2.2 A14B, either expert",
    "wan2.2-ti2v-5b": "Wan 2.2 TI2V 5B",
    "wan2.1-t2v-1.3b": "Wan 2.1 1.3B",
    "cogvideox1.5-5b": "CogVideoX1.5 5B",
    "cogvideox-5b": "CogVideoX 5B",
    "cogvideox-2b": "CogVideoX 2B",
    "cogvideox-5b@CogVideoXVideoToVideoPipeline": "CogVideoX 5B, video to video",
    "hunyuanvideo-1.5-720p-t2v": "HunyuanVideo-1.5",
    "hunyuanvideo-1.5-480p-t2v": "HunyuanVideo-1.5",
    "ltx-video": "LTX-Video",
    "flux.1-dev": "FLUX.1 dev",
    "qwen-image": "Qwen-Image",
    "sdxl": "Stable Diffusion XL",
    "linear-1000": "a thousand submodules",
}
SIZES = {(720, 1280): "720p", (480, 832): "480p", (480, 848): "480p"}


def work_of(row: dict) -> str:
    """Returns the model and the size of its image or video."""
    if "height" not in row:
        return MODELS[row["model"]]
    size = SIZES.get((row["height"], row["width"]), f"{row['height']} x {row['width']}")
    frames = f" x {row['num_frames']}" if "num_frames" in row else ""
    return f"{MODELS[row['model']]}, {size}{frames}"


def gib(row: dict) -> str:
    return f"{row['hbm_gib_per_chip']['peak']:.1f}"


def span(seconds: float, slower: float | None = None) -> str:
    """Returns seconds, or the range up to `slower`, with two decimals below 10, one below 100, else none."""
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f}" + ("" if slower is None else f" to {slower:.{digits}f}")


def significant(seconds: float) -> str:
    return f"{seconds:.4g}"


def markdown(head: Sequence[str], rows: list[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    first, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *rows))
    return [first, "|" + "---|" * len(head), *rest]
