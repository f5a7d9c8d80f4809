"""What caches, and linear layers in 8 bits, do to the videos of the shipped model, on simulated chips; and what that would be of a large
model's run, by its records.

PSNR and SSIM (Wang et al. 2004: a Gaussian window of 1.5 pixels) are of a video against the one without either, in float32, the worst of
`PROMPTS`. A block run is one block for one branch of one step. For `PRODUCTS` the denoiser is in bfloat16.
"""

import functools
import json

import numpy as np

from diffusers.tpu.chips.figures import find_topology

from . import ROOT, run_module, versions


MODEL = ROOT / "examples/tpu/models/wan-shapes"
RECORDS = ROOT / "examples/tpu/results"
LARGE = {"model": "wan2.1-t2v-14b", "topology": "v6e-8", "way": "bound"}
BLOCKS_OF_LARGE = 40
STEPS = 50
PROMPTS = {"a red circle moving right": 6, "a blue square moving up": 1}  # to seeds
CALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": STEPS, "guidance_scale": 2.0}
# What upstream's MagCacheConfig(calibrate=True) prints of the first prompt.
RATIOS = (
    1.0, 0.986, 0.983, 0.98, 0.981, 0.988, 0.99, 0.983, 0.993, 0.988, 0.988, 0.986, 0.993, 0.991, 0.992, 0.988, 0.992, 0.989,
    0.992, 0.989, 0.99, 0.985, 0.985, 0.988, 0.987, 0.984, 0.985, 0.983, 0.983, 0.981, 0.981, 0.976, 0.978, 0.972, 0.973,
    0.97, 0.97, 0.966, 0.963, 0.957, 0.957, 0.949, 0.945, 0.941, 0.933, 0.921, 0.919, 0.9, 0.905, 0.957,
)  # fmt: skip
CACHES = {  # name: class and settings
    "first block, 0.08": ("FirstBlockCacheConfig", {"threshold": 0.08}),
    "first block, 0.12": ("FirstBlockCacheConfig", {"threshold": 0.12}),
    "magnitudes, 0.06": ("MagCacheConfig", {"threshold": 0.06, "max_skip_steps": 2, "retention_ratio": 0.2}),
    "magnitudes, 0.12": ("MagCacheConfig", {"threshold": 0.12, "max_skip_steps": 3, "retention_ratio": 0.1}),
    **{
        f"series of the last layer, {interval}": (
            "TaylorSeerCacheConfig",
            {"use_lite_mode": True, "cache_interval": interval, "disable_cache_before_step": 5},
        )
        for interval in (2, 3, 4)
    },
}
PRODUCTS = {"the denoiser in bfloat16": "bfloat16", "linear layers in int8": "int8", "linear layers in fp8": "fp8"}
EIGHT_BITS = "8 bits"  # the variant of step.json


def answer(name: str) -> dict:
    """Quality, block runs and planned seconds with the cache, or the products, of this name.

    Raises RuntimeError where the process that makes the videos fails.
    """
    found = dict(_measured()[name])
    ran = found.pop("steps_with_blocks")
    seconds, slower = planned(ran, "first" in name) if name in CACHES else planned_products(PRODUCTS[name])
    return {
        **found,
        "steps_with_blocks": sum(ran),
        "planned_seconds": seconds,
        "planned_slower": slower,
        "planned_without": _record("run.json")["seconds"]["total"],
        "versions": versions(),
    }


def planned(ran: list[bool], first_block: bool) -> tuple[float, float]:
    """Seconds of a whole run of the large model, and of a chip that waits more, where blocks run in these steps.

    What the plan does not name as a block's takes its time in each step; so does the first block, if the cache looks at it.
    """
    run, plan = _record("run.json"), json.loads((RECORDS / "plan-wan2.1-t2v-14b-v6e-8.json").read_text())
    if len(ran) != run["steps"]:
        raise ValueError(f"expected the {run['steps']} steps of the record, got {len(ran)}")
    modules = next(part["timing"]["by_module"] for part in plan["parts"] if part["stage"] == "denoise")
    blocks = sum(seconds for name, seconds in modules.items() if name.startswith("blocks.")) / sum(modules.values())
    saved = blocks * (1 - first_block / BLOCKS_OF_LARGE) * (len(ran) - sum(ran)) / len(ran)
    seconds = run["seconds"]["total"] - saved * run["seconds"]["steps"]
    return seconds, seconds * run["slower"] / run["seconds"]["total"]


def planned_products(kind: str) -> tuple[float, float] | tuple[None, None]:
    """Seconds of a whole run of the large model whose linear layers have such products, and of a chip that waits more; None: not there."""
    run = _record("run.json")
    seconds, slower = run["seconds"]["total"], run["slower"]
    if kind == "bfloat16":
        return seconds, slower
    if kind != find_topology(LARGE["topology"]).chip.narrow:
        return None, None
    ours, narrow = (_record("step.json", variant=variant, height=720) for variant in ("ours", EIGHT_BITS))
    saved = [run["steps"] * (ours[of] - narrow[of]) for of in ("seconds_per_step", "slower")]
    return seconds - saved[0], slower - saved[1]


def _record(name: str, **more) -> dict:
    wanted = {**LARGE, **more}.items()
    return next(row for row in json.loads((RECORDS / name).read_text()) if wanted <= row.items())


@functools.cache
def _measured() -> dict[str, dict]:
    return run_module("cache_row", DIFFUSERS_TPU_DEVICES="1")


def psnr(video: np.ndarray, oracle: np.ndarray) -> float:
    """Decibels, of values from 0 to 1."""
    return float(-10 * np.log10(np.mean((video.astype(np.float64) - oracle) ** 2)))


def ssim(video: np.ndarray, oracle: np.ndarray) -> float:
    """Mean structural similarity [F, H, W, C] of values from 0 to 1, of each frame and channel."""
    from scipy.ndimage import gaussian_filter

    def mean(x):
        return gaussian_filter(x, (0, 1.5, 1.5, 0), truncate=3.5)

    x, y = video.astype(np.float64), oracle.astype(np.float64)
    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    return float(np.mean((2 * mx * my + 1e-4) * (2 * vxy + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))))


def main():
    """Makes the videos and prints the rows; a process of its own, on one simulated chip."""
    import torch

    import diffusers
    from diffusers import tpu
    from diffusers.tpu.kernels import narrow

    pipe = diffusers.WanPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cuda")
    runner, blocks = pipe.transformer._tpu_runner, len(pipe.transformer.blocks)

    def videos() -> list[np.ndarray]:
        seeds = ((prompt, torch.Generator().manual_seed(seed)) for prompt, seed in PROMPTS.items())
        return [pipe(prompt, generator=noise, output_type="np", **CALL).frames[0] for prompt, noise in seeds]

    oracles, rows = videos(), {}
    for name, (cls, settings) in CACHES.items():
        if cls == "MagCacheConfig":
            settings = {**settings, "mag_ratios": list(RATIOS), "num_inference_steps": STEPS}
        pipe.transformer.enable_cache(getattr(diffusers, cls)(**settings))
        made = videos()
        ran = [bool(np.asarray(computed).all()) for computed in runner.step_cache.decided]
        assert not runner.eager and len(ran) == 2 * STEPS * len(PROMPTS)
        pipe.transformer.disable_cache()
        always = cls == "FirstBlockCacheConfig"
        runs = sum(blocks if computed else always for computed in ran)
        pairs = [cond or uncond for cond, uncond in zip(ran[::2], ran[1::2])]
        rows[name] = {
            "steps": STEPS,
            "block_runs": runs / len(PROMPTS),
            "fewer_block_runs": blocks * len(ran) / runs,
            "psnr": min(map(psnr, made, oracles)),
            "ssim": min(map(ssim, made, oracles)),
            "steps_with_blocks": max((pairs[n : n + STEPS] for n in range(0, len(pairs), STEPS)), key=sum),
        }
    narrow.BYTES_OF_A_WEIGHT = 0  # so few tokens would keep bfloat16
    for name, kind in PRODUCTS.items():
        pipe.transformer.to(torch.bfloat16)
        tpu.install(pipe, tpu.TPUConfig(linear=kind))
        made = videos()
        rows[name] = {
            "steps": STEPS,
            "block_runs": 2.0 * STEPS * blocks,
            "fewer_block_runs": 1.0,
            "psnr": min(map(psnr, made, oracles)),
            "ssim": min(map(ssim, made, oracles)),
            "steps_with_blocks": [True] * STEPS,
        }
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
