"""The tables of the pages, each made of one record, between `<!-- table: NAME -->` and `<!-- end of table -->`.

    rewritten(page)     a page's text with its tables made from the records

Seconds are a range where both bounds are known (`planner.timing`).
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import coverage_tables
import guides_tables
import loss_tables
import ready_tables
import upstream_tables
from table_words import MODELS, gib, markdown, significant, span, work_of

from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.kernels.attention.softmax_modes import BOUND, MODES, ONLINE


FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
sys.path.append(str(FOLDER.parent))

from bench import attention_cases, tokamax_cases  # noqa: E402


TABLE = re.compile(r"(?<=<!-- table: )(\S+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL)
MARK = re.compile(r"<!-- (?:table: .*|end of table) -->")

SHOWN = (  # on the README, each at its largest size
    "wan2.1-t2v-14b", "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b", "hunyuanvideo-1.5-720p-t2v", "cogvideox1.5-5b", "cogvideox-5b"
)  # fmt: skip
COLUMNS = (("v6e-1", "ours"), ("v6e-8", "ours"), ("v6e-8", "others"), ("v7x-8", "ours"), ("v7x-8", "others"))
PEDIA, FAST_SERVING = "yangwhale/gpu-tpu-pedia", "AI-Hypercomputer/maxdiffusion/pull/479"
MEASURED = {  # by others, the fastest that is public: model, height and slice -> a whole run's seconds by its steps, whose, on GitHub
    ("wan2.1-t2v-14b", 720, "v6e-8"): (122.2 / 40, "MaxDiffusion", FAST_SERVING),  # of Wan 2.2 A14B, which is as large
    ("wan2.1-t2v-14b", 720, "v7x-8"): (105.3 / 40, "MaxDiffusion", FAST_SERVING),
    ("hunyuanvideo-1.5-720p-t2v", 720, "v6e-8"): (5.81, "torchax scripts", PEDIA),
    ("cogvideox1.5-5b", 768, "v6e-8"): (2.13, "torchax scripts", PEDIA),
}
SHAPES = {
    "wan-720p-self": "Wan 720p, self",
    "wan-480p-self": "Wan 480p, self",
    "wan-720p-cross": "Wan 720p, cross",
    "hunyuanvideo-1.5-720p": "HunyuanVideo-1.5 720p",
    "cogvideox1.5-720p": "CogVideoX1.5",
    "flux-1024": "FLUX.1 1024 px",
    "wan-480p-33": "Wan 1.3B, 480p x 33",
    "cogvideox-480p": "CogVideoX 5B, 480p x 49",
}
PROGRAMS = {
    "stock splash": "JAX's splash attention",
    "the compiler's layers": "layers by the compiler",
    "no SparseCores": "exchanges on the core",
    "unrolled, stock": "all three, blocks unrolled",
    "unrolled, online": "the same, online attention to base 2",
    "8 bits": "linear layers in 8 bits",
}


@dataclass(frozen=True)
class Table:
    """A table: `make` returns its lines from the rows of `record`."""

    record: str
    make: Callable[[list[dict]], list[str]]


def rewritten(page: str, folder: Path = FOLDER) -> str:
    """Returns a page's text with new tables.

    Raises:
        ValueError: a mark without its pair, or of an unknown table.
    """
    marks = MARK.findall(page)
    found = TABLE.findall(page)
    if len(marks) != 2 * len(found) or any(mark.startswith("<!-- end") != n % 2 for n, mark in enumerate(marks)):
        raise ValueError(f"expected pairs of marks '<!-- table: NAME -->' and '<!-- end of table -->', got {marks}")
    return TABLE.sub(lambda table: f"{table[1]}{table[2]}{text_of(table[1], folder)}", page)


def text_of(name: str, folder: Path = FOLDER) -> str:
    """Returns the text of a table. Raises ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"expected a table among {', '.join(TABLES)}, got {name}")
    table = TABLES[name]
    return "\n".join(table.make(json.loads((folder / table.record).read_text()))) + "\n"


def pages(root: Path = ROOT) -> list[Path]:
    """Returns the paths of all our pages."""
    folders = (root / "examples" / "tpu", root / "src" / "diffusers" / "tpu")
    return [root / "README_TPU.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))]


def _speed(rows: list[dict]) -> list[str]:
    """Videos on the most common slices, with measurements of others; `_steps` has all rows."""
    found = {
        (row["model"], row["height"], row["topology"], row["way"]): row for row in rows if row["variant"] == "ours"
    }
    slices, lines = {topology for topology, _ in COLUMNS}, []
    for model in SHOWN:
        height = max(of for name, of, topology, _ in found if name == model and topology in slices)
        cells = {}
        for topology in slices:
            if row := found.get((model, height, topology, BOUND)):
                work, most = work_of(row), span(found[model, height, topology, ONLINE]["slower"])
                cells[topology, "ours"] = f"{span(row['seconds_per_step'], row['slower'])} ({most})"
            if of := MEASURED.get((model, height, topology)):
                cells[topology, "others"] = f"{span(of[0])} [{of[1]}](https://github.com/{of[2]})"
        lines.append((work, *(cells.get(column, "") for column in COLUMNS)))
    heads = (topology if whose == "ours" else whose for topology, whose in COLUMNS)
    return markdown(("model and size", *heads), lines)


def _steps(rows: list[dict]) -> list[str]:
    head = ("model and size", "slice", "seconds a step", "attention, layers, other, exchanges")
    lines = []
    for row in rows:
        if row["variant"] == "ours" and row.get("way", BOUND) != BOUND:
            continue
        kinds = (f"{row['seconds'][kind]:.2f}" for kind in ("attention", "matmul", "other", "collectives"))
        figures = (span(row["seconds_per_step"], row.get("slower")), ", ".join(kinds), f"{100 * row['mfu']:.0f}")
        program = None if row["variant"] == "ours" else PROGRAMS.get(row["variant"], row["variant"])
        work = (work_of(row) + (f": {program}" if program else ""), row["topology"])
        took = "" if row["compile_seconds"] is None else f"{row['compile_seconds']:.0f}"
        lines.append((*work, *figures, gib(row), took))
    return markdown((*head, "MFU, %", "GiB a chip", "compilation, s"), lines)


def _models(rows: list[dict]) -> list[str]:
    """A row for each model, a column for each slice."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        ends = (1000 * row[name] for name in ("seconds_per_step", "slower") if row["fits"])
        figure = f"{' to '.join(f'{x:.3g}' for x in ends)} ({100 * row['mfu']:.0f})" if row["fits"] else "no room"
        found.setdefault(row["model"], {})[row["topology"]] = figure
    slices = sorted({row["topology"] for row in rows}, key=lambda name: (name < "v6e", name))
    lines = [(model, *(of.get(name, "") for name in slices)) for model, of in found.items()]
    return markdown(("ms a step (MFU, %)", *slices), lines)


def _train(rows: list[dict]) -> list[str]:
    """Steps of training."""
    head = ("model and size", "trained", "slice", "mesh", "a step", "MFU, %", "GiB a chip")
    lines = []
    for row in rows:
        hbm = row["hbm_gib_per_chip"]
        of = work_of(row), "adapters" if row["train"] == "lora" else "all weights", row["topology"]
        size = f"{hbm['peak']:.1f} of {hbm['limit']:.0f}" + " (no room)" * (not row["fits"])
        mesh = ", ".join(map(str, row["mesh"].values()))
        lines.append((*of, mesh, span(row["seconds_per_step"], row["slower"]), f"{100 * row['mfu']:.0f}", size))
    return markdown(head, lines)


def _run(rows: list[dict]) -> list[str]:
    """A row for each run with all heads bounded, and its seconds with all heads online."""
    head = "model and size | slice | text encoders | steps | VAE | a run | online | compilation | a first run"
    online = {(row["model"], row["topology"]): row for row in rows if row["way"] == MODES[-1]}
    lines = []
    for row in rows:
        if row["way"] != BOUND:
            continue
        seconds, other = row["seconds"], online[row["model"], row["topology"]]
        text = sum(of for part, of in seconds.items() if part.startswith("text_encoder"))
        parts = (span(text), f"{row['steps']} in {span(seconds['steps'])}", span(seconds["vae.decode"]))
        whole = (span(one["seconds"]["total"], one["slower"]) for one in (row, other))
        before = ("", "")  # what was not timed on two quiet cores is left out
        if row["compile_seconds"]:
            before = (span(row["compile_seconds"]), span(row["first_run_seconds"], row["first_run_slower"]))
        lines.append((work_of(row), row["topology"], *parts, *whole, *before))
    return [*markdown(head.split(" | "), lines), "", f"In seconds. Not counted: {rows[0]['not_counted']}."]


def _attention(rows: list[dict]) -> list[str]:
    bundles = {(row["shape"], row["chip"], row["path"]): f"{row['bundles_per_mtile']:.0f}" for row in rows}
    paths = [*MODES, *(path for path in attention_cases.ATTENTION_PATHS if path not in MODES)]
    lines = []
    for shape, (_, heads, queries, keys, dim) in attention_cases.ATTENTION_SHAPES.items():
        words = f"{heads} heads x {queries:,}" + (f", {keys:,} keys" if keys != queries else "")
        words += f", head size {dim}" if dim != 128 else ""
        cells = (", ".join(bundles[shape, chip, path] for path in paths) for chip in attention_cases.COMPARED)
        lines.append((f"{SHAPES[shape]} ({words})", *cells))
    return markdown(("", *(f"{chip}: {', '.join(paths)}" for chip in attention_cases.COMPARED)), lines)


def _gradients(rows: list[dict]) -> list[str]:
    """Bundles of the backward pass beside their lower bound: five matrix products at peak rate."""
    bundles = {(row["shape"], row["chip"], row["path"]): row["bundles_per_mtile"] for row in rows}
    chips = {row["chip"]: None for row in rows}
    lines = []
    for shape in {row["shape"]: None for row in rows}:
        _, heads, queries, _, dim = attention_cases.GRADIENT_SHAPES[shape]
        floors = {chip: 5 * 2 * dim * 2**20 / (CHIPS[chip].flops / CHIPS[chip].clock) for chip in chips}
        cells = (
            f"{bundles[shape, chip, 'ours']:,.0f}, {bundles[shape, chip, 'stock']:,.0f}, {floors[chip]:,.0f}"
            for chip in chips
        )
        lines.append((f"{SHAPES[shape]} ({heads} heads x {queries:,}, head size {dim})", *cells))
    return markdown(("", *(f"{chip}: ours, splash, floor" for chip in chips)), lines)


def _calibration(rows: list[dict]) -> list[str]:
    lines = []
    rows = [row for row in rows if not row["name"].startswith(tokamax_cases.NAMED)]
    for row in rows:
        unit = "a call" if row["model"] == "attention" else "a step"
        ours = significant(row["our_seconds"])
        ours += f" to {significant(row['slower'])}" if row.get("slower") else ""
        measured = f"{significant(row['measured_seconds'])} s {unit}"
        lines.append((row["name"], row["topology"], measured, ours, f"{100 * row['error']:+.1f} %"))
    median = statistics.median(abs(row["error"]) for row in rows)
    head = ("configuration", "slice", "measured by its authors", "our sum", "error")
    return [*markdown(head, lines), "", f"The median of the errors' sizes is {100 * median:.1f} %."]


def _tokamax(rows: list[dict]) -> list[str]:
    """A row for each batch and length, a column for each number and size of heads, and medians of both."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["name"].startswith(tokamax_cases.NAMED):
            *tokens, heads, dim = row["name"].removeprefix(f"{tokamax_cases.NAMED}, ").split(" x ")
            found.setdefault(" x ".join(tokens), {})[f"{heads} x {dim}"] = row

    def cell(row: dict) -> str:
        figures = (f"{1000 * row[name]:.3f}" for name in ("measured_seconds", "our_seconds", "slower"))
        return "{}; {} to {} ({:+.0f} %)".format(*figures, 100 * row["error"])

    def median(rows: list[dict]) -> str:
        return f"{100 * statistics.median(row['error'] for row in rows):+.1f} %"

    columns = [*dict.fromkeys(heads for of in found.values() for heads in of)]
    lines = [
        (tokens, *(cell(of[heads]) if heads in of else "" for heads in columns), median([*of.values()]))
        for tokens, of in found.items()
    ]
    by_heads = [median([of[heads] for of in found.values() if heads in of]) for heads in columns]
    every = [row for of in found.values() for row in of.values()]
    return markdown(("batch x tokens", *columns, "median"), [*lines, ("median", *by_heads, median(every))])


def _vae(rows: list[dict]) -> list[str]:
    head = ("VAE of", "call", "slice", "dtype", "module", "seconds", "GiB of activations a chip")
    lines = []
    for row in rows:
        compiled, held = row["how"] == "compiled", row["hbm_gib"]
        module = {"ours": "upstream's", "ours, in tiles": "upstream's, in tiles", "nnx": "plain JAX"}[row["variant"]]
        seconds = span(row["seconds"], row.get("slower")) if row["seconds"] else "no room"
        seconds += ", modelled" if row["how"] == "modelled" else ""
        took = f"{row['compile_seconds']:.0f}" if compiled and row["compile_seconds"] is not None else ""
        work = (work_of(row), row["entry"], row["topology"], row["dtype"], module)
        lines.append((*work, seconds, f"{held['activations']:.1f}", took))
    return markdown((*head, "compilation, s"), lines)


def _check(rows: list[dict]) -> list[str]:
    head = ("model", "submodules", "tensors", "a look, nothing changed, ms", "a reading, where something has, ms")
    lines = []
    for row in rows:
        sizes = (f"{row['submodules']:,}", f"{row['tensors']:,}")
        times = (f"{row['check_microseconds'] / 1000:.2f}", f"{row['read_milliseconds']:.1f}")
        lines.append((MODELS[row["model"]], *sizes, *times))
    return markdown(head, lines)


def _load(rows: list[dict]) -> list[str]:
    head = ("chips", "seconds", "GB/s", "of dd's", "dd, GB/s", "first, s", "host, MiB")
    lines = []
    for row in rows:
        ours, dd = (row[name] / 1e9 for name in ("bytes_per_second", "dd_bytes_per_second"))
        figures = (f"{x:.2f}" for x in (row["seconds"], ours, row["of_dd"], dd))
        lines.append((str(row["chips"]), *figures, f"{row['first_seconds']:.1f}", f"{row['host_peak_mib']:.0f}"))
    return markdown(head, lines)


def _few(plan: dict) -> list[str]:
    head = "model and size | slice | mesh | steps | a step, s | text encoder and VAE, modelled, s | whole run, s"
    steps, size, step = plan["steps"], plan["call"], plan["by_way"][BOUND]
    others = plan["seconds_total"] - steps * step["seconds"]["total"]
    mesh = ", ".join(map(str, plan["mesh"].values()))
    whole = span(plan["seconds_total"], others + steps * step["slower"])
    work = work_of({"model": plan["model"], **size})
    seconds = (span(step["seconds"]["total"], step["slower"]), span(others), whole)
    return markdown(head.split(" | "), [(work, plan["topology"], mesh, str(steps), *seconds)])


TABLES = {
    "at-size": Table("values-at-size.json", loss_tables.at_size),
    "cache": Table("cache.json", loss_tables.cache),
    "few-steps": Table("plan-wan2.1-t2v-14b-4-steps-v6e-8.json", _few),
    "speed": Table("step.json", _speed),
    "steps": Table("step.json", _steps),
    "eight-bits": Table("step.json", loss_tables.eight_bits),
    "sparse": Table("step.json", loss_tables.sparse),
    "models": Table("models.json", _models),
    "train": Table("train.json", _train),
    "run": Table("run.json", _run),
    "guides": Table("run.json", guides_tables.beside),
    "attention": Table("attention.json", _attention),
    "gradients": Table("gradients.json", _gradients),
    "vae": Table("vae.json", _vae),
    "calibration": Table("calibration.json", _calibration),
    "tokamax": Table("calibration.json", _tokamax),
    "check": Table("check.json", _check),
    "compiled": Table("compile.json", ready_tables.compiled),
    "host": Table("host.json", ready_tables.host),
    "ready": Table("ready.json", ready_tables.ready),
    "until-first-step": Table("compile.json", ready_tables.until_first_step),
    "load": Table("load.json", _load),
    "coverage": Table("coverage.json", coverage_tables.counts),
    "coverage-pipelines": Table("coverage.json", coverage_tables.pipelines),
    "coverage-others": Table("coverage.json", coverage_tables.others),
    "upstream": Table("upstream.json", upstream_tables.counts),
    "upstream-lost": Table("upstream.json", upstream_tables.lost),
}
