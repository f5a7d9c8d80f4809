"""The page: plans of one or several slices (`planner.plan`) as a single HTML file, to read, print or send.

    write(plans, path)     the file, whole or not at all
    page(plans)            its text

It needs nothing but itself: no script, no file beside it, no network. Bars are SVG whose lengths are percentages, so that
they follow the window; a colour means one kind of work or of memory on the whole page. Text that is not `Html` is escaped
where it is put in.
"""

import html
import os
from collections import defaultdict
from pathlib import Path

from . import timing
from .markup import STYLE, Html, bar, joined, legend, percent, table, tag


KINDS = {
    "attention": "attention kernels",
    "matmul": "matrix products",
    "other": "other",
    "collectives": "collectives not hidden",
}
LIMITS = {
    "schedule": "its final schedule at the core's clock",
    "memory": "the bytes it moves at the HBM's bandwidth",
    "estimate": "the compiler's estimate, for want of a schedule",
    "links": "its transfers between chips",
}
HOW = {
    "compiled": "read from the compiled program",
    "modelled": "from the counts of its operations, not compiled",
    "refused": "the compiler found no room for it",
}
STAGES = ("text", "image", "encode", "denoise", "decode")  # in the order of a run
METHOD = (
    "An operation takes the longer of two times, its final schedule at the core's clock and the bytes it moves at the HBM's"
    " bandwidth, or the compiler's estimate if it has no schedule. A step is the sum of its operations and of what it waits"
    " for transfers on the links, and the whole run is the sum of its programs times their runs. The upper end of a range is"
    f" the same sum for {timing.HBM_REACHED:.0%} of the HBM's bandwidth, {timing.LINKS_REACHED:.0%} of the links' and"
    f" {timing.STALLS - 1:.0%} of stalls."
)
WAYS = {
    "bound": "scores of all heads bounded",
    "centred": "bounded around the mean of the keys",
    "online": "not bounded, a running maximum",
}
OPERATIONS, MODULES, LARGEST = 12, 15, 15
SHADES = 4
NONE = "–"


def step_ranges(plan: dict) -> str:
    """Seconds of a step by what the heads of attention do: which of them, the weights and the prompt decide."""
    by_way = {way: f"{of['seconds']['total']:.3f} to {of['slower']:.3f} s" for way, of in plan["by_way"].items()}
    if len(set(by_way.values())) == 1:
        return f"{next(iter(by_way.values()))} per step"
    return "; ".join(f"{seconds} with {WAYS[way]}" for way, seconds in by_way.items())


def write(plans: list[dict], path: Path):
    """Write the page of `plans`, as `diffusers-tpu plan --json` prints them; `path` is replaced when all of it is there."""
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draft.write_text(page(plans), encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def page(plans: list[dict]) -> str:
    """The whole document. With several plans a comparison comes first, then each plan."""
    models = ", ".join(dict.fromkeys(plan["model"] for plan in plans))
    slices = ", ".join(dict.fromkeys(plan["topology"] for plan in plans))
    if len(plans) == 1:
        content = _plan(plans[0], "plan-1", 1)
    else:
        sections = [_plan(plan, f"plan-{number}", 2) for number, plan in enumerate(plans, 1)]
        content = joined(tag("h1", models, tag("span", " on ", class_="soft"), slices), _sweep(plans), *sections)
    head = joined(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{models} on {slices}"),
        tag("style", Html(STYLE)),
    )
    body = tag("body", tag("main", content, _footer(plans)))
    return Html("<!doctype html>\n") + tag("html", tag("head", head), body, lang="en") + "\n"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if 0 < value < 0.0005:
        return "<0.001"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3f}"


def _gib(value: float) -> str:
    return f"{value:.2f} GiB"


def _mesh(mesh: dict) -> str:
    return ", ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def _dotted(name: str) -> Html:
    """A module's name, which may go on in the next line after a dot."""
    return Html(html.escape(name).replace(".", ".<wbr>"))


def _called(part: dict) -> str:
    return f"{part['component']}.{part['entry']}"


# A plan


def _plan(plan: dict, name: str, level: int) -> Html:
    inner = [_headline(plan, level), _memory(plan, level + 1)]
    if plan["advice"]:
        inner += [tag(f"h{level + 1}", "What would fit"), tag("ul", *(tag("li", text) for text in plan["advice"]))]
    inner += [_step(plan, level + 1), _run(plan, level + 1), _meshes(plan, level + 1)]
    if plan["notes"]:
        inner += [tag(f"h{level + 1}", "Notes"), tag("ul", *(tag("li", text) for text in plan["notes"]))]
    return tag("section", *inner, id=name, class_="plan")


def _headline(plan: dict, level: int) -> Html:
    hbm, call = plan["hbm_gib_per_chip"], plan["call"]
    whole, mfu = plan["seconds_total"], plan["mfu"]
    verdict, by_how_much = _verdict(plan)
    minutes = f", {whole / 60:.1f} min" if whole is not None and whole >= 120 else ""
    figures = [
        (verdict, by_how_much, "good" if plan["fits"] else "bad"),
        (_with_unit(plan["seconds_per_step"]["total"]), f"per step, {plan['steps']} steps", None),
        (_with_unit(whole), f"whole {_made(plan)}{minutes}", None),
        (NONE if mfu is None else f"{mfu:.1%}", "MFU, of the bfloat16 peak", None),
        (_gib(hbm["peak"]), f"HBM peak, of {_gib(hbm['limit'])} per chip", None),
    ]
    asked = [f"mesh {_mesh(plan['mesh'])}", plan["dtype"]]
    if "height" in call and "width" in call:
        asked.append(f"{call['width']} × {call['height']}")
    if "num_frames" in call:
        asked.append(f"{call['num_frames']} frames")
    return joined(
        tag(f"h{level}", plan["model"], tag("span", " on ", class_="soft"), plan["topology"]),
        tag("p", " · ".join([plan["pipeline"], *asked]), class_="asked"),
        tag("div", *(tag("div", tag("b", a), tag("span", b), class_=c) for a, b, c in figures), class_="figures"),
        tag("p", f"Compiled for {plan['topology']}; nothing was measured.", class_="soft"),
    )


def _verdict(plan: dict) -> tuple[str, str]:
    """Whether it fits, and by how much."""
    over = plan["hbm_gib_per_chip"]["peak"] - plan["hbm_gib_per_chip"]["limit"]
    if plan["fits"]:
        return "fits", f"{_gib(-over)} per chip are free"
    return "does not fit", f"by {_gib(over)} per chip" if over > 0 else "refused by the compiler"


def _with_unit(seconds: float | None) -> str:
    return NONE if seconds is None else f"{_seconds(seconds)} s"


def _made(plan: dict) -> str:
    """What a run makes, in a word."""
    decoded = [part["shapes"][0] for part in plan["parts"] if part["stage"] == "decode" and part["shapes"]]
    if any(shape[0] > 1 for shape in decoded):
        return "run"
    frames = plan["call"].get("num_frames") or max((s[2] for s in decoded if len(s) == 5), default=1)
    return "video" if frames > 1 else "picture"


def _memory(plan: dict, level: int) -> Html:
    hbm = plan["hbm_gib_per_chip"]
    weights = {
        part["component"]: part["hbm_gib"]["weights"]
        for part in plan["parts"]
        if part["component"] not in plan["waiting"]
    }
    of = f" of {plan['fullest']}"
    items = [
        (f"weights-{min(place, SHADES - 1)}", f"{name} weights", amount)
        for place, (name, amount) in enumerate(sorted(weights.items(), key=lambda item: -item[1]))
    ]
    items += [("activations", f"activations{of}", hbm["activations"]), ("program", "program", hbm["program"])]
    entries = [(colour, name, _gib(amount)) for colour, name, amount in items]
    if hbm["peak"] > hbm["limit"]:
        entries.append(("over", "over the limit", _gib(hbm["peak"] - hbm["limit"])))
    whole = max(hbm["peak"], hbm["limit"])
    at = percent(hbm["limit"], whole)
    words = tag("text", f"limit {_gib(hbm['limit'])}", x=at, y="1em", text_anchor="end")
    return joined(
        tag(f"h{level}", "HBM of a chip ", tag("span", f"{_gib(hbm['peak'])} at its peak", class_="soft")),
        bar([(colour, n, f"{name}: {_gib(n)}") for colour, name, n in items], whole, hbm["limit"]),
        tag("svg", words, class_="axis", aria_hidden="true"),
        legend(entries),
    )


def _step(plan: dict, level: int) -> Html:
    step = plan["seconds_per_step"]
    parts = [part for part in plan["parts"] if part["stage"] == "denoise"]
    inner = [
        tag(f"h{level}", "One step ", tag("span", f"of {plan['steps']}: {_with_unit(step['total'])}", class_="soft"))
    ]
    if step["total"] is None:
        refused = " and ".join(_called(part) for part in parts if part["refused"])
        inner.append(tag("p", f"It has no time: the compiler refused {refused}; what it said is below."))
    else:
        inner += [bar(_kinds(step), step["total"]), _legend_of_kinds(step)]
        inner.append(tag("p", f"{step_ranges(plan)}. Drawn is the first.", class_="soft"))
    timed = [(part, part["runs"] / plan["steps"]) for part in parts if part["timing"]]
    hidden = sum(part["timing"]["hidden_collectives"] * runs for part, runs in timed)
    if hidden:
        inner.append(
            tag("p", f"Further {_with_unit(hidden)} of transfers are hidden behind other work.", class_="soft")
        )
    if timed:
        lists = [_by_operation(timed, level + 1), _by_module(timed, level + 1)]
        inner += [tag("div", *lists, class_="columns"), _kernels(timed, level + 1), _largest(timed, level + 1)]
    return joined(*inner)


def _kinds(step: dict) -> list[tuple[str, float, str]]:
    return [(kind, step[kind], f"{name}: {_with_unit(step[kind])}") for kind, name in KINDS.items()]


def _legend_of_kinds(step: dict) -> Html:
    share = {kind: step[kind] / step["total"] if step["total"] else 0 for kind in KINDS}
    return legend([(kind, name, f"{_with_unit(step[kind])}, {share[kind]:.0%}") for kind, name in KINDS.items()])


def _summed(timed: list[tuple[dict, float]], key: str) -> dict[str, float]:
    """Of all the denoiser's programs, each as often as it runs in a step; largest first."""
    sums = defaultdict(float)
    for part, runs in timed:
        for name, seconds in part["timing"][key].items():
            sums[name] += seconds * runs
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _by_operation(timed: list, level: int) -> Html:
    rows = []
    for name, seconds in _summed(timed, "by_operation").items():
        kind, _, what = name.partition(": ")
        rows.append((joined(what, " ", tag("small", kind)), kind, seconds))
    return tag("div", tag(f"h{level}", "By operation"), _bars(rows, OPERATIONS))


def _by_module(timed: list, level: int) -> Html:
    rows = [(_dotted(name), "plain", seconds) for name, seconds in _summed(timed, "by_module").items()]
    return tag("div", tag(f"h{level}", "By upstream module"), _bars(rows, MODULES))


def _bars(rows: list[tuple], shown: int) -> Html:
    """A list of (name, colour, seconds per step), largest first; what is not shown is summed in a last row."""
    total, rest = sum(seconds for _, _, seconds in rows), rows[shown:]
    longest = max((seconds for _, _, seconds in rows), default=0)
    cells = [
        [
            name,
            bar([(colour, s, f"{1e3 * s:,.3f} ms")], longest),
            f"{1e3 * s:,.2f}",
            f"{s / total if total else 0:.1%}",
        ]
        for name, colour, s in rows[:shown]
    ]
    if rest:
        s = sum(seconds for _, _, seconds in rest)
        name = tag("span", f"{len(rest)} more", class_="soft")
        cells.append([name, "", f"{1e3 * s:,.2f}", f"{s / total if total else 0:.1%}"])
    return table([("", "name"), ("", "wide"), ("ms per step", "n"), ("share", "n")], cells, "bars")


def _operations(timed: list, key: str) -> list[tuple[dict, dict, float]]:
    """(part, operation, its seconds per step), largest first."""
    found = [(part, o, o["seconds"] * runs) for part, runs in timed for o in part["timing"][key]]
    return sorted(found, key=lambda item: -item[2])


def _named(part: dict, operation: dict, timed: list) -> Html:
    """An operation's name, with that of its program if there are several."""
    return joined(operation["name"], " ", tag("small", _called(part)) if len(timed) > 1 else "")


def _kernels(timed: list, level: int) -> Html:
    rows = [
        [
            _named(part, o, timed),
            _dotted(o["module"]),
            f"{o['runs']:,}",
            f"{o['steps']:,} × {o['body']:,}",
            f"{o['steps'] * o['body'] / 1e6:,.2f}",
            f"{1e3 * o['seconds'] / o['runs']:,.3f}",
            _seconds(seconds),
        ]
        for part, o, seconds in _operations(timed, "kernels")
    ]
    if not rows:
        return Html()
    columns = [("kernel", "name"), ("module", "name"), ("runs", "n"), ("grid steps × bundles", "n")]
    columns += [("million bundles", "n"), ("ms per run", "n"), ("s per step", "n")]
    words = "A core issues a bundle a cycle. Every step of the grid runs these; what only some steps run comes on top."
    return joined(tag(f"h{level}", "Kernels"), table(columns, rows), tag("p", words, class_="soft"))


def _largest(timed: list, level: int) -> Html:
    rows = [
        [
            _named(part, o, timed),
            _dotted(o["module"] or NONE),
            joined(tag("i", class_=f"dot {o['kind']}", title=KINDS.get(o["kind"], o["kind"])), o["what"]),
            f"{o['runs']:,}",
            f"{1e3 * o['seconds'] / o['runs']:,.3f}",
            _seconds(seconds),
            tag("span", o["limit"], title=LIMITS.get(o["limit"])),
        ]
        for part, o, seconds in _operations(timed, "largest")[:LARGEST]
    ]
    columns = [("operation", "name"), ("module", "name"), ("what", "name"), ("runs", "n"), ("ms per run", "n")]
    columns += [("s per step", "n"), ("limit", "")]
    words = "; ".join(f"{limit}: {what}" for limit, what in LIMITS.items())
    heading = tag(f"h{level}", "The largest operations, and what their time is")
    return joined(heading, table(columns, rows), tag("p", f"{words}.", class_="soft"))


def _run(plan: dict, level: int) -> Html:
    parts = sorted(plan["parts"], key=lambda p: STAGES.index(p["stage"]) if p["stage"] in STAGES else len(STAGES))
    spent = [None if part["seconds"] is None else part["runs"] * part["seconds"] for part in parts]
    longest = max((seconds for seconds in spent if seconds is not None), default=0)
    columns = [("program", "name"), ("stage", ""), ("how", ""), ("runs", "n"), ("s each", "n"), ("s in all", "n")]
    columns += [("", "wide"), ("weights", "n"), ("activations", "n"), ("peak GiB", "n"), ("compiled in", "n")]
    rows = []
    for part, seconds in zip(parts, spent):
        hbm, compiling = part["hbm_gib"], part["compile_seconds"]
        both = tag("small", "both branches at once") if part["branches"] == 2 else ""
        row = [
            joined(_dotted(_called(part)), " ", both),
            part["stage"],
            tag("span", part["how"], title=HOW.get(part["how"]), class_="bad" if part["refused"] else None),
            f"{part['runs']:,}",
            _seconds(part["seconds"]),
            _seconds(seconds),
            "" if seconds is None else bar([("plain", seconds, f"{_called(part)}: {_with_unit(seconds)}")], longest),
        ]
        row += [f"{hbm[key]:.2f}" for key in ("weights", "activations", "peak")]
        rows.append([*row, NONE if compiling is None else f"{compiling:.1f} s"])
        if part["refused"]:
            rows.append(tag("tr", tag("td", part["refused"]["message"], colspan=len(columns), class_="said")))
    total = f"{_made(plan)}: {_with_unit(plan['seconds_total'])}; the compiler took {plan['compile_seconds']:.0f} s"
    heading = tag(f"h{level}", "The whole run ", tag("span", total, class_="soft"))
    return joined(heading, table(columns, rows), tag("p", "GiB are those of one chip.", class_="soft"))


def _meshes(plan: dict, level: int) -> Html:
    ranking = plan["ranking"]
    if not ranking:
        return Html()
    best = [row["seconds_per_step"] or row["guessed_seconds_per_step"] for row in ranking]
    rows = []
    for row, seconds in zip(ranking, best):
        exact, fits = row["seconds_per_step"] is not None, row["fits"]
        chosen = tag("small", "chosen") if row["mesh"] == plan["mesh"] else ""
        words = f"{'compiled' if exact else 'guessed'}: {_with_unit(seconds)}"
        rows.append(
            [
                joined(_mesh(row["mesh"]), " ", chosen),
                bar([("plain" if exact else "faint", seconds, words)], max(best)),
                _seconds(row["guessed_seconds_per_step"]),
                _seconds(row["seconds_per_step"]),
                NONE if fits is None else "fits" if fits else tag("span", "does not fit", class_="bad"),
            ]
        )
    columns = [("mesh", "name"), ("", "wide"), ("guessed s per step", "n"), ("compiled s per step", "n"), ("", "")]
    return joined(tag(f"h{level}", "Meshes of this slice"), table(columns, rows))


# All plans


def _sweep(plans: list[dict]) -> Html:
    """The plans beside each other: time of a step and memory of a chip, on one scale each."""
    slowest = max((plan["seconds_per_step"]["total"] or 0 for plan in plans), default=0)
    most = max(max(p["hbm_gib_per_chip"]["peak"], p["hbm_gib_per_chip"]["limit"]) for p in plans)
    fitting = [plan for plan in plans if plan["fits"] and plan["seconds_per_step"]["total"] is not None]
    fewest = {key: min(map(key, fitting), default=None) for key in (_per_step, _chip_seconds)}
    rows = []
    for number, plan in enumerate(plans, 1):
        hbm, step = plan["hbm_gib_per_chip"], plan["seconds_per_step"]
        amounts = [("weights-0", "weights"), ("activations", "activations"), ("program", "program")]
        memory = [(colour, hbm[name], f"{name}: {_gib(hbm[name])}") for colour, name in amounts]
        drawn = tag("span", "refused by the compiler", class_="bad")
        if step["total"] is not None:
            drawn = tag("div", bar(_kinds(step), slowest), class_=None if plan["fits"] else "faded")
        numbers = [_seconds(_per_step(plan)), _seconds(_chip_seconds(plan))]
        if plan in fitting:
            numbers = [tag("b", n) if fewest[key] == key(plan) else n for n, key in zip(numbers, fewest)]
        verdict, by_how_much = _verdict(plan)
        rows.append(
            [
                joined(tag("a", plan["topology"], href=f"#plan-{number}"), " ", tag("small", _mesh(plan["mesh"]))),
                tag("span", verdict, title=by_how_much, class_="good" if plan["fits"] else "bad"),
                drawn,
                numbers[0],
                numbers[1],
                _seconds(plan["seconds_total"]),
                NONE if plan["mfu"] is None else f"{plan['mfu']:.1%}",
                bar(memory, most, hbm["limit"]),
                joined(f"{hbm['peak']:.2f} ", tag("small", f"of {hbm['limit']:.2f}")),
            ]
        )
    columns = [("slice", "name"), ("", ""), ("a step", "wide"), ("s per step", "n"), ("chip-s per step", "n")]
    columns += [("s whole run", "n"), ("MFU", "n"), ("HBM of a chip", "wide"), ("GiB", "n")]
    colours = [(kind, name, "") for kind, name in KINDS.items()]
    colours += [("weights-0", "weights", ""), ("activations", "activations", ""), ("program", "program", "")]
    words = "Compiled, not measured. Bold: the least of those that fit. A chip is one device of JAX, of v7x half of a chip."
    return joined(
        table(columns, rows, "sweep"),
        legend([*colours, ("over", "over the limit", "")]),
        tag("p", words, class_="soft"),
    )


def _per_step(plan: dict) -> float | None:
    return plan["seconds_per_step"]["total"]


def _chip_seconds(plan: dict) -> float | None:
    seconds = _per_step(plan)
    return None if seconds is None else plan["chip"]["devices"] * seconds


def _footer(plans: list[dict]) -> Html:
    """What was asked and of what versions, once if all plans have it in common; and how the sum is made."""
    facts: dict[str, dict[str, list[str]]] = {"call": {}, "versions": {}, "dtype": {}}
    for plan in plans:
        call = {"pipeline": plan["pipeline"], "num_inference_steps": plan["steps"], **plan["call"]}
        for fact, values in (("call", call), ("versions", plan["versions"]), ("dtype", {"": plan["dtype"]})):
            words = ", ".join(f"{name} {value}".strip() for name, value in values.items())
            facts[fact].setdefault(words, []).append(plan["topology"])
    entries = []
    for fact, found in facts.items():
        for words, slices in found.items():
            where = "" if len(found) == 1 else f" ({', '.join(dict.fromkeys(slices))})"
            entries += [tag("dt", fact), tag("dd", f"{words}{where}")]
    entries += [tag("dt", "the sum"), tag("dd", METHOD)]
    return tag("footer", tag("dl", *entries))
