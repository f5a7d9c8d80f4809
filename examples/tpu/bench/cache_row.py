"""Quality of step caches, 8-bit linear layers and sparse attention on the shipped model, on simulated chips, and the planned seconds of a
large model's run with them, from its records.

PSNR and SSIM (Wang et al. 2004: a Gaussian window of 1.5 pixels) compare a video with the exact float32 one; the worst of `PROMPTS` counts.
A block run is one block for one branch of one step. For `PRODUCTS` the denoiser is in bfloat16. Videos with sparse attention have the size
`LARGER`, for which the model was not trained.
"""

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
BFLOAT16 = "the denoiser in bfloat16"
PRODUCTS = {
    BFLOAT16: "bfloat16",
    f"{BFLOAT16}, larger": "bfloat16",
    "linear layers in int8": "int8",
    "linear layers in fp8": "fp8",
}
EIGHT_BITS = "8 bits"  # the variant of step.json
SPARSITIES = (0.5, 0.7)
LARGER = {**CALL, "height": 256, "width": 256, "num_frames": 33}  # so that there are tiles: 2,304 tokens
SHIFT_OF_LARGE = 5.0  # of its scheduler at 720p, by its card


def sparse_variant(sparsity: float) -> str:
    """Returns the name of the variant of step.json in which all steps are sparse."""
    return f"sparse attention, {sparsity}"


def answer(name: str) -> dict:
    """Returns quality, block runs and planned seconds for a name among `CACHES`, `PRODUCTS` and sparse variants.

    Raises:
        RuntimeError: the process that makes the videos failed.
    """
    found = dict(run_module("cache_row", DIFFUSERS_TPU_DEVICES="1")[name])
    ran = found.pop("steps_with_blocks")
    if name in CACHES:
        seconds, slower = planned(ran, "first" in name)
    elif name in PRODUCTS:
        seconds, slower = planned_products(PRODUCTS[name])
    else:
        seconds, slower = planned_variant(name, sparse_steps())
    return {
        **found,
        "steps_with_blocks": sum(ran),
        "planned_seconds": seconds,
        "planned_slower": slower,
        "planned_without": _record("run.json")["seconds"]["total"],
        "versions": versions(),
    }


def planned(ran: list[bool], first_block: bool) -> tuple[float, float]:
    """Returns the lower and upper bound of seconds of the large model's run where blocks run in the true steps of `ran`.

    Every step has the time of modules outside of blocks, and of the first block if the cache reads it.
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
    """Returns the lower and upper bound of seconds of the large model's run with linear layers of this kind; None if its chip has none."""
    if kind not in ("bfloat16", find_topology(LARGE["topology"]).chip.narrow):
        return None, None
    return planned_variant("ours" if kind == "bfloat16" else EIGHT_BITS, _record("run.json")["steps"])


def planned_variant(variant: str, steps: int) -> tuple[float, float]:
    """Returns the lower and upper bound of seconds of the large model's run where `steps` of its steps are this variant of step.json."""
    run, ours, other = _record("run.json"), *(_record("step.json", variant=v, height=720) for v in ("ours", variant))
    saved = [steps * (ours[of] - other[of]) for of in ("seconds_per_step", "slower")]
    return run["seconds"]["total"] - saved[0], run["slower"] - saved[1]


def sparse_steps() -> int:
    """Returns how many steps of the large model's run use sparse attention by default."""
    from diffusers import UniPCMultistepScheduler
    from diffusers.tpu import TPUConfig

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT_OF_LARGE
    )
    scheduler.set_timesteps(STEPS)
    return int((scheduler.timesteps <= TPUConfig().attention_sparse_below).sum())


def _record(name: str, **more) -> dict:
    wanted = {**LARGE, **more}.items()
    return next(row for row in json.loads((RECORDS / name).read_text()) if wanted <= row.items())


def psnr(video: np.ndarray, oracle: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio in decibels of values in [0, 1]."""
    return float(-10 * np.log10(np.mean((video.astype(np.float64) - oracle) ** 2)))


def ssim(video: np.ndarray, oracle: np.ndarray) -> float:
    """Returns the mean structural similarity of frames and channels of `[F, H, W, C]` in [0, 1]."""
    from scipy.ndimage import gaussian_filter

    def mean(x):
        return gaussian_filter(x, (0, 1.5, 1.5, 0), truncate=3.5)

    x, y = video.astype(np.float64), oracle.astype(np.float64)
    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    return float(np.mean((2 * mx * my + 1e-4) * (2 * vxy + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))))


def main():
    """Makes the videos and prints the rows; run in its own process, on one simulated chip."""
    import torch

    import diffusers
    from diffusers import tpu
    from diffusers.tpu.kernels import narrow

    pipe = diffusers.WanPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cuda")
    runner, blocks = pipe.transformer._tpu_runner, len(pipe.transformer.blocks)

    def videos(call: dict = CALL) -> list[np.ndarray]:
        seeds = ((prompt, torch.Generator().manual_seed(seed)) for prompt, seed in PROMPTS.items())
        return [pipe(prompt, generator=noise, output_type="np", **call).frames[0] for prompt, noise in seeds]

    def row(made: list[np.ndarray], of: list[np.ndarray], **said) -> dict:
        quality = {"psnr": min(map(psnr, made, of)), "ssim": min(map(ssim, made, of))}
        whole = {"block_runs": 2.0 * STEPS * blocks, "fewer_block_runs": 1.0, "steps_with_blocks": [True] * STEPS}
        return {"steps": STEPS, **whole, **quality, **said}

    oracles, larger, rows = videos(), videos(LARGER), {}
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
        with_blocks = max((pairs[n : n + STEPS] for n in range(0, len(pairs), STEPS)), key=sum)
        counted = {"block_runs": runs / len(PROMPTS), "fewer_block_runs": blocks * len(ran) / runs}
        rows[name] = row(made, oracles, **counted, steps_with_blocks=with_blocks)
    for sparsity in SPARSITIES:
        tpu.install(pipe, tpu.TPUConfig(attention_sparsity=sparsity))
        rows[sparse_variant(sparsity)] = row(videos(LARGER), larger)
    narrow.BYTES_OF_A_WEIGHT = 0  # so few tokens would keep bfloat16
    for name, kind in PRODUCTS.items():
        pipe.transformer.to(torch.bfloat16)
        tpu.install(pipe, tpu.TPUConfig(linear=kind))
        of = (LARGER, larger) if "larger" in name else (CALL, oracles)
        rows[name] = row(videos(of[0]), of[1])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
