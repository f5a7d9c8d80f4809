"""Cases of the attention kernels: by shape, by block sizes, and a sweep over all that they should compile for."""

import functools
import itertools
import json
from collections.abc import Callable

from diffusers.tpu.chips.figures import CHIPS, TOPOLOGIES
from diffusers.tpu.kernels.attention.blocks import TUNED, Shape, tuned_key
from diffusers.tpu.kernels.attention.softmax_modes import BOUND, MODES, ONLINE
from diffusers.tpu.planner import Question

from .cases import KERNELS, Case


# name: batch, heads, queries, keys, head size: what one chip computes in one call
ATTENTION_SHAPES = {
    "wan-720p-self": (1, 10, 75600, 75600, 128),
    "wan-480p-self": (1, 10, 32760, 32760, 128),
    "wan-720p-cross": (1, 40, 18900, 512, 128),
    "hunyuanvideo-1.5-720p": (1, 2, 112856, 112856, 128),
    "cogvideox1.5-720p": (1, 12, 45106, 45106, 64),
    "flux-1024": (1, 24, 4608, 4608, 128),
}
IN_ROWS = ("wan-720p-cross", "flux-1024")  # as linear layers give them; the others come from an exchange
GRADIENT_SHAPES = {  # the same, of one step of training
    "wan-480p-33": (1, 12, 14040, 14040, 128),
    "cogvideox-480p": (1, 48, 17776, 17776, 64),
    "flux-1024": ATTENTION_SHAPES["flux-1024"],
}
ATTENTION_PATHS = ("stock", *reversed(MODES))
# Beside JAX's kernel, which is asked as it is fastest: in its best blocks, padded keys not masked.
COMPARED = [name for name, chip in CHIPS.items() if chip.splash_blocks]
SMALLEST = {slice_.chip.generation: name for name, slice_ in reversed(TOPOLOGIES.items())}  # the smallest slice's name


def attention_cases() -> list[Case]:
    """Returns cases by chip, shape and path, with bundles per 1024 x 1024 scores."""
    cases = []
    for chip, shape, path in itertools.product(COMPARED, ATTENTION_SHAPES, ATTENTION_PATHS):
        request = {"topology": SMALLEST[chip], "shape": ATTENTION_SHAPES[shape], "kernel": "kernel"}
        request |= {"turned": shape not in IN_ROWS}
        if path == "stock":
            request |= {"kernel": "splash", "blocks": [*CHIPS[chip].splash_blocks], "as_theirs": True}
        read = dict if path == "stock" else functools.partial(_of_mode, way=path)
        cases.append(Case({"chip": chip, "shape": shape, "path": path}, Question(KERNELS, request, 600), read))
    return cases


def gradient_cases() -> list[Case]:
    """Returns cases of the backward pass by chip, shape and path: our kernel and JAX's, in the units of `attention_cases`.

    JAX's is fastest as one kernel with equal blocks of up to 1,024 tokens; blocks of 2,048 take more bundles.
    """
    cases = []
    for chip, (shape, sizes), path in itertools.product(COMPARED, GRADIENT_SHAPES.items(), ("ours", "stock")):
        request = {"topology": SMALLEST[chip], "shape": sizes, "kernel": "gradients"}
        if path == "stock":
            block = next(n for n in (1024, 768, 512) if -sizes[2] % n < 0.05 * sizes[2])
            request |= {"kernel": "splash gradients", "blocks": [block, block, block // 2], "as_theirs": True}
        cases.append(Case({"chip": chip, "shape": shape, "path": path}, Question(KERNELS, request, 600), dict))
    return cases


def _of_mode(answer: dict, way: str) -> dict:
    """Returns the row of one softmax mode; all modes are in one program."""
    rest = dict(answer)
    return {**rest.pop("by_way")[way], **rest}


def tune(case: Case, on_progress: Callable) -> dict:
    """Returns the best blocks for an attention case as a row of `tuned.json`, by bundles of the compiled programs.

    Values decide a head's softmax mode at run time, so blocks are ranked by the sum over the bounded and the online mode.

    Raises:
        ValueError: a case whose blocks are not tuned.
    """
    chip, shape, path = (case.row[name] for name in ("chip", "shape", "path"))
    if path != BOUND:
        raise ValueError(f"expected a case of path bound to tune, got {path}")
    request = {"topology": SMALLEST[chip], "shape": ATTENTION_SHAPES[shape], "turned": shape not in IN_ROWS}
    sizes = Question("bench.attention_row:sizes_to_try", {**request, "count": 4}, 60)
    tried = sizes.answer(on_progress)
    present = _tuned_rows().get(_tuned_key(case.row))
    tried += [present["blocks"]] if present and present["blocks"] not in tried else []
    rows = []
    for blocks in tried:
        answer = Question(KERNELS, {**request, "kernel": "kernel", "blocks": blocks}, 600).answer(on_progress)
        online = answer["by_way"][ONLINE]["bundles_per_mtile"]
        rows.append({**_of_mode(answer, path), "online_bundles_per_mtile": online})
    best = min(rows, key=lambda row: row["bundles_per_mtile"] + row["online_bundles_per_mtile"])
    kept = ("blocks", "bundles_per_mtile", "online_bundles_per_mtile", "compile_seconds", "versions")
    return {**case.row, **{name: best[name] for name in kept}}


def tuned_table(rows: list[dict]) -> str:
    """Returns the text of `attention/tuned.json` with these rows of `tune`, which replace those of the same chip and shape."""
    table = _tuned_rows()
    for row in rows:
        table[_tuned_key(row)] = row
    lines = (f" {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(table.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _tuned_rows() -> dict[str, dict]:
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def _tuned_key(row: dict) -> str:
    _, _, q_len, kv_len, dim = ATTENTION_SHAPES[row["shape"]]
    return tuned_key(Shape(q_len, kv_len, dim, dim), row["chip"])


# What a sweep compiles: sizes of today's pipelines and odd ones, every head size, VAEs' single wide heads, short and long.
SWEEP_SHAPES = (
    (1, 10, 75600, 75600, 128),
    (1, 40, 18900, 512, 128),
    (1, 2, 112856, 112856, 128),
    (1, 12, 45106, 45106, 64),
    (1, 24, 4608, 4608, 128),
    (2, 10, 4096, 77, 64),
    (2, 8, 4096, 4096, 40),
    (2, 8, 1025, 1025, 80),
    (1, 16, 1000, 300, 72),
    (1, 20, 1500, 1501, 96),
    (1, 8, 8191, 8191, 256),
    (1, 1, 16384, 16384, 512),
    (1, 1, 3600, 3600, 384),
    (1, 2, 1, 7, 128),
    (1, 8, 129, 1, 64),
)
SWEEP_MASKS = ("keys", "keys-bias", "causal", "window", "dense", "bias")
SWEEP_MASKED = (2, 8, 4321, 4321, 128)


def sweep_cases() -> list[Case]:
    """Returns cases, by chip, shape, dtype and mask, that only compile the attention kernel, with all its softmax modes."""
    calls, cases = [*((shape, "none") for shape in SWEEP_SHAPES), *((SWEEP_MASKED, mask) for mask in SWEEP_MASKS)], []
    for chip, (shape, mask), dtype in itertools.product(COMPARED, calls, ("bfloat16", "float32")):
        request = {"topology": SMALLEST[chip], "shape": shape, "kernel": "kernel", "dtype": dtype, "mask": mask}
        row = {"chip": chip, "shape": "x".join(map(str, shape)), "dtype": dtype, "mask": mask}
        question = Question(KERNELS, request, 600, schedules=False)
        cases.append(
            Case(row, question, lambda answer: {name: answer[name] for name in ("compile_seconds", "blocks")})
        )
    return cases
