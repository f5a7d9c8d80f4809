"""The tables of coverage.json, which examples/tpu/results/sweep/run.py writes: the result of each pipeline that upstream exports."""

import re

from table_words import markdown


RESULT_LIMIT, DENOISER_LIMIT = 1e-4, 1e-5
OWN_FACTOR = 2.0  # the limit of a denoiser, if larger, by the change of upstream's output when its inputs are rounded
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
    """Whether the result is above its limit and all denoisers within theirs: the sampler amplifies roundings."""
    denoisers = found["denoisers"].values()
    return bool(denoisers) and all(map(exact, denoisers)) and found["error"] > RESULT_LIMIT


def exact(denoiser: dict) -> bool:
    """Whether the error is within the limit, or within `OWN_FACTOR` of upstream's own change when its inputs move by a last bit."""
    return denoiser["error"] <= max(DENOISER_LIMIT, OWN_FACTOR * denoiser.get("rounded_inputs", 0.0))


def right(found: dict) -> bool:
    return found["error"] <= RESULT_LIMIT or amplified(found)


def counts(record: dict) -> list[str]:
    """Returns a table with a row for each kind of pipeline."""
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
    """Returns a table of the pipelines that ran.

    Those that are compiled whole and within limits share rows with their largest errors; each other one has its own.
    """
    head = ("", "", "pipelines", "error, at most", "of a denoiser, at most", "what is not compiled, and why")
    groups: dict[tuple, list[str]] = {}
    for name, found in record.items():
        if ran(found):
            whole = not found["eager"] and max(found["error"], *_errors(found)) <= RESULT_LIMIT
            groups.setdefault((KINDS.index(kind_of(name)), found["status"], "" if whole else name), []).append(name)
    rows = []
    for (kind, status, _), names in sorted(groups.items(), key=lambda group: (group[0][2] != "", group[0][:2])):
        errors = [max(record[name]["error"] for name in names), max(max(_errors(record[name])) for name in names)]
        eager = record[names[0]]["eager"].items() if len(names) == 1 else ()
        why = "; ".join(f"{model}: {', '.join(reasons)}" for model, reasons in eager).replace("|", "\\|")
        words = ", ".join(name.removesuffix("Pipeline") for name in names)
        rows.append((KINDS[kind], status, words, *(f"{error:.0e}" for error in errors), why))
    return markdown(head, rows)


def _errors(found: dict) -> list[float]:
    return [0.0, *(one["error"] for one in found["denoisers"].values())]


NOT_TRIED = {  # the reason of a record: in a few words
    r"ImportError|name '\w+' is not defined": "needs a package that is not installed",
    r"expected a tiny model|expected an annotation": "a component of which no tiny form is known",
    r"Required input|missing 1 required|Provide exactly one|are required|cannot be undefined|valid edit JSON": "needs inputs that the sweep does not make",
}


def others(record: dict) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, found in record.items():
        if not ran(found):
            short = next((words for known, words in NOT_TRIED.items() if re.search(known, found["reason"])), None)
            why = (
                "runs upstream, not here" if found["status"] == "not" else short or "upstream stops on tiny components"
            )
            groups.setdefault(why, []).append(name.removesuffix("Pipeline"))
    return markdown(("why", "pipelines"), [(why, ", ".join(names)) for why, names in sorted(groups.items())])
