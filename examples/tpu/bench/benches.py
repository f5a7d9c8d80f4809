"""The benchmarks of `diffusers-tpu bench`: one row per case, from one compilation or one measurement.

A bench is a list of cases. A case has the row's identity, by which filters select, the question to the compiler, and a function that
reads the rest of the row from the answer. What is compared with ours is a case of the same bench.
"""

import functools
import tempfile
import time
from pathlib import Path

from diffusers.tpu.chips.figures import CHIPS, find_topology
from diffusers.tpu.kernels.attention.softmax_modes import BOUND, MODES, ONLINE
from diffusers.tpu.planner import PLANS, Question, ahead, request_of

from . import cache_row, check_row, host_row, load_row, ready_row, tokamax_cases
from .attention_cases import attention_cases, gradient_cases, sweep_cases
from .calibration import PUBLISHED
from .cases import AS_THEIRS, DENOISERS, IMAGE, KERNELS, LTX, VAES, VIDEO_720P, Case
from .model_cases import model_cases, training_cases


VIDEO_480P = {"height": 480, "width": 832, "num_frames": 81}
HUNYUAN_720P = {"height": 720, "width": 1280, "num_frames": 121}
HUNYUAN_480P = {"height": 480, "width": 848, "num_frames": 121}
COGVIDEOX = {"height": 480, "width": 720, "num_frames": 49}
COGVIDEOX_15 = {"height": 768, "width": 1360, "num_frames": 81}
COGVIDEOX_VIDEO_TO_VIDEO = "cogvideox-5b@CogVideoXVideoToVideoPipeline"  # encodes and decodes; the VAE is 1.5's

AS_COMPILED_BY_OTHERS = {"layers": "xla", "sparse_cores": False}


def step_cases() -> list[Case]:
    """A denoising step with guidance: the program of a run, by softmax mode, and variants of it.

    "unrolled, stock": blocks are not scanned, attention is JAX's splash kernel, linear layers are the compiler's, as in plain
    torchax. "unrolled, online": the same with online softmax in base 2.
    """
    wan, unrolled = ("v6e-8", "wan2.1-t2v-14b", VIDEO_720P), {"scan": False, **AS_COMPILED_BY_OTHERS}
    stock = {"attention": "splash", "attention_blocks": [*CHIPS["v6e"].splash_blocks]}
    cases = [
        *((*wan, "ours", way, {}) for way in MODES),
        (*wan, "stock splash", "", stock),
        (*wan, "the compiler's layers", BOUND, {"layers": "xla"}),
        (*wan, "no SparseCores", BOUND, {"sparse_cores": False}),
        (*wan, "unrolled, stock", "", {**unrolled, **stock}),
        (*wan, "unrolled, online", ONLINE, {**unrolled, "attention": "online"}),
    ]
    others = [
        ("v6e-8", "wan2.1-t2v-14b", VIDEO_480P),
        ("v6e-16", "wan2.1-t2v-14b", VIDEO_720P),
        ("v7x-8", "wan2.1-t2v-14b", VIDEO_720P),
        ("v5e-8", "wan2.1-t2v-14b", VIDEO_480P),
        ("v6e-8", "wan2.1-i2v-14b-720p", VIDEO_720P),
        ("v6e-8", "wan2.2-t2v-a14b", VIDEO_720P),
        ("v6e-8", "wan2.2-ti2v-5b", {"height": 704, "width": 1280, "num_frames": 121}),
        ("v5e-1", "wan2.1-t2v-1.3b", VIDEO_480P),
        ("v6e-1", "wan2.1-t2v-1.3b", VIDEO_480P),
        *((topology, "hunyuanvideo-1.5-720p-t2v", HUNYUAN_720P) for topology in ("v6e-8", "v6e-16", "v7x-8")),
        *((topology, "hunyuanvideo-1.5-480p-t2v", HUNYUAN_480P) for topology in ("v6e-8", "v5e-8")),
        *((topology, "cogvideox1.5-5b", COGVIDEOX_15) for topology in ("v6e-8", "v7x-8")),
        *((topology, "cogvideox-5b", COGVIDEOX) for topology in ("v6e-1", "v5e-8", "v7x-8")),
        *((topology, "cogvideox-2b", COGVIDEOX) for topology in ("v6e-1", "v5e-8", "v7x-8")),
        ("v6e-1", "ltx-video", LTX),
        ("v5e-1", "sdxl", IMAGE),
    ]
    cases += [(*other, "ours", way, {}) for other in others for way in MODES]
    for other in (wan, others[0], others[2]):
        cases.append((*other, cache_row.EIGHT_BITS, BOUND, {"linear": find_topology(other[0]).chip.narrow}))
    for other in (wan, others[2], ("v6e-8", "hunyuanvideo-1.5-720p-t2v", HUNYUAN_720P)):
        for sparsity in cache_row.SPARSITIES:
            config = {"attention_sparsity": sparsity, "attention_sparse_below": 1000}
            cases.append((*other, cache_row.sparse_variant(sparsity), BOUND, config))
    return [_step(*case) for case in cases]


def _step(topology: str, model: str, size: dict, variant: str, way: str, config: dict) -> Case:
    # JAX's kernel with padded keys not masked, as it is fastest.
    within = AS_THEIRS if config.get("attention") == "splash" else None
    request = request_of(model, topology, arguments=size, config=config, only=DENOISERS, within=within)

    def read(answer, as_run):
        of_mode = answer["by_way"][way or BOUND]
        return {
            "seconds_per_step": of_mode["seconds"]["total"],
            "seconds": of_mode["seconds"],
            "slower": of_mode["slower"],
            "mesh": answer["mesh"],
            "mfu": answer["flops_per_step"] / answer["peak_flops"] / of_mode["seconds"]["total"],
            "hbm_gib_per_chip": answer["hbm_gib_per_chip"],
            "compile_seconds": as_run["compile_seconds"],
            "trace_seconds": as_run["trace_seconds"],
        }

    row = {"topology": topology, "model": model, **size, "variant": variant, "way": way}
    return Case(row, Question(PLANS, request, 1800), read, as_run=True)


NOT_COUNTED = (
    "weights on their way to the chips; the small programs between models (scheduler, guidance), run and compiled"
)


def run_cases() -> list[Case]:
    """A whole run of text encoder, steps and VAE, and a first run, which also traces and compiles them."""
    cases = [
        ("v6e-8", "wan2.1-t2v-14b", VIDEO_720P, 50),
        ("v6e-1", "wan2.1-t2v-1.3b", VIDEO_480P, 50),
        ("v6e-8", "cogvideox1.5-5b", COGVIDEOX_15, 50),
        ("v6e-8", "hunyuanvideo-1.5-720p-t2v", HUNYUAN_720P, 50),
        ("v6e-8", "wan2.1-i2v-14b-720p", VIDEO_720P, 50),
        ("v7x-8", "wan2.1-t2v-14b", VIDEO_720P, 50),
        ("v7x-8", "hunyuanvideo-1.5-720p-t2v", HUNYUAN_720P, 50),
        ("v7x-8", "cogvideox1.5-5b", COGVIDEOX_15, 50),
        ("v6e-4", "flux.1-dev", IMAGE, 28),
        ("v6e-1", "flux.1-dev", IMAGE, 28),
        ("v6e-8", "qwen-image", IMAGE, 50),
        ("v6e-1", "ltx-video", LTX, 20),
        ("v5e-1", "sdxl", IMAGE, 20),
    ]
    return [_run(*case, way) for case in cases for way in MODES]


def _run(topology: str, model: str, size: dict, steps: int, way: str) -> Case:
    request = request_of(model, topology, arguments={**size, "num_inference_steps": steps}, everything=True)

    def read(answer, as_run):
        steps, of_mode = answer["steps"], answer["by_way"][way]
        others = [part for part in answer["parts"] if part["stage"] != "denoise"]
        seconds = {f"{part['component']}.{part['entry']}": part["runs"] * part["seconds"] for part in others}
        seconds["steps"] = steps * of_mode["seconds"]["total"]
        total = seconds["total"] = sum(seconds.values())
        waits = sum(part["runs"] * part["timing"]["slower"]["total"] for part in others) + steps * of_mode["slower"]
        before = as_run["trace_seconds"] + as_run["compile_seconds"]
        return {
            "steps": steps,
            "seconds": seconds,
            "slower": waits,
            "first_run_seconds": total + before,
            "first_run_slower": waits + before,
            "not_counted": NOT_COUNTED,
            "mesh": answer["mesh"],
            "hbm_gib_per_chip": answer["hbm_gib_per_chip"],
            "compile_seconds": as_run["compile_seconds"],
            "trace_seconds": as_run["trace_seconds"],
        }

    row = {"topology": topology, "model": model, **size, "way": way}
    return Case(row, Question(PLANS, request, 3600), read, as_run=True)


def vae_cases() -> list[Case]:
    """One video through each VAE that has a plan; the compiler takes long without one.

    Variants: upstream's module on the TPU path ("ours"), the same with upstream's tiling ("ours, in tiles"), and the module in
    plain JAX ("nnx").
    """
    hunyuan = ("v6e-8", "hunyuanvideo-1.5-720p-t2v", HUNYUAN_720P, "bfloat16")
    on_v6e = [(81, "ours", "decode"), (81, "ours", "encode"), (81, "nnx", "decode")]
    on_v6e += [(49, "ours", entry) for entry in ("decode", "encode")]
    cogvideox = [("v6e-8", *case) for case in on_v6e]
    cogvideox += [("v7x-8", 81, "ours", entry) for entry in ("decode", "encode")]
    # Frames of a guide, which has 4 and 8, and no room for 16; nor is there for 17.
    cogvideox += [("v6e-1", frames, "ours", entry) for frames in (5, 9) for entry in ("decode", "encode")]
    cases = [
        *(
            (topology, "wan2.1-t2v-14b", VIDEO_720P, dtype, variant)
            for topology in ("v6e-8", "v5e-8")
            for dtype in ("bfloat16", "float32")
            for variant in ("ours", "nnx")
        ),
        *(("v7x-8", "wan2.1-t2v-14b", VIDEO_720P, dtype, "ours") for dtype in ("bfloat16", "float32")),
        *((*hunyuan, variant) for variant in ("ours", "ours, in tiles", "nnx")),
        ("v7x-8", *hunyuan[1:], "ours"),
        *(
            (topology, COGVIDEOX_VIDEO_TO_VIDEO, {**COGVIDEOX_15, "num_frames": frames}, "bfloat16", variant, entry)
            for topology, frames, variant, entry in cogvideox
        ),
        ("v6e-1", "ltx-video", LTX, "bfloat16", "ours"),
    ]
    return [_vae(*case) for case in cases]


def _vae(topology: str, model: str, size: dict, dtype: str, variant: str, entry: str = "decode") -> Case:
    if variant == "nnx":
        return nnx_vae(topology, model, size, dtype, entry)
    return torch_vae(topology, model, size, dtype, tiling=variant == "ours, in tiles", entry=entry)


def nnx_vae(topology: str, model: str, size: dict, dtype: str, entry: str = "decode") -> Case:
    """One video through the model's VAE in plain JAX. `size`: height, width and num_frames."""
    request = {"topology": topology, "model": model, "dtype": dtype, "entry": entry, **size}
    row = {"topology": topology, "model": model, **size, "dtype": dtype, "variant": "nnx", "entry": entry}

    def read(answer, as_run):
        return {**answer, "compile_seconds": as_run["compile_seconds"]}

    return Case(row, Question(VAES, request, 1800), read, as_run=True)


def torch_vae(
    topology: str, model: str, arguments: dict, dtype: str, tiling: bool = False, entry: str = "decode"
) -> Case:
    """One call of upstream's VAE on the TPU path. `arguments`: of the pipeline's call."""
    asked = {"arguments": arguments, "everything": True, "only": ["vae"], "tiling": tiling}
    variant = "ours, in tiles" if tiling else "ours"
    row = {"topology": topology, "model": model, **arguments, "dtype": dtype, "variant": variant, "entry": entry}

    def of_entry(answer):
        return next(part for part in answer["parts"] if part["entry"] == entry)

    def read(answer, as_run):
        part = of_entry(answer)
        return {
            "how": part["how"],
            "seconds": part["seconds"],
            "slower": part["timing"] and part["timing"]["slower"]["total"],
            "seconds_by_kind": part["timing"] and part["timing"]["seconds"],
            "hbm_gib": part["hbm_gib"],
            "compile_seconds": of_entry(as_run)["compile_seconds"],
        }

    return Case(row, Question(PLANS, request_of(model, topology, dtype=dtype, **asked), 1800), read, as_run=True)


def calibration_cases() -> list[Case]:
    """Configurations that others measured on hardware: our computed seconds, and their error."""
    return [*(_calibration(published) for published in PUBLISHED), *tokamax_cases.cases()]


def _calibration(published) -> Case:
    if published.attention is not None:
        request = {
            "topology": published.topology,
            "shape": published.attention,
            "kernel": {"online": "exp2"}.get(published.config["attention"], published.config["attention"]),
            "blocks": published.config.get("attention_blocks"),
            "as_theirs": True,
        }
        question = Question(KERNELS, request, 600)
    else:
        asked = {"arguments": published.arguments, "config": {**AS_COMPILED_BY_OTHERS, **published.config}}
        asked |= {"mesh": published.mesh, "only": DENOISERS, "within": AS_THEIRS}
        question = Question(PLANS, request_of(published.model, published.topology, **asked), 1800)

    def read(answer):
        of_step = published.attention is None
        ours = answer["seconds_per_step"]["total"] if of_step else answer["seconds"]
        return {
            "measured_seconds": published.seconds,
            "our_seconds": ours,
            "slower": answer["by_way"][BOUND]["slower"] if of_step else None,
            "error": ours / published.seconds - 1,
            "our_seconds_by_kind": answer.get("seconds_per_step"),
            "source": published.source,
        }

    return Case(published.row, question, read)


def check_cases() -> list[Case]:
    """The check of a module before each call, measured on this machine."""
    models = ("linear-1000", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "hunyuanvideo-1.5-720p-t2v")
    return [Case({"model": model}, None, functools.partial(check_row.answer, model)) for model in models]


def cache_cases() -> list[Case]:
    """Caches, 8-bit linear layers and sparse attention: quality measured on the shipped model, seconds planned for a large one."""
    names = (*cache_row.CACHES, *cache_row.PRODUCTS, *map(cache_row.sparse_variant, cache_row.SPARSITIES))
    return [
        Case({"model": "wan-shapes", "name": name}, None, functools.partial(cache_row.answer, name)) for name in names
    ]


def host_cases() -> list[Case]:
    """Host time of a step, measured on this machine with simulated chips."""
    return [
        Case({"scheduler": scheduler, "chips": chips}, None, functools.partial(host_row.answer, scheduler, chips))
        for scheduler in host_row.SCHEDULERS
        for chips in host_row.CHIPS
    ]


def ready_cases() -> list[Case]:
    """Time from a process's start to its first step, measured on this machine with simulated chips."""
    return [
        Case({"model": "wan-shapes", "name": run}, None, functools.partial(ready_row.answer, run))
        for run in ready_row.RUNS
    ]


def compile_cases() -> list[Case]:
    """Ahead-of-time compilation of a run's programs into an empty store."""
    work = {"model": "wan2.1-t2v-14b", "topology": "v6e-8"}

    def ask() -> dict:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            made = ahead.make(request_of(**work, arguments=VIDEO_720P), Path(folder))
        return {**made, "seconds": time.perf_counter() - start}

    return [Case({**work, **VIDEO_720P}, None, ask)]


def load_cases() -> list[Case]:
    """Loading weights from disk to simulated chips beside `dd`, measured on this machine."""
    return [Case({"chips": chips}, None, functools.partial(load_row.answer, chips)) for chips in (1, 8)]


BENCHES = {
    "attention": attention_cases,
    "gradients": gradient_cases,
    "sweep": sweep_cases,
    "step": step_cases,
    "models": model_cases,
    "train": training_cases,
    "run": run_cases,
    "vae": vae_cases,
    "calibration": calibration_cases,
    "check": check_cases,
    "cache": cache_cases,
    "host": host_cases,
    "compile": compile_cases,
    "ready": ready_cases,
    "load": load_cases,
}


def select(kind: str, filters: dict[str, str]) -> list[Case]:
    """Returns the cases of a bench whose row has these values.

    Raises:
        ValueError: a filter that no row has, or a value that selects no case.
    """
    cases = BENCHES[kind]()
    for name, value in filters.items():
        known = sorted({str(case.row[name]) for case in cases if name in case.row})
        if not known:
            raise ValueError(f"expected a filter that rows of {kind} have ({', '.join(cases[0].row)}), got --{name}")
        if name == "topology":
            value = find_topology(value).name
        cases = [case for case in cases if str(case.row.get(name)) == value]
        if not cases:
            raise ValueError(f"expected --{name} to be one of {', '.join(known)}, got {value!r}")
    return cases
