"""Writes a pipeline's output to files: mp4 with a contact sheet, or png. All files are written or none."""

import math
import os
from pathlib import Path

import numpy as np
from PIL import Image

from ....utils import export_to_video
from ...common.errors import NotWritten
from ...common.files import whole_files


FPS = 16
NO_PICTURE = (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError)  # PIL's for a bad picture
TILES_IN_A_ROW, MAX_TILES, TILE_WIDTHS = 9, 18, (128, 256)  # of contact sheets


def pictures(output) -> list:
    """The output's videos, each a list of frames, or its images, all of PIL. Raises ValueError if it has neither."""
    for name in ("frames", "images"):
        if (values := getattr(output, name, None)) is not None:
            videos = values if name == "frames" else [values]
            if all(isinstance(frame, Image.Image) for video in videos for frame in video):
                return list(values)
    raise ValueError(f"expected a pipeline of videos or images, got one that returns {type(output).__name__}")


def write(values: list, path: Path, fps: int | None) -> list[Path]:
    """Write every video with its contact sheet, or every image, as `pictures` gives them; returns the files.

    Raises NotWritten if the disk is full or they cannot be written.
    """
    fps, are_videos = FPS if fps is None else fps, not isinstance(values[0], Image.Image)
    stems = [path.stem if len(values) == 1 else f"{path.stem}-{number}" for number in range(len(values))]
    sheets = [path.with_name(f"{stem}.png") for stem in stems]
    videos = [sheet.with_suffix(".mp4") for sheet in sheets] if are_videos else []
    # Without it imageio forks to protect ffmpeg from ctrl-C, and JAX warns of forks. Unfinished files are removed anyway.
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")
    try:
        with whole_files([*videos, *sheets]) as drafts:
            for value, draft in zip(values, drafts[: len(videos)]):
                export_to_video(value, str(draft), fps=fps)
            for value, draft in zip(values, drafts[len(videos) :]):
                (contact_sheet(value) if are_videos else value).save(draft)
    except OSError as error:  # the disk is full, or ffmpeg could not write and ended
        raise NotWritten(
            f"expected room for {', '.join(map(str, [*videos, *sheets]))}, got {' '.join(str(error).split())[-300:]}: nothing is"
            " left there. Make room, or choose another place; the same seed gives the same again."
        ) from error
    return [*videos, *sheets]


def contact_sheet(video: list[Image.Image]) -> Image.Image:
    """Up to `MAX_TILES` evenly spaced frames in rows; small ones are enlarged and large ones reduced."""
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
