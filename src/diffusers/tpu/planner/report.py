"""The report: plans of one or several slices (`planner.plan`) as a single HTML file, to read, print or send."""

from collections import Counter

from ..chips.figures import Chip
from . import timing
from .pages import render


STAGES = ("text", "image", "encode", "denoise", "decode")  # in the order of a run
IN_WORDS = {
    "bound": "scores of all heads bounded",
    "centred": "bounded around the mean of the keys",
    "online": "not bounded, a running maximum",
}
SHADES = 4  # of weights


def step_ranges(plan: dict) -> str:
    """Range of a step's seconds for each softmax mode of attention. Weights and prompt determine the mode."""
    by_way = {way: f"{of['seconds']['total']:.3f} to {of['slower']:.3f} s" for way, of in plan["by_way"].items()}
    if len(set(by_way.values())) == 1:
        return f"{next(iter(by_way.values()))} per step"
    return "; ".join(f"{seconds} with {IN_WORDS[way]}" for way, seconds in by_way.items())


def page(plans: list[dict]) -> str:
    """The HTML of plans as `planner.plan` returns them, by `templates/plan.html`; several plans are compared first."""
    models, slices = (", ".join(dict.fromkeys(plan[name] for plan in plans)) for name in ("model", "topology"))
    views = [{**plan, **_view(plan)} for plan in plans]
    fitting = [view for view in views if view["fits"] and view["seconds_per_step"]["total"] is not None]
    for view in views:  # (seconds, whether the least among plans that fit): of a step, and times the chips
        least = [
            view in fitting and cost == min(of["costs"][n] for of in fitting) for n, cost in enumerate(view["costs"])
        ]
        view["marked"] = [*zip(view["costs"], least)]
    return render(
        "plan.html",
        title=f"{models} on {slices}",
        models=models,
        slices=slices,
        plans=views,
        facts=_facts(plans),
        timing=timing,
        stalls=" or ".join(sorted({f"{plan['chip'].get('stalls', Chip.stalls) - 1:.0%}" for plan in plans})),
    )


def _view(plan: dict) -> dict:
    """Values that the page shows of a plan in addition to its fields."""
    step, hbm = plan["seconds_per_step"]["total"], plan["hbm_gib_per_chip"]
    over = hbm["peak"] - hbm["limit"]
    beyond = f"by {over:.2f} GiB per chip" if over > 0 else "refused by the compiler"
    rank = {stage: place for place, stage in enumerate(STAGES)}
    parts = [
        {**part, "spent": None if part["seconds"] is None else part["runs"] * part["seconds"]}
        for part in sorted(plan["parts"], key=lambda part: rank.get(part["stage"], len(rank)))
    ]
    timed = timed_parts(plan)
    by_operation = [(*name.partition(": ")[::-2], seconds) for name, seconds in summed(plan, "by_operation")]
    return {
        "verdict": "fits" if plan["fits"] else "does not fit",
        "by_how_much": f"{-over:.2f} GiB per chip are free" if plan["fits"] else beyond,
        "makes": _makes(plan),
        "ranges": step_ranges(plan) if plan["by_way"] else "",
        "memory": _memory(plan),
        "costs": (step, None if step is None else plan["chip"]["devices"] * step),
        "parts": parts,
        "programs": len(timed),
        "hidden": sum(part["timing"]["hidden_collectives"] * runs for part, runs in timed),
        "by_operation": [(what, kind, kind, seconds) for what, kind, seconds in by_operation],
        "by_module": [(name, "", "plain", seconds) for name, seconds in summed(plan, "by_module")],
        "kernels": _operations(timed, "kernels"),
        "largest": _operations(timed, "largest"),
    }


def _makes(plan: dict) -> str:
    """The word for what one run produces: "run" (several outputs), "video" or "picture"."""
    decoded = [part["shapes"][0] for part in plan["parts"] if part["stage"] == "decode" and part["shapes"]]
    if any(shape[0] > 1 for shape in decoded):
        return "run"
    frames = plan["call"].get("num_frames") or max((s[2] for s in decoded if len(s) == 5), default=1)
    return "video" if frames > 1 else "picture"


def _memory(plan: dict) -> list[tuple[str, str, float]]:
    """(colour, name, GiB) of each share of a chip's memory at its peak."""
    hbm = plan["hbm_gib_per_chip"]
    here = (part for part in plan["parts"] if part["component"] not in plan["waiting"])
    largest = Counter({part["component"]: part["hbm_gib"]["weights"] for part in here}).most_common()
    items = [(f"weights-{min(n, SHADES - 1)}", f"{name} weights", of) for n, (name, of) in enumerate(largest)]
    items.append(("activations", f"activations of {plan['fullest']}", hbm["activations"]))
    items += [("activations", "states of AdamW", hbm["optimizer"])] if "optimizer" in hbm else []
    return [*items, ("program", "program", hbm["program"])]


def timed_parts(plan: dict) -> list[tuple[dict, float]]:
    """The denoiser's programs with computed times, and how often each runs in a step."""
    denoise = (part for part in plan["parts"] if part["stage"] == "denoise" and part.get("timing"))
    return [(part, part["runs"] / plan["steps"]) for part in denoise]


def summed(plan: dict, key: str) -> list[tuple[str, float]]:
    """Seconds of a step by name, "by_module" or "by_operation", of all the denoiser's programs; largest first."""
    sums = Counter()
    for part, runs in timed_parts(plan):
        sums.update({name: seconds * runs for name, seconds in part["timing"][key].items()})
    return sums.most_common()


def _operations(timed: list[tuple[dict, float]], key: str) -> list[tuple[dict, dict, float]]:
    """(part, operation, its seconds per step), largest first."""
    found = [(part, o, o["seconds"] * runs) for part, runs in timed for o in part["timing"][key]]
    return sorted(found, key=lambda item: -item[2])


def _facts(plans: list[dict]) -> list[tuple[str, str, str]]:
    """(fact, words, slices) of the request and the versions; `slices` is empty if all plans agree."""
    facts: dict[str, dict[str, list[str]]] = {"call": {}, "versions": {}, "dtype": {}}
    for plan in plans:
        call = {"pipeline": plan["pipeline"], "num_inference_steps": plan["steps"], **plan["call"]}
        for fact, values in (("call", call), ("versions", plan["versions"]), ("dtype", {"": plan["dtype"]})):
            words = ", ".join(f"{name} {value}".strip() for name, value in values.items())
            facts[fact].setdefault(words, []).append(plan["topology"])
    return [
        (fact, words, "" if len(found) == 1 else ", ".join(dict.fromkeys(slices)))
        for fact, found in facts.items()
        for words, slices in found.items()
    ]
