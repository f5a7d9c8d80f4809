"""The texts of a plan: notes on its figures, and suggestions if it does not fit."""

from ..chips.figures import GIB, TOPOLOGIES
from ..pipelines.plans import module_plan
from .runs import PlannedRun


TRIED_SLICES = 2


def notes(run: PlannedRun) -> list[str]:
    """Caveats to a plan's figures."""
    said, modules = [], run.recording.modules
    for name in sorted({part.name for part in run.parts if not part.compiled and not part.refused}):
        said.append(
            f"{name} is modelled from its operations: what is not the denoiser is compiled with --everything only"
            " (a VAE takes the compiler minutes)"
        )
    if sum(run.weights.values()) > run.room:
        said.append(
            f"the weights of {', '.join(run.weights)} are more than the {run.room / GIB:.2f} GiB of a chip that"
            " activations and programs leave them (TPUConfig.reserve_gib): those whose turn it is not wait on the host"
        )
    for component in dict.fromkeys(part.component for part in run.parts):
        if remark := module_plan(modules[component]).remark:
            said.append(f"{component}: {remark}")
    _, sp, tp = run.mesh
    for part in run.denoise:
        plan = module_plan(modules[part.component])
        heads = sorted({n for _, n, t, s, _ in part.recorded.work.calls if t == s})
        if sp > 1 and any(n // tp % sp for n in heads) and plan.activation_spec:
            said.append(
                f"{part.component}: {', '.join(map(str, heads))} heads do not divide by sp {sp}, so keys"
                " travel around a ring of chips; a mesh whose sp divides them exchanges less"
            )
        if not plan.parallel and run.topology.devices > 1:
            said.append(
                f"{part.component} has no plan and no run of equal blocks: the compiler alone decides how chips share its work"
            )
    return [*dict.fromkeys(said)]


def what_would_fit(planner, run: PlannedRun) -> list[str]:
    """Suggestions, each with its figure. The first is the smallest slice that fits, compiled by `planner`, a `worker.Planner`."""
    hbm, (fullest, held) = run.hbm, run.at_peak
    found = list(filter(None, [_smallest_slice(planner, run)]))
    texts = sum(size for name, size in held.items() if name.startswith("text_encoder"))
    if texts and texts >= (hbm["peak"] - hbm["limit"]) * GIB:
        found.append(
            f"compute the prompt's embeddings apart and load with text_encoder=None: {texts / GIB:.2f} GiB per chip less"
        )
    room = hbm["limit"] - hbm["weights"] - hbm["program"]
    if room > 0:
        vae = run.recording.modules.get("vae")
        if fullest.stage in ("decode", "encode") and not getattr(vae, "use_tiling", True):
            found.append("let the VAE work in tiles, pipe.vae.enable_tiling(): its activations are the largest part")
        found.append(
            f"ask for less at once: {fullest.name} needs {hbm['activations']:.2f} GiB beside the weights and {room:.2f} are"
            f" left, so about {room / hbm['activations']:.0%} of the frames or pixels"
        )
    if planner.request["dtype"] == "float32":
        found.append("use bfloat16 (--dtype bfloat16): half the weights")
    return found


def _smallest_slice(planner, run: PlannedRun) -> str | None:
    """The smallest slice that the run fits, this generation's first; at most `TRIED_SLICES` candidates are compiled to check.

    None if none of these fits, or if the plan has no denoiser (a VAE or a text encoder alone).
    """
    if not run.denoise:
        return None
    modules, here = run.recording.modules, run.topology
    weights = sum(w.nbytes for name in {part.component for part in run.parts} for w in modules[name].parameters())
    activations = max(part.activations for part in run.parts)
    parallel = module_plan(modules[run.denoise[0].component]).parallel
    others = sorted(
        (t for t in TOPOLOGIES.values() if t.name != here.name),
        key=lambda t: (t.chip.generation != here.chip.generation, t.devices),
    )
    needs = ((t, weights / t.devices + activations * (here.devices / t.devices if parallel else 1)) for t in others)
    candidates = [topology for topology, need in needs if need <= topology.chip.hbm_bytes]
    for topology in candidates[:TRIED_SLICES]:
        other = planner.plan_on(topology, planner.default_mesh(topology))
        if other.fits:
            return (
                f"use {topology.name}: {other.hbm['peak']:.2f} of {other.hbm['limit']:.2f} GiB per chip, "
                f"{other.seconds_per_step:.2f} s per step (compiled, mesh {','.join(map(str, other.mesh))})"
            )
    return None
