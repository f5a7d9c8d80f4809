"""Oracle: upstream with the same cache. What its hooks decide and keep from step to step is what they decide and keep there."""

import copy

import numpy as np
import pytest
import torch

import denoisers
import tiny
from conftest import programs_of, relative, slow
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.tpu import TPUConfig, install


STEPS = 5


def pyramid(pipe):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500 if pipe is None else pipe.current_timestep,
    )  # fmt: skip


TAYLOR = {"cache_interval": 2, "disable_cache_before_step": 1, "taylor_factors_dtype": torch.float32}
MAGNITUDES = {"num_inference_steps": STEPS, "threshold": 0.5, "max_skip_steps": 1, "retention_ratio": 0.0}
# How it is enabled, and how many programs stand for its steps.
CACHES = {
    "first block": (lambda pipe: FirstBlockCacheConfig(threshold=0.3), 2),
    "pyramid attention": (pyramid, 2),
    "magnitudes": (lambda pipe: MagCacheConfig(mag_ratios=torch.ones(STEPS), **MAGNITUDES), 2),
    "taylor": (
        lambda pipe: TaylorSeerCacheConfig(**TAYLOR, cache_identifiers=[r"(transformer_)?blocks\.\d+\.attn\d"]), 4
    ),
    "taylor lite": (lambda pipe: TaylorSeerCacheConfig(**TAYLOR, use_lite_mode=True), 4),
}  # fmt: skip


def decisions(transformer, blocks) -> list[bool]:
    """Filled with what upstream's hooks decide: of each call, whether the last block's attention computed anything."""
    found = []
    transformer.register_forward_pre_hook(lambda *given: found.append(False))
    attention = getattr(blocks[-1], "attn1", None) or blocks[-1].attn
    attention.to_q.register_forward_pre_hook(lambda *given: found.__setitem__(-1, True))
    return found


class Session:
    """Two pipelines, the second on the chips, and what they make of the same noise."""

    def __init__(self, mesh, **changes):
        self.pipes = self.theirs, self.ours = tiny.wan(), tiny.wan()
        install(self.ours, TPUConfig(mesh=mesh))
        self.runner = self.ours.transformer._tpu_runner
        steps = {"prompt": None, "output_type": "latent", "num_inference_steps": STEPS}
        embeds = {f"{name}prompt_embeds": torch.randn(1, 12, 32) for name in ("", "negative_")}
        self.inputs = embeds | tiny.arguments("wan", generator=None, **steps, **changes)
        self.decided, self.decides = decisions(self.theirs.transformer, self.theirs.transformer.blocks), False

    def enable(self, config, compiled: bool = True):
        self.decides = compiled
        for pipe in self.pipes:
            pipe.transformer.enable_cache(config(pipe))

    def disable(self):
        self.decides = False
        for pipe in self.pipes:
            pipe.transformer.disable_cache()

    def oracle(self) -> np.ndarray:
        """What upstream gives; ours must be that, by the same decisions."""
        self.decided.clear()
        with torch.no_grad():
            theirs, ours = (np.asarray(pipe(**self.inputs, generator=tiny.fresh()).frames) for pipe in self.pipes)
        assert relative(ours, theirs) < 1e-5
        if self.decides:
            decided = [*self.runner.step_cache.decided][-len(self.decided) :]
            assert [bool(np.asarray(x).all()) for x in decided] == self.decided
        return theirs


@pytest.mark.idiom("caches")
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_enabled_after_a_first_call_and_disabled_again(chips, name):
    session, (config, programs) = Session((1, 1, 1)), CACHES[name]
    plain = session.oracle()
    compiled = programs_of(session.runner)
    session.enable(config)
    for _ in range(2):  # the second video begins with an empty cache, and compiles nothing
        assert relative(session.oracle(), plain) > 1e-4  # the cache does something
        assert programs_of(session.runner) == compiled + programs, [*session.runner.programs]
        assert {*session.decided} == {True, False}
    assert not session.runner.eager
    # What is skipped does not run.
    kinds = {call[3][0] if len(call) == 5 else "": one for (call, *_), one in session.runner.programs.items()}
    texts = {kind: program.compiled.as_text() for kind, program in kinds.items()}
    if name in ("first block", "magnitudes"):
        entry = texts.get("skipped") or texts["later"].partition("\nENTRY")[2]
        assert "while(" not in entry and ("conditional(" in entry) == (name == "first block")
    else:
        products = {kind[-1].runs: text.count(" dot(") for kind, text in texts.items() if kind}
        assert products[False] <= products[True] - 6  # an attention's projections and its two products
    session.disable()
    session.oracle()
    assert programs_of(session.runner) == compiled + programs


@pytest.mark.parametrize("mesh", [(2, 2, 1), slow((2, 4, 1))], ids=str)
def test_each_branch_decides_for_itself(chips, mesh):
    """Guidance branches side by side, where one of them needs its blocks and the other does not; odd sizes, other thresholds."""
    session = Session(mesh, height=48, width=80, guidance_scale=6.0)
    session.inputs["negative_prompt_embeds"] *= 30
    parted = 0
    for threshold in (0.05, 0.12, 0.2):
        session.enable(lambda pipe: FirstBlockCacheConfig(threshold=threshold))
        session.oracle()
        parted += sum(cond != uncond for cond, uncond in zip(session.decided[::2], session.decided[1::2]))
        session.disable()
    assert parted


def test_branches_that_part_run_alone_without_a_mesh_given(chips):
    """Side by side they are on other chips than alone, and so are the tensors that are kept."""
    session = Session(None)
    session.enable(pyramid)
    session.oracle()


def test_ratios_and_thresholds_of_magnitudes_are_the_hosts(chips):
    """Other schedules compile nothing."""
    session, compiled = Session((1, 2, 1)), set()
    for threshold, skips in ((0.5, 2), (0.02, 3), (10.0, 1)):
        given = {"num_inference_steps": STEPS, "threshold": threshold, "max_skip_steps": skips}
        ratios = 1 + 0.02 * torch.randn(STEPS)
        session.enable(lambda pipe: MagCacheConfig(mag_ratios=ratios, **given))
        session.oracle()
        compiled.add(programs_of(session.runner))
        session.disable()
    assert len(compiled) == 1


@pytest.mark.parametrize("cached, skipped", [(r"1", None), (r"\d+", [r"blocks\.0\.attn1"])])
def test_blocks_that_have_other_hooks_run_them(chips, cached, skipped):
    """Of some blocks only, or with other settings."""
    session, names = Session((1, 1, 1)), [rf"blocks\.{cached}\.attn1"]
    identifiers = {"cache_identifiers": names, "skip_predict_identifiers": skipped}
    session.enable(lambda pipe: TaylorSeerCacheConfig(**TAYLOR, **identifiers), compiled=False)
    for _ in range(2):
        session.oracle()
    assert session.runner.step_cache is None


@pytest.mark.slow
def test_calibration_of_magnitudes_reads_values(chips):
    """It runs eagerly and gives upstream's ratios."""
    session = Session((1, 2, 1))
    session.enable(lambda pipe: MagCacheConfig(calibrate=True, num_inference_steps=2 * STEPS), compiled=False)
    session.oracle()
    assert session.runner.step_cache is None


def pair(mesh, name="cogvideox 5b"):
    """CogVideoX's transformer twice, the second on the chips, and inputs of a call; or that of another `name`."""
    theirs = denoisers.built(name)
    ours = copy.deepcopy(theirs)
    install(ours, TPUConfig(mesh=mesh))
    return theirs, ours, denoisers.inputs(name, 2)


def stepped(models, given, scale: float) -> float:
    """The difference of both after this step, whose latents are some other."""
    given["hidden_states"] = given["hidden_states"] + scale * torch.randn_like(given["hidden_states"])
    answers = []
    for model in models:
        with torch.no_grad(), model.cache_context("cond"):
            answers.append(model(**given)[0])
    return relative(answers[1], answers[0])


@pytest.mark.slow
def test_a_cache_goes_on_where_no_program_stands_for_a_step(chips):
    """A hook that asks for values comes between two steps: upstream's hooks themselves go on from what programs have kept."""
    theirs, ours, given = pair((1, 2, 1))
    for model in (theirs, ours):
        model.enable_cache(CACHES["taylor"][0](None))
    for step in range(STEPS):
        if step == 3:  # what the step before it computed is kept
            assert programs_of(ours._tpu_runner) and not ours._tpu_runner.eager
            for model in (theirs, ours):
                model.norm_out.register_forward_hook(lambda module, given, output: float(output.mean()) and None)
        assert stepped((theirs, ours), given, 0.2) < 1e-5, step
    assert ours._tpu_runner.eager


def test_a_block_in_two_places_keeps_its_weights(chips):
    """TaylorSeer's counts of its calls are no program's, so that they run line by line, with the chips' weights in its place."""
    theirs, ours, given = pair((1, 2, 1))
    for model in (theirs, ours):
        model.enable_cache(CACHES["taylor"][0](None))
        model.transformer_blocks[1] = model.transformer_blocks[0]
    for _ in range(2):
        assert stepped((theirs, ours), given, 0.2) < 1e-5
        assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in ours.parameters())
    assert ours._tpu_runner.modes.reasons()


@pytest.mark.parametrize("name", CACHES)
def test_a_model_by_itself_that_hands_two_streams_on(chips, name):
    """CogVideoX: both branches in one batch, latents and text from block to block, no pipeline around.

    Nothing but the cache knows where the second video begins: its first step may not reuse what the first one's last step left.
    """
    theirs, ours, given = pair((2, 2, 1))
    decided, (config, programs) = decisions(theirs, theirs.transformer_blocks), CACHES[name]
    config = config(None)
    for model in (theirs, ours):
        model.enable_cache(config)
    for step in range(2 * STEPS):
        if step == 2:  # a call that fails has not been
            for model in (theirs, ours):
                with pytest.raises(Exception), model.cache_context("cond"):  # noqa: B017
                    model(**{**given, "hidden_states": given["hidden_states"][:, :, :1]})
            decided[:] = decided[:step]
        assert stepped((theirs, ours), given, 0.4 if step % STEPS == 3 else 0.02) < 1e-5
    runner = ours._tpu_runner
    assert [bool(np.asarray(x).all()) for x in runner.step_cache.decided] == decided and len({*decided}) == 2
    assert programs_of(runner) == programs and not runner.eager


@pytest.mark.parametrize(
    "config", [FirstBlockCacheConfig(threshold=0.3), TaylorSeerCacheConfig(**TAYLOR)], ids=("first block", "taylor")
)
def test_single_blocks_that_compute_both_streams_at_once(chips, config):
    """FLUX, whose blocks return the text before the latents."""
    theirs, ours, given = pair((1, 2, 1), "flux joined")
    computed = decisions(theirs, theirs.single_transformer_blocks)
    for model in (theirs, ours):
        model.enable_cache(config)
    for step in range(STEPS):
        assert stepped((theirs, ours), given, 0.02) < 1e-5
    assert {*computed} == {True, False} and not ours._tpu_runner.eager


def test_what_is_added_between_blocks_is_added_where_a_cache_skips_them(chips):
    """VACE's hints: no program does both, upstream's hooks run."""
    theirs, ours = tiny.wan_vace(), install(tiny.wan_vace())
    given, results = tiny.arguments("wan_vace", output_type="latent"), []
    for pipe in (theirs, ours):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
        results.append(np.asarray(pipe(**given | {"generator": tiny.fresh()}).frames))
    assert relative(*results[::-1]) < 1e-5
