"""Finds colour, shape and direction in a video by classical image analysis, independently of any model.

Background: the median of the picture's border over all frames. Foreground: pixels that differ from it by more than
half of the largest difference, largest connected part only. Colour: the named hue nearest to the foreground's median
hue. Shape: the share of the bounding box that is covered (square 1, circle pi/4, triangle 1/2), with partly covered
edge pixels counted in part. A diamond also covers 1/2: its centroid is at the box's centre, a triangle's a sixth of the height below it.
Direction: the larger component of the centroid's fitted velocity.

Letters: F frames, H height, W width.
"""

import argparse
import colorsys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import ndimage


HUES = {"red": 0, "yellow": 60, "green": 120, "cyan": 180, "blue": 240, "magenta": 300}
MIN_CONTRAST = 0.15
MIN_SATURATION = 0.25
MIN_AREA = 12
MIN_TRAVEL = 4.0
TRIANGLE_BELOW, SQUARE_ABOVE = 0.64, 0.89
DIAMOND_BELOW = 1 / 12  # of the height


class Score(NamedTuple):
    """What a video shows; None where it cannot be determined."""

    colour: str | None
    shape: str | None
    direction: str | None


def score(video: np.ndarray) -> Score:
    """Returns what `video` `F H W 3` in [0, 1] shows.

    Raises:
        ValueError: the array is not `F H W 3` with at least two frames, or has values outside [0, 1].
    """
    if video.ndim != 4 or video.shape[-1] != 3 or len(video) < 2:
        raise ValueError(f"expected a video F H W 3 of at least two frames, got shape {video.shape}")
    if not (np.isfinite(video).all() and video.min() >= 0 and video.max() <= 1):
        raise ValueError(f"expected finite values in [0, 1], got {video.min()} to {video.max()}; divide bytes by 255")
    coverages = [cover(frame, background) for frame, background in zip(video, find_backgrounds(video))]
    seen = [index for index, coverage in enumerate(coverages) if coverage is not None]
    if not seen:
        return Score(None, None, None)
    colour = name_colour(np.concatenate([video[index][coverages[index] > 0.9] for index in seen]))
    shape = name_shape(*zip(*(measure_fill(coverages[index]) for index in seen)))
    centroids = np.array([ndimage.center_of_mass(coverages[index]) for index in seen])
    return Score(colour, shape, name_direction(np.array(seen), centroids, len(video)))


def find_backgrounds(video: np.ndarray) -> np.ndarray:
    """Returns each frame's background colour `F 3`: the median over its border."""
    border = np.concatenate([video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1]], axis=1)
    return np.median(border, axis=1)


def cover(frame: np.ndarray, background: np.ndarray) -> np.ndarray | None:
    """Returns how much of each pixel `H W` the subject covers, in [0, 1], or None without enough contrast or area."""
    difference = np.linalg.norm(frame - background, axis=-1)
    if difference.max() < MIN_CONTRAST:
        return None
    parts, count = ndimage.label(difference > 0.5 * difference.max())
    areas = ndimage.sum_labels(np.ones_like(difference), parts, np.arange(1, count + 1))
    if areas.max() < MIN_AREA:
        return None
    inside = parts == 1 + areas.argmax()
    plateau = np.median(difference[inside])
    near = ndimage.binary_dilation(inside, iterations=1)
    coverage = np.where(near, np.clip(difference / plateau, 0, 1), 0)
    return np.where(coverage > 0.1, coverage, 0)


def name_colour(pixels: np.ndarray) -> str | None:
    """Returns the name of the hue nearest to the median colour of `pixels` `P 3`."""
    if not len(pixels):
        return None
    hue, saturation, _ = colorsys.rgb_to_hsv(*np.median(pixels, axis=0))
    if saturation < MIN_SATURATION:
        return None
    return min(HUES, key=lambda name: abs((360 * hue - HUES[name] + 180) % 360 - 180))


def measure_fill(coverage: np.ndarray) -> tuple[float, float]:
    """Returns the share of the bounding box that `coverage` `H W` fills, and how far below its centre the centroid is, over its height.

    A side of the box is the sum of the largest coverage in each row or column, so an edge pixel counts in part.
    """
    rows, columns = coverage.max(axis=1), coverage.max(axis=0)
    low = ndimage.center_of_mass(coverage)[0] - ndimage.center_of_mass(rows)[0]
    return float(coverage.sum() / (rows.sum() * columns.sum())), float(low / rows.sum())


def name_shape(fills: tuple[float, ...], lows: tuple[float, ...]) -> str:
    """Returns the shape whose fill of the bounding box is nearest to the median over the frames."""
    fill, low = np.median(fills), np.median(lows)
    half = "diamond" if low < DIAMOND_BELOW else "triangle"
    return half if fill < TRIANGLE_BELOW else "square" if fill > SQUARE_ABOVE else "circle"


def name_direction(frames: np.ndarray, centroids: np.ndarray, num_frames: int) -> str | None:
    """Returns the direction of the line fitted to `centroids` `P 2` (row, column), None if it hardly moves."""
    if len(frames) < 2:
        return None
    down, right = np.polyfit(frames, centroids, 1)[0] * (num_frames - 1)
    if max(abs(down), abs(right)) < MIN_TRAVEL:
        return None
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"


def read_video(path: Path) -> np.ndarray:
    """Returns the video `F H W 3` in [0, 1] of a movie file, an .npy array or a folder of PNG frames."""
    import imageio.v3 as iio

    if path.is_dir():
        frames = [iio.imread(name)[..., :3] for name in sorted(path.glob("*.png"))]
        if not frames:
            raise ValueError(f"expected PNG frames in {path}, found none")
        video = np.stack(frames)
    else:
        video = np.load(path) if path.suffix == ".npy" else iio.imread(path)[..., :3]
    return video / 255.0 if video.dtype == np.uint8 else video


def main() -> None:
    parser = argparse.ArgumentParser(description="Says which colour, shape and direction a video shows.")
    parser.add_argument("videos", nargs="+", type=Path, help="movie, .npy array F H W 3 or folder of PNG frames")
    for path in parser.parse_args().videos:
        print(path, *(word or "?" for word in score(read_video(path))))


if __name__ == "__main__":
    main()
