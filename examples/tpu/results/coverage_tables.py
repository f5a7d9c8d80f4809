"""The tables of coverage.json, which tests/tpu/sweep/run.py makes: what becomes of each pipeline that upstream exports."""

import re


RESULT_LIMIT, DENOISER_LIMIT = 1e-4, 1e-5
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
    denoisers = [one["error"] for one in found["denoisers"].values()]
    return bool(denoisers) and max(denoisers) <= DENOISER_LIMIT and found["error"] > RESULT_LIMIT


def right(found: dict) -> bool:
    return found["error"] <= RESULT_LIMIT or amplified(found)


def counts(record: dict) -> list[str]:
    by_kind = {kind: {n: f for n, f in record.items() if kind_of(n) == kind} for kind in KINDS}
    denoisers = {
        kind: [one for f in found.values() if ran(f) for one in f["denoisers"].values()]
        for kind, found in by_kind.items()
    }

    def row(words: str, count) -> tuple[str, ...]:
        numbers = [count(kind) for kind in KINDS]
        return words, *(str(number) for number in numbers), str(sum(numbers))

    def of(condition):
        return lambda kind: sum(1 for found in by_kind[kind].values() if condition(found))

    halves = {
        kind: [half for f in found.values() for half in f.get("bfloat16", {}).values() if isinstance(half, dict)]
        for kind, found in by_kind.items()
    }
    rows = [
        row("exported by upstream", of(lambda f: True)),
        row("run on eight simulated chips", of(ran)),
        row("planned", of(lambda f: ran(f) and f["status"] == "planned")),
        row("compiled whole, the compiler's plan", of(lambda f: ran(f) and f["status"] == "compiled")),
        row("partly: some models run operation by operation", of(lambda f: ran(f) and f["status"] == "partly")),
        row("result within 1e-4 of upstream", of(lambda f: ran(f) and f["error"] <= RESULT_LIMIT)),
        row("further, the denoiser within 1e-5", of(lambda f: ran(f) and amplified(f))),
        row("denoisers run", lambda kind: len(denoisers[kind])),
        row("denoisers compiled whole", lambda kind: sum(1 for one in denoisers[kind] if not one["eager"])),
        row("denoisers tried in bfloat16", lambda kind: len(halves[kind])),
        row("of those within 1.25 times upstream's own error", lambda kind: sum(1 for half in halves[kind] if half["holds"])),
        row("run upstream, not here", of(lambda f: f["status"] == "not")),
        row("not tried", of(lambda f: f["status"] == "not built")),
    ]  # fmt: skip
    return markdown(("", *KINDS, "all"), rows)


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
        ", ".join(f"{one['error']:.0e}" for one in found["denoisers"].values()),
        ", ".join(f"{half['error']:.0e}, {half['upstream']:.0e}" for half in halves),
        ", ".join(str(number) for number in found["executables"]),
        f"{found['seconds']:.0f}",
        "; ".join(f"{model}: {', '.join(why)}" for model, why in found["eager"].items()).replace("|", "\\|"),
    )


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
