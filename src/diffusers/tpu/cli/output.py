"""What a pipeline returned, as files: mp4 with a contact sheet, or png; whole or not at all."""

import contextlib
import math
import os
from pathlib import Path

import numpy as np
from PIL import Image

from ...utils import export_to_video
from ..failures import NotWritten
from ..files import whole_files
from .errors import BadInput, one_line


SUFFIXES = (".mp4", ".png")
FPS = 16
TILES_IN_A_ROW = 9
MAX_TILES = 18
TILE_WIDTHS = (128, 256)


def output_path(wanted: str | None, prompt, suffixes: tuple[str, ...] = SUFFIXES, kind: str = "") -> Path:
    """Where to write, of these suffixes; its folder is made. Without `wanted`: out/, named after the prompt and `kind`.

    Raises BadInput for another suffix or a folder that cannot be written to.
    """
    words = prompt[0] if isinstance(prompt, list) else prompt
    path = Path(wanted) if wanted else Path("out") / (_file_name(words or "") + kind + suffixes[0])
    if not path.name or path.is_dir():
        raise BadInput(f"expected --output to be a file, got the folder {str(path)!r}")
    path = path if path.suffix else path.with_suffix(suffixes[0])
    if path.suffix not in suffixes:
        raise BadInput(f"expected --output to end in {' or '.join(suffixes)}, got {wanted!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"expected to write into {path.parent}, got {error.strerror}; choose another --output"
        ) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"expected --output to be a file in a writable folder, got {str(path)!r}")
    return path


def _file_name(words: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in words.lower()).split()
    return "-".join(kept)[:60].strip("-") or "generated"


def pictures(output) -> tuple[list, bool]:
    """Videos, each a list of frames, or images, all of PIL; and whether they are videos.

    Raises BadInput for a pipeline that returns neither.
    """
    for name, are_videos in (("frames", True), ("images", False)):
        values = getattr(output, name, None)
        if values is not None:
            videos = values if are_videos else [values]
            if all(isinstance(frame, Image.Image) for video in videos for frame in video):
                return list(values), are_videos
    raise BadInput(f"expected a pipeline of videos or images, got one that returns {type(output).__name__}")


def write(values: list, are_videos: bool, path: Path, fps: int | None) -> list[Path]:
    """Write every video with its contact sheet, or every image, as `pictures` gives them; returns the files."""
    fps = FPS if fps is None else fps
    stems = [path.stem if len(values) == 1 else f"{path.stem}-{number}" for number in range(len(values))]
    videos = [path.with_name(f"{stem}.mp4") for stem in stems] if are_videos else []
    sheets = [path.with_name(f"{stem}.png") for stem in stems]
    # Without it imageio forks to shield ffmpeg from ctrl-C, which JAX warns of; an unfinished file is removed anyway.
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")
    try:
        with whole_files([*videos, *sheets]) as drafts:
            for value, draft in zip(values, drafts):
                if are_videos:
                    export_to_video(value, str(draft), fps=fps)
            for value, draft in zip(values, drafts[len(videos) :]):
                (contact_sheet(value) if are_videos else value).save(draft)
    except OSError as error:  # the disk is full, or ffmpeg could not write and has gone
        raise NotWritten(
            f"expected room for {', '.join(map(str, [*videos, *sheets]))}, got {one_line(error)[-300:]}: nothing is left there."
            " Make room, or choose another --output; the same --seed gives the same again."
        ) from error
    return [*videos, *sheets]


@contextlib.contextmanager
def whole_file(wanted: str, suffix: str):
    """A hidden file beside `wanted` to write to, which gets its name at the end.

    Raises BadInput for another suffix or a folder that is not there or cannot be written to.
    """
    path = Path(wanted)
    if path.suffix != suffix or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"expected a file that ends in {suffix}, in a writable folder that is there, got {wanted!r}")
    with whole_files([path]) as (draft,):
        yield draft


def check_writable(wanted: str, suffix: str):
    """Says now, not after minutes, that a file cannot be written: as `whole_file`, nothing is left there."""
    with contextlib.suppress(_NotYet), whole_file(wanted, suffix):
        raise _NotYet


class _NotYet(Exception):
    pass


def contact_sheet(video: list[Image.Image]) -> Image.Image:
    """Up to `MAX_TILES` frames at even distances, in rows, small ones enlarged and large ones reduced."""
    chosen = np.linspace(0, len(video) - 1, min(len(video), MAX_TILES)).round().astype(int)
    rows = math.ceil(len(chosen) / TILES_IN_A_ROW)
    columns = math.ceil(len(chosen) / rows)
    width, height = video[0].size
    factor = min(max(width, TILE_WIDTHS[0]), TILE_WIDTHS[1]) / width
    size = max(1, round(width * factor)), max(1, round(height * factor))
    sheet = Image.new("RGB", (columns * (size[0] + 2) - 2, rows * (size[1] + 2) - 2), "white")
    for place, index in enumerate(chosen):
        tile = video[index].convert("RGB").resize(size, Image.Resampling.LANCZOS)
        sheet.paste(tile, (place % columns * (size[0] + 2), place // columns * (size[1] + 2)))
    return sheet
