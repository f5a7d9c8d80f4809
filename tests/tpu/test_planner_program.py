"""Oracles: programs counted by hand. The compiler itself runs, in the child, for a TPU that is not here.

The functions below run in the compiler's process; they are named to it as "test_planner_program:name". Those of `bad_children.py` do too.
"""

import math
import os
import sys
import tempfile
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diffusers.tpu.bridge.operators import group_norm
from diffusers.tpu.chips.devices import compiler_options
from diffusers.tpu.chips.figures import CHIPS, TOPOLOGIES, find_topology
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.compile.store import disk_cache
from diffusers.tpu.kernels.attention.blocks import from_list
from diffusers.tpu.kernels.attention.kernel import tpu_attention
from diffusers.tpu.planner import aot, bundles, kept, timing, work, worker


HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        yield


def ask(function: str, argument: dict | None = None, seconds: float = 120) -> dict:
    return aot.run_in_child(function, argument or {}, seconds=seconds)


@pytest.fixture(scope="module")
def answers(importable) -> dict:
    """Of one child, which starts the compiler once."""
    return ask("test_planner_program:everything", seconds=400)


# In the child


def everything(argument, progress):
    functions = (copying_kernel, split_product, products, all_to_alls, meshes, product, attention, kept_programs)
    return {f.__name__: f() for f in functions}


def _mesh(topology: str, shape: tuple[int, int, int] = (1, 1, 1)):
    compiler = aot.Compiler(find_topology(topology))
    return compiler, make_mesh(compiler.devices[: math.prod(shape)], shape)


def _array(mesh, shape: tuple[int, ...], spec=P(), dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _timed(compiled, mesh, chip=CHIPS["v6e"]):
    return timing.time_program(compiled, chip, [(*d.coords, d.core_on_chip) for d in mesh.devices.flat])


def copying_kernel():
    """A kernel over a grid, and another over one of another size, in a loop of seven."""
    compiler, mesh = _mesh("v6e-1")

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + 1

    def over(x, grid, block):
        spec = pl.BlockSpec(block, lambda i, j: (i, j))
        return pl.pallas_call(double, grid=grid, in_specs=[spec], out_specs=spec, out_shape=x)(x)

    def scaled_dot_product_attention(x):
        return over(x, (5, 3), (256, 128))

    def program(x):
        x = jax.lax.fori_loop(0, 7, lambda i, x: scaled_dot_product_attention(x), x)
        return over(x, (10, 3), (128, 128))

    compiled = compiler.compile(jax.jit(program).lower(_array(mesh, (1280, 384), dtype=jnp.float32)))
    timed = _timed(compiled, mesh)["bound"]
    kernels = [[o.steps, o.runs, o.body, o.seconds] for o in timed.operations if o.steps]
    return {"kernels": kernels, "memory": compiled.memory}


def products():
    """x [8192, 512] split over sp 4 times three weights [512, 512], stored over sp: with SparseCores and without."""
    compiler, mesh = _mesh("v6e-4", (1, 4, 1))

    def program(x, weights):
        for w in weights:
            x = x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return x

    x, w = (_array(mesh, (rows, 512), P("sp")) for rows in (8192, 512))
    lowered, answers = jax.jit(program, out_shardings=NamedSharding(mesh, P("sp"))).lower(x, [w] * 3), []
    for sparse_cores in (True, False):
        compiled = compiler.compile(lowered, compiler_options(compiler.devices[0], sparse_cores))
        timed = _timed(compiled, mesh)["bound"]
        answers.append({"hidden": timed.hidden_collectives, "total": timed.seconds["total"]})
    return answers


def all_to_alls():
    """Seconds that a product hides of one of a batch of one, by generation."""
    hidden = {}
    for generation in ("v5e", "v6e", "v7x"):
        compiler, mesh = _mesh(f"{generation}-8", (1, 8, 1))

        def program(x, w, mesh=mesh):
            there = jax.shard_map(
                lambda x: jax.lax.all_to_all(x, "sp", 2, 2), mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp")
            )
            return there(x), w @ w

        arrays = _array(mesh, (1, 512, 8, 128), P(None, "sp")), _array(mesh, (512, 512))
        lowered = jax.jit(program).lower(*arrays)
        compiled = compiler.compile(lowered, compiler_options(compiler.devices[0], True))
        hidden[generation] = _timed(compiled, mesh, CHIPS[generation])["bound"].hidden_collectives
    return hidden


def product():
    """x [1024, 2048] times w [2048, 1024], of bfloat16."""
    compiler, mesh = _mesh("v6e-1")
    x, w = _array(mesh, (1024, 2048)), _array(mesh, (2048, 1024))
    compiled = compiler.compile(jax.jit(lambda x, w: x @ w).lower(x, w))
    rows = max(bundles.read(text, CHIPS["v6e"].branch_slots).rows for text in compiled.schedules.values())
    return {"rows": rows, "seconds": _timed(compiled, mesh)["bound"].seconds["matmul"]}


def kept_programs():
    """How often the compiler was asked for each of several programs, one after the other, and whether all that is kept came back."""
    compiler, mesh = _mesh("v6e-4", (1, 4, 1))
    made, asked, compile_it = [], [], aot.Compiler.compile

    def times(*arguments):
        before = len(asked)
        try:
            made.append(kept.compiled(compiler, *arguments))
        except aot.OutOfMemory as error:
            made.append((str(error), error.asked, error.limit))
        return len(asked) - before

    def traced(mesh, name="one", size=8):
        def program(x):
            with jax.named_scope(name):
                return jnp.sin(x)

        return jax.jit(program).lower(_array(mesh, (size, 8), P("sp", None), jnp.float32)), mesh

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSERS_TPU_CACHE", folder)
        patch.setattr(aot.Compiler, "compile", lambda *args: asked.append(1) or compile_it(*args))
        turned = jax.sharding.Mesh(mesh.devices[:, ::-1], mesh.axis_names)
        counts = {"first": times(*traced(mesh))}
        counts["on another line"] = times(*traced(mesh))
        counts["chips in another order"] = times(*traced(turned))
        counts["another name"] = times(*traced(mesh, "another"))
        counts["another option"] = times(*traced(mesh), compiler_options(compiler.devices[0], False))
        patch.setenv("LIBTPU_INIT_ARGS", os.environ["LIBTPU_INIT_ARGS"] + " --another=flag")
        counts["another flag"] = times(*traced(mesh))
        counts["no room"], counts["again no room"] = (times(*traced(mesh, size=1 << 32)) for _ in range(2))
        alike, refused = made[0] == made[1] and bool(made[0].schedules), made[-1] == made[-2] and made[-1][1] > 2**33
        patch.setattr(disk_cache, "MOST_BYTES", 1)
        counts["another size"], counts["none is left"] = times(*traced(mesh, size=16)), times(*traced(mesh))
    return {"counts": counts, "alike": alike, "refused": refused}


def attention():
    """Seconds of the attention kernel by way, all of them in one program: two heads, 2048 x 2000."""
    compiler, mesh = _mesh("v6e-1")
    q, k = (_array(mesh, (1, 2, tokens, 128)) for tokens in (2048, 2000))
    blocks = from_list([512, 512, 256, [128, 128, 2], [128, 128, 2]])
    call = jax.jit(lambda q, k, v: tpu_attention(q, k, v, scale=1.0, blocks=blocks, generation="v6e"))
    compiled = compiler.compile(call.lower(q, k, k))
    (name,) = [name for name in compiled.schedules if name.startswith("attention_kernel")]
    timed, ways = _timed(compiled, mesh), bundles.read_modes(compiled.schedules[name], CHIPS["v6e"].branch_slots)
    return {
        "seconds": {way: next(o.seconds for o in of.operations if o.name == name) for way, of in timed.items()},
        "rows": {way: schedule.rows for way, schedule in ways.items()},
        "steps": ways["online"].steps,
    }


def split_product():
    """x [4096, 2048] split over sp 4, w [2048, 1024] stored over sp and gathered: y = x w."""
    compiler, mesh = _mesh("v6e-8", (2, 4, 1))

    def program(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("sp")))

    traced = jax.jit(program).trace(_array(mesh, (4096, 2048), P("sp")), _array(mesh, (2048, 1024), P("sp")))
    compiled = compiler.compile(traced.lower())
    timed = _timed(compiled, mesh)["bound"]
    gathers = [[o.bytes, o.seconds + o.hidden] for o in timed.operations if o.kind == "collectives"]
    facts = {"flops": work.count(traced.jaxpr).flops, "matmul": timed.seconds["matmul"], "memory": compiled.memory}
    return {"gathers": gathers, **facts}


def meshes():
    """Of every slice how many devices the compiler has, and those of meshes whose degrees are not those of its axes."""
    made = {}
    for name, topology in TOPOLOGIES.items():
        n = topology.devices
        shapes = [(1, n, 1), *([(2, n // 2, 1), (1, 2, n // 2)] if n > 1 else [])]
        of_compiler = len(_mesh(name)[0].devices)
        made[name] = [of_compiler, *(sorted({d.id for d in _mesh(name, shape)[1].devices.flat}) for shape in shapes)]
    return made


# Here


def test_a_fault_in_a_trace_is_no_bad_input(root, monkeypatch):
    """Its traceback is what helps, not its message; upstream's own refusal of an argument is a sentence."""
    request = {"model": str(root / "examples/tpu/models/wan-shapes"), "dtype": "float32", "arguments": {}, "batch": 1}
    for kind, fails in (
        (aot.BadRequest, lambda *_, **__: int("three")),
        (ValueError, lambda *_, **__: group_norm(torch.ones(1, 3), 2)),
    ):
        monkeypatch.setattr(worker, "record", fails)
        with pytest.raises(ValueError) as error:
            worker.recording_of(request, lambda text: None)
        assert error.type is kind


def test_kernels_count_as_by_hand(answers):
    first = answers["copying_kernel"]
    (steps, runs, body, seconds), (steps_2, runs_2, *_) = first["kernels"]
    assert (steps, runs) == (5 * 3, 7)
    assert (steps_2, runs_2) == (10 * 3, 1)
    # 256 x 128 float32 are 32 registers: a load and a store each at least, at most three loads or two stores a bundle.
    assert 16 <= body <= 200
    assert seconds >= 7 * 15 * body / CHIPS["v6e"].clock
    m = first["memory"]
    assert m["arguments"] == m["outputs"] == 1280 * 384 * 4


def test_the_attention_kernel_counts_as_by_hand_for_every_way(answers):
    """Two heads of 128, 2048 queries and 2000 keys in blocks of 512. A matrix unit holds 256 x 256 of one operand while rows of the other
    pass: 2048 keys for each 256 queries make the scores; 128 channels for each 256 queries and 256 keys weigh the values. Bounded heads
    have a unit for either product, a running maximum sends both through one."""
    scores, values = 2 * 8 * 2048, 2 * 8 * 8 * 128
    found = answers["attention"]
    assert (found["rows"]["bound"], found["rows"]["online"], found["steps"]) == (scores, scores + values, 2 * 4 * 4)
    seconds = found["seconds"]
    assert seconds["bound"] < seconds["centred"] < seconds["online"]
    for way, rows in found["rows"].items():
        assert CHIPS["v6e"].matrix_cycles(rows) / CHIPS["v6e"].clock < seconds[way]


def test_products_count_as_by_hand(answers):
    """1024 rows pass 8 x 4 squares of the weight on two units; the program takes a twelfth longer than the peak, to fill and drain."""
    flops, found = 2 * 1024 * 2048 * 1024, answers["product"]
    assert found["rows"] == 1024 * 8 * 4 / 2
    assert found["seconds"] == pytest.approx(1.08 * flops / CHIPS["v6e"].flops, rel=0.02)
    result = answers["split_product"]
    flops = 2 * 4096 * 2048 * 1024
    assert result["flops"] == flops
    # Four chips share it, both dp halves do the same: each computes as one chip alone.
    assert result["matmul"] == pytest.approx(1.08 * flops / 4 / CHIPS["v6e"].flops, rel=0.05)
    whole = 2048 * 1024 * 2
    ((sent, seconds),) = result["gathers"]
    assert sent == whole * 3 // 4
    # sp lies along the slice's axis of four: the link into either end carries three of four parts.
    assert seconds == pytest.approx(whole * 3 / 4 / CHIPS["v6e"].link_bandwidth, rel=1e-6)
    assert result["memory"]["arguments"] == (4096 * 2048 + 2048 * 1024) * 2 // 4


def test_a_program_is_compiled_once(answers):
    """Code that moves is the same program; chips in another order, other names, options or flags are another."""
    again = {"on another line": 0, "again no room": 0}
    found = answers["kept_programs"]
    assert found["counts"] == {name: again.get(name, 1) for name in found["counts"]}
    assert found["alike"] and found["refused"]


def test_sparse_cores_exchange_while_the_core_computes(answers):
    with_them, without = answers["products"]
    assert without["hidden"] == 0 < with_them["hidden"]
    assert with_them["total"] < 0.95 * without["total"]  # 0.88


def test_all_to_alls_are_beside_the_core_also_where_the_sparse_cores_refuse_them(answers):
    """Of a batch of one, as the partitioner writes them, they are refused by v6e's, and for it all of the program's."""
    assert min(answers["all_to_alls"].values()) > 0


def test_every_slice_has_the_compilers_devices_and_takes_every_mesh_of_them(answers):
    made = answers["meshes"]
    assert set(made) == set(TOPOLOGIES)
    for name, (devices, *meshes) in made.items():
        topology, cores = TOPOLOGIES[name], 2 if TOPOLOGIES[name].chip.generation == "v7x" else 1
        assert devices == topology.devices == math.prod(topology.shape) * cores
        assert all(len(ids) == devices for ids in meshes)


def test_what_goes_wrong_in_the_child_is_an_error_here(monkeypatch):
    """A crash with its last lines; a refusal is a ValueError; without libtpu it says how to get it."""
    with pytest.raises(aot.ChildError, match="SIGABRT(.|\n)*about to end badly"):
        ask("bad_children:crash")
    with pytest.raises(ValueError, match="expected nothing, got {'x': 1}"):
        ask("bad_children:refuse", {"x": 1})
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(aot.NoCompiler, match="pip install"):
        ask("bad_children:refuse")


def test_a_hang_ends_with_everything_it_started(monkeypatch):
    """The time is over when the child has said what it started, however long it took to get there."""
    started, timers = [], []

    def timer(seconds, late):
        timers.append((seconds, late))
        return types.SimpleNamespace(start=lambda: None, cancel=lambda: None)

    def on_progress(text):
        started.append(text)
        timers[0][1]()

    monkeypatch.setattr(aot.threading, "Timer", timer)
    with pytest.raises(aot.ChildError, match="within 8 s"):
        aot.run_in_child("bad_children:hang", {}, seconds=8, on_progress=on_progress)
    (pid,) = started
    assert timers[0][0] == 8
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"
