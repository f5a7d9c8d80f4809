"""The tables of coverage.json, which tests/tpu/sweep/run.py makes: what becomes of each pipeline that upstream exports."""

import re


RESULT_LIMIT, DENOISER_LIMIT = 1e-4, 1e-5
OWN_FACTOR = 2.0  # of how far upstream's own answer goes when its inputs are rounded, where that is past the limit
KINDS = ("video", "image", "audio")
VIDEO = re.compile(
    r"Video|Wan|LTX|AnimateDiff|CogVideo|SkyReels|Helios|Mochi|Latte|PIA|Lucy|Chrono|AnyFlow|ToWorld|Allegro|Cosmos2_5|Cosmos3|I2V|T2V|TI2VA"
)
AUDIO = re.compile(r"Audio|Music|Dance|AceStep|Spectrogram|Echo")


def kind_of(name: str) -> str:
    return "audio" if AUDIO.search(name) else "video" if VIDEO.search(name) else "image"


def ran(found: dict) -> bool:
    return "error" in found


def amplified(found: dict) -> bool:
    """Past the limit of a result, every denoiser within its own: the sampler amplifies what is rounded."""
    denoisers = found["denoisers"].values()
    return bool(denoisers) and all(map(exact, denoisers)) and found["error"] > RESULT_LIMIT


def exact(denoiser: dict) -> bool:
    """Within the limit, or no further than upstream's own answer goes when its inputs are moved by a last bit."""
    return denoiser["error"] <= max(DENOISER_LIMIT, OWN_FACTOR * denoiser.get("rounded_inputs", 0.0))


def right(found: dict) -> bool:
    return found["error"] <= RESULT_LIMIT or amplified(found)


def counts(record: dict) -> list[str]:
    """A row for each kind of pipeline."""
    columns = {
        "pipelines tried": lambda f: f["status"] != "not built",
        "run": ran,
        "planned": lambda f: ran(f) and f["status"] == "planned",
        "compiled whole, the compiler's plan": lambda f: ran(f) and f["status"] == "compiled",
        "partly": lambda f: ran(f) and f["status"] == "partly",
        "result within 1e-4": lambda f: ran(f) and f["error"] <= RESULT_LIMIT,
        "further, as roundings are amplified": lambda f: ran(f) and amplified(f),
        "run upstream alone": lambda f: f["status"] == "not",
    }
    rows = []
    for words, kinds in (*((kind, (kind,)) for kind in KINDS), ("all", KINDS)):
        found = [f for name, f in record.items() if kind_of(name) in kinds]
        denoisers = [one for f in found if ran(f) for one in f["denoisers"].values()]
        whole = f"{sum(1 for one in denoisers if not one['eager'])} of {len(denoisers)}"
        rows.append((words, *(str(sum(1 for f in found if is_so(f))) for is_so in columns.values()), whole))
    return markdown(("", *columns, "denoisers compiled whole"), rows)


def pipelines(record: dict) -> list[str]:
    head = (
        "pipeline",
        "is",
        "error",
        "denoisers",
        "in bfloat16, upstream's own",
        "programs",
        "s",
        "what is not compiled, and why",
    )
    rows = [
        line(name, found) for kind in KINDS for name, found in record.items() if ran(found) and kind_of(name) == kind
    ]
    return markdown(head, rows)


def line(name: str, found: dict) -> tuple[str, ...]:
    halves = [half for half in found.get("bfloat16", {}).values() if isinstance(half, dict)]
    return (
        f"{name.removesuffix('Pipeline')} ({kind_of(name)})",
        found["status"],
        f"{found['error']:.0e}",
        ", ".join(error_of(one) for one in found["denoisers"].values()),
        ", ".join(f"{half['error']:.0e}, {half['upstream']:.0e}" for half in halves),
        ", ".join(str(number) for number in found["executables"]),
        f"{found['seconds']:.0f}",
        "; ".join(f"{model}: {', '.join(why)}" for model, why in found["eager"].items()).replace("|", "\\|"),
    )


def error_of(denoiser: dict) -> str:
    own = denoiser.get("rounded_inputs", 0.0)
    return f"{denoiser['error']:.0e}" + (f" (inputs rounded: {own:.0e})" if own > DENOISER_LIMIT else "")


def others(record: dict) -> list[str]:
    rows = [
        (name.removesuffix("Pipeline"), "runs upstream, not here" if found["status"] == "not" else "not tried", found["reason"].replace("|", "\\|"))
        for name, found in record.items() if not ran(found)
    ]  # fmt: skip
    return markdown(("pipeline", "", "why"), rows)


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    first, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *rows))
    return [first, "|" + "---|" * len(head), *rest]
