"""Oracle: the same model traced and compiled here; counted traces. Another process is a model and a runner of their own."""

import contextlib
import copy
import functools
import os
import re
import time
import types

import jax
import pytest
import torch
from jax import export

import diffusers.tpu
import test_ladder
import tiny
from conftest import relative, run_python
from diffusers.models.transformers import transformer_wan
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.common import notices
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compile import executables
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.compile.store import disk_cache
from diffusers.tpu.compile.store.disk_cache import DiskCache
from diffusers.tpu.pipelines.plans import module_plan
from diffusers.tpu.planner import aot
from diffusers.tpu.planner.building import build, configuration_of


@pytest.fixture
def store(own_store) -> DiskCache:
    notices._said.clear()
    return DiskCache("executables", own_store)


@contextlib.contextmanager
def running(model, plan: ModelPlan, mesh, config: TPUConfig = TPUConfig()):
    """The model's runner, as in a process of its own."""
    executables._loaded.clear()
    runner = CompiledModule(model, plan, mesh, config)
    runner.attach()
    yield runner
    runner.detach()


@pytest.fixture
def run(make_mesh, store):
    """A function: the answer of a block of a tiny Wan (`whole`: of its transformer) as of a process of its own, and its runner."""
    with contextlib.ExitStack() as attached, torch.no_grad():

        def answer(seed=0, change=lambda model: None, size=2, mesh=(1, 4, 1), config=TPUConfig(), whole=False):
            model = tiny.wan_transformer(seed=seed, num_layers=2) if whole else tiny.wan_block(seed=seed)
            given = inputs(size) if whole else block_inputs(size)
            change(model)
            want = model(**given)[0]
            runner = attached.enter_context(running(model, module_plan(model), make_mesh(*mesh), config))
            got = model(**given)[0]
            assert relative(got, want) < 1e-5
            return got, runner

        yield answer


def inputs(frames):
    generator = torch.Generator().manual_seed(frames)
    return {
        "hidden_states": torch.randn(1, 16, frames, 4, 6, generator=generator), "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 5, 32, generator=generator), "return_dict": False,
    }  # fmt: skip


def block_inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    sizes = {"hidden_states": tokens, "encoder_hidden_states": 5, "temb": 6}
    return {name: torch.randn(1, n, 8, generator=generator) for name, n in sizes.items()} | {"rotary_emb": None}


def test_another_process_traces_nothing_and_answers_the_same(run, store):
    run = functools.partial(run, whole=True)
    (first, one), (second, other) = run(), run()
    assert (one.traces, one.compilations) == (1, 1)
    assert (other.traces, other.compilations) == (0, 0)
    assert torch.equal(first, second)
    assert run(seed=1)[1].traces == 0  # other weights are other arguments
    assert run(size=3)[1].traces == 1  # another size
    assert run(size=3)[1].traces == run()[1].traces == 0 and len([*store.folder.iterdir()]) == 2


def test_two_experts_that_are_looked_for_at_once_share_one_executable(make_mesh, store, monkeypatch):
    models = [tiny.wan_transformer(seed=seed, num_layers=2) for seed in range(2)]
    load, loads = executables.serialize_executable.deserialize_and_load, []

    def slowly(*given):
        loads.append(given)
        time.sleep(0.2)
        return load(*given)

    monkeypatch.setattr(executables.serialize_executable, "deserialize_and_load", slowly)
    with running(models[0], module_plan(models[0]), make_mesh(1, 4, 1)), torch.no_grad():
        models[0](**inputs(2))
    with contextlib.ExitStack() as attached, torch.no_grad():
        runners = [attached.enter_context(running(m, module_plan(m), make_mesh(1, 4, 1))) for m in models]
        for runner in runners:
            runner.executables.expect()
        for model in models:
            model(**inputs(2))
        assert len(loads) == 1 and not sum(runner.traces for runner in runners)


@pytest.mark.parametrize("training, programs", [(True, 1), (False, 2)])
def test_another_process_goes_back_by_the_same_programs(make_mesh, store, training, programs):
    """In evaluation mode the forward pass has a program of its own."""

    def gradients() -> tuple[list[torch.Tensor], int]:
        block, given = tiny.wan_block().train(training).requires_grad_(False), block_inputs(2)
        asked = [given["hidden_states"], block.attn1.to_q.weight, block.ffn.net[2].bias]
        for tensor in asked:
            tensor.requires_grad_()
        with running(block, module_plan(block), make_mesh(1, 2, 1)) as runner:
            return [*torch.autograd.grad(block(**given).square().sum(), asked)], runner.traces

    (first, traced), (second, again) = gradients(), gradients()
    assert (traced, again) == (programs, 0) and all(map(torch.equal, first, second))


CHANGES = {
    "a number of a part": lambda block: setattr(block.norm2, "eps", 0.5),
    "a setting of the user's": lambda block: setattr(block.attn1, "theta_of_mine", 3.0),
    "a part replaced": lambda block: setattr(block.ffn.net[0], "approximate", "none"),
    "eval and train": lambda block: block.train(),
}


def test_another_state_is_another_program(run):
    run()
    for name, change in CHANGES.items():
        assert run(change=change)[1].traces == 1, name
        assert run(change=change)[1].traces == 0, name
    assert run()[1].traces == 0


@pytest.mark.fault("executable-foreign")
def test_what_is_of_another_run_is_not_used_and_its_parts_are_named(run, monkeypatch, caplog):
    """One line of a component, in words: a warning where its executable was made ahead, as somebody can make it again."""
    run()

    def refused(part, level="INFO", **asked):
        caplog.clear()
        with caplog.at_level("INFO", "diffusers"):
            _, runner = run(**asked)
            assert runner.traces == 1
            if level == "WARNING":
                runner.module(**block_inputs(3))  # nothing is said of a second size
        (record,) = [record for record in caplog.records if "differs in" in record.getMessage()]
        assert record.levelname == level
        assert f"differs in {part}" in record.getMessage() and not re.search("[0-9a-f]{8}", record.getMessage())

    refused("the chips or their mesh", mesh=(1, 2, 1))
    refused("TPUConfig", config=TPUConfig(convolution_precision="highest"))
    refused("TPUConfig", config=TPUConfig(matmul_precision="high"))
    refused("the model's attributes, hooks", change=CHANGES["eval and train"])
    with monkeypatch.context() as patch:
        patch.setattr(executables, "our_words", lambda: "others")
        refused("the code of diffusers or transformers")
    with monkeypatch.context() as patch:
        patch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=4096")
        refused("flags of the compiler")
    keep, versions = DiskCache.keep, executables._versions()
    monkeypatch.setattr(DiskCache, "keep", lambda *args, **_: keep(*args, ahead=True))
    run(mesh=(1, 1, 1))
    monkeypatch.setattr(executables, "_versions", lambda: f"{versions}, jax 0.0.1")
    refused(f"versions (jax {jax.__version__} there, 0.0.1 here)", "WARNING", mesh=(1, 1, 1))


ON_A_TPU_HOST = """
import glob, os, sys
found = glob.glob
glob.glob = lambda pattern, **kwargs: [sys.argv[1]] if pattern.startswith("/sys/bus/pci") else found(pattern, **kwargs)
import jax
print(os.environ["LIBTPU_INIT_ARGS"])
"""


def flags_of_a_child(argument, progress):
    """Runs in a process of `aot.run_in_child`."""
    return {"flags": os.environ["LIBTPU_INIT_ARGS"]}


@pytest.mark.slow
def test_what_jax_tells_libtpu_on_a_tpu_host_is_told_by_compile_and_is_no_part_of_the_key(monkeypatch, tmp_path):
    """The host is a stub of its PCI bus."""
    (tmp_path / "vendor").write_text("0x1ae0\n")
    (tmp_path / "device").write_text("0x006f\n")
    given = "--xla_tpu_scoped_vmem_limit_kib=4096"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    on_the_host = run_python("-c", ON_A_TPU_HOST, tmp_path / "vendor").stdout.split()
    assert len(on_the_host) > 1
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    made = aot.run_in_child(f"{__name__}:flags_of_a_child", {}, seconds=120, schedules=False)
    assert made["flags"].split() == on_the_host
    elsewhere = executables._flags()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(on_the_host))
    assert executables._flags() == elsewhere and given in elsewhere


def own_processor(block, monkeypatch):
    theirs = type(block.attn1.processor)
    call = {"__call__": lambda self, *args, **kwargs: 2 * theirs.__call__(self, *args, **kwargs)}
    block.attn1.processor = type("Mine", (theirs,), call)()


def own_forward(block, monkeypatch):
    norm = block.norm3
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, norm)


def own_function(block, monkeypatch):
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, **kwargs: gelu(x, **kwargs) * 2)


def own_object(block, monkeypatch):
    theirs = transformer_wan.dispatch_attention_fn

    class Twice:
        def __call__(self, *args, **kwargs):
            return 2 * theirs(*args, **kwargs)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", Twice())


def test_code_of_a_script_is_never_anothers(run, store, monkeypatch):
    """Its values are right, and no other process finds what was made of it, nor it what others made."""
    run()
    kept = {*store.folder.iterdir()}
    for change in (own_processor, own_forward, own_function, own_object):
        with monkeypatch.context() as patch:
            _, runner = run(change=lambda block: change(block, patch))
        assert runner.traces == 1 and "no library's" in (runner.executables.reason or ""), change
        assert {*store.folder.iterdir()} == kept, change


@pytest.mark.fault("executable-corrupt")
def test_a_damaged_file_is_said_removed_and_made_anew(run, store, warned):
    run(), run(size=3)
    path, other = sorted(store.folder.iterdir())
    raw = path.read_bytes()
    damages = {
        "cut": raw[: len(raw) // 2],
        "flipped": raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
        "another's": other.read_bytes(),
        "of another format": b"\x80\x04",
    }
    for name, damaged in damages.items():
        path.write_bytes(damaged)
        notices._said.clear()
        warned.clear()
        assert run()[1].traces + run(size=3)[1].traces == 1, name
        assert any("is damaged" in said and path.name in said for said in warned), name
    assert run()[1].traces + run(size=3)[1].traces == 0


@pytest.mark.fault("executable-refused")
def test_a_runtime_that_refuses_an_executable_gets_it_compiled(run, monkeypatch, warned):
    run()

    def refused(*args):
        raise RuntimeError("built for another machine")

    with monkeypatch.context() as patch:
        patch.setattr(executables.serialize_executable, "deserialize_and_load", refused)
        assert run()[1].traces == 1
    assert any("built for another machine" in said for said in warned)
    assert run()[1].traces == 0


@pytest.mark.fault("executables-unwritable")
def test_a_folder_that_cannot_be_written_to_is_said_once(run, store, warned):
    store.folder.parent.mkdir()
    store.folder.write_text("a file")
    run(), run(size=3)
    (said,) = (said for said in warned if "are not kept for the next run" in said)
    assert "DIFFUSERS_TPU_CACHE" in said


def test_the_longest_unused_go(store, monkeypatch):
    store.keep("first", 1)
    monkeypatch.setattr(disk_cache, "MOST_BYTES", int((store.folder / "first").stat().st_size * 2.5))
    os.utime(store.folder / "first", (1, 1))
    store.keep("second", 2)
    assert store.find("first") == 1  # used now
    os.utime(store.folder / "second", (2, 2))
    store.keep("third", 3)
    assert {path.name for path in store.folder.iterdir()} == {"first", "third"}


def test_questions_lead_to_the_program_of_their_answers(make_mesh, store, monkeypatch):
    """Mochi asks for its prompts' lengths: each answer's program is found without a trace."""
    model, keep, kept = test_ladder.mochi(), DiskCache.keep, []

    def noting(store, name, value, *more, **facts):
        kept.extend([value] if isinstance(value, bridge.Guard) else [])
        return keep(store, name, value, *more, **facts)

    monkeypatch.setattr(DiskCache, "keep", noting)

    def traces(*lengths):
        ours = copy.deepcopy(model)
        with running(ours, ModelPlan(), make_mesh(1, 1, 1)) as runner:
            for length in lengths:
                given = test_ladder.mochi_inputs(model, test_ladder.first(length))
                assert relative(ours(**given)[0].detach(), model(**given)[0].detach()) < 1e-5
        return runner.traces

    assert [traces(3), traces(3), traces(4), traces(4), traces(3, 4)] == [1, 0, 1, 0, 0]
    for question in kept:  # asked on a chip where JAX_PLATFORMS=tpu
        function = export.deserialize(bytearray(question.compute))
        jax.jit(function.call).trace(*function.in_avals).lower(lowering_platforms=("tpu",))
    assert kept


@pytest.mark.parametrize("name", ["wan", "hunyuan15_i2v", "cogvideox"])
def test_a_model_without_weights_has_the_words_of_the_one_that_is_loaded(make_mesh, tmp_path, name):
    """So that a run finds what `compile` made: everything of the key but the call."""
    tiny.make(name).save_pretrained(tmp_path)
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    built = build(configuration_of(str(tmp_path)), torch.bfloat16)
    diffusers.tpu.uninstall(loaded)
    assert type(built) is type(loaded)
    for component in [n for n, part in built.components.items() if isinstance(part, torch.nn.Module)]:
        assert all(p.untyped_storage().nbytes() <= 8 for p in getattr(built, component).parameters())
        words = []
        for pipe in (loaded, built):
            module = getattr(pipe, component)
            with running(module, module_plan(module), make_mesh(1, 2, 1)) as runner:
                runner.current()
                words.append(executables.module_words(runner))
        differing = {part: [w[part][:300] for w in words] for part in words[0] if words[0][part] != words[1][part]}
        assert not differing, (component, differing)
