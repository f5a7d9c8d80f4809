"""Oracles: programs counted by hand. The compiler itself runs, in the child, for a TPU that is not here.

The functions below run in the compiler's process; they are named to it as "test_planner_program:name".
"""

import os
import sys
import tempfile
import types
from pathlib import Path

import pytest

from diffusers.tpu.chips.devices import compile_lowered, compiler_options
from diffusers.tpu.chips.figures import CHIPS, find_topology
from diffusers.tpu.planner import aot, bundles, hlo, ici


HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))


def ask(function: str, argument: dict | None = None, seconds: float = 120) -> dict:
    return aot.run_in_child(f"test_planner_program:{function}", argument or {}, seconds=seconds)


@pytest.fixture(scope="module")
def answers() -> dict:
    """Of one child, which starts the compiler once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        return ask("everything", seconds=400)


# In the child


def everything(argument, progress):
    functions = (copying_kernel, split_product, products, meshes, product, attention, kept_programs)
    return {f.__name__: f(argument, progress) for f in functions} | {"again": copying_kernel(argument, progress)}


def _mesh(topology: str, shape: tuple[int, int, int]):
    from diffusers.tpu.chips.mesh import make_mesh

    compiler = aot.Compiler(find_topology(topology))
    return compiler, make_mesh(compiler.devices[: shape[0] * shape[1] * shape[2]], shape)


def copying_kernel(argument, progress):
    """A kernel over a grid, and another over one of another size, in a loop of seven."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.sharding import PartitionSpec as P

    from diffusers.tpu.chips.sharding import named
    from diffusers.tpu.planner import timing

    compiler, mesh = _mesh("v6e-1", (1, 1, 1))

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

    x = jax.ShapeDtypeStruct((1280, 384), jnp.float32, sharding=named(mesh, P()))
    named_call = jax.jit(program)
    compiled = compiler.compile(named_call.lower(x))
    timed = timing.time_program(compiled, CHIPS["v6e"], [(0, 0, 0)])["bound"]
    kernels = [[o.steps, o.runs, o.body, o.seconds] for o in timed.operations if o.steps]
    return {
        "kernels": kernels,
        "total": timed.seconds["total"],
        "peak": compiled.peak_bytes,
        "memory": compiled.memory,
    }


def products(argument, progress):
    """x [16384, 1024] split over sp 4 times three weights [1024, 1024], stored over sp: with SparseCores and without."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from diffusers.tpu.chips.sharding import named
    from diffusers.tpu.planner import timing

    compiler, mesh = _mesh("v6e-4", (1, 4, 1))

    def program(x, weights):
        for w in weights:
            x = x @ jax.lax.with_sharding_constraint(w, named(mesh, P()))
        return x

    x = jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16, sharding=named(mesh, P("sp")))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=named(mesh, P("sp")))
    answers = []
    for sparse_cores in (True, False):
        lowered = jax.jit(program, out_shardings=named(mesh, P("sp"))).lower(x, [w] * 3)
        compiled = compiler.compile(lowered, compiler_options(compiler.devices[0], sparse_cores))
        places = [(*d.coords, d.core_on_chip) for d in mesh.devices.flat]
        timed = timing.time_program(compiled, compiler.topology.chip, places)["bound"]
        answers.append({"hidden": timed.hidden_collectives, "total": timed.seconds["total"]})
    return answers


def product(argument, progress):
    import jax
    import jax.numpy as jnp

    compiler = aot.Compiler(find_topology("v6e-1"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(compiler.devices[0]))
    compiled = compiler.compile(jax.jit(lambda x, y: x @ y).lower(x, x))
    return {"schedules": sorted(compiled.schedules), "peak": compiled.peak_bytes}


def kept_programs(argument, progress):
    """How often the compiler was asked for each of several programs, one after the other, and whether all that is kept came back."""
    import jax
    import jax.numpy as jnp

    from diffusers.tpu.chips.sharding import PartitionSpec, named
    from diffusers.tpu.compile.store import disk_cache
    from diffusers.tpu.planner import kept

    compiler, mesh = _mesh("v6e-4", (1, 4, 1))
    asked, compile_it = [], aot.Compiler.compile

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

        spec = PartitionSpec("sp", None)
        return jax.jit(program).lower(jax.ShapeDtypeStruct((size, 8), jnp.float32, sharding=named(mesh, spec))), mesh

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSERS_TPU_CACHE", folder)
        patch.setattr(aot.Compiler, "compile", lambda *args: asked.append(1) or compile_it(*args))
        made, turned = [], jax.sharding.Mesh(mesh.devices[:, ::-1], mesh.axis_names)
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


def attention(argument, progress):
    """Seconds of the attention kernel by way, all of them in one program: two heads, 2048 x 2000."""
    import jax
    import jax.numpy as jnp

    from diffusers.tpu.kernels.attention.blocks import from_list
    from diffusers.tpu.kernels.attention.kernel import tpu_attention
    from diffusers.tpu.planner import timing

    compiler = aot.Compiler(find_topology("v6e-1"))
    one = jax.sharding.SingleDeviceSharding(compiler.devices[0])
    q, k = (jax.ShapeDtypeStruct((1, 2, tokens, 128), jnp.bfloat16, sharding=one) for tokens in (2048, 2000))
    blocks = from_list([512, 512, 256, [128, 128, 2], [128, 128, 2]])
    call = jax.jit(lambda q, k, v: tpu_attention(q, k, v, scale=1.0, blocks=blocks, generation="v6e"))
    compiled = compiler.compile(call.lower(q, k, k))
    (name,) = [name for name in compiled.schedules if name.startswith("attention_kernel")]
    timed = timing.time_program(compiled, compiler.topology.chip, [(0, 0, 0, 0)])
    seconds = {way: next(o.seconds for o in of.operations if o.name == name) for way, of in timed.items()}
    return {"seconds": seconds}


def split_product(argument, progress):
    """x [4096, 2048] split over sp 4, w [2048, 1024] stored over sp and gathered: y = x w."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from diffusers.tpu.chips.sharding import named
    from diffusers.tpu.planner import timing, work

    compiler, mesh = _mesh("v6e-8", (2, 4, 1))

    def program(x, w):
        w = jax.lax.with_sharding_constraint(w, named(mesh, P()))
        return jax.lax.with_sharding_constraint(x @ w, named(mesh, P("sp")))

    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=named(mesh, P("sp")))
    w = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=named(mesh, P("sp")))
    traced = jax.jit(program).trace(x, w)
    compiled = compiler.compile(traced.lower())
    places = [(*d.coords, d.core_on_chip) for d in mesh.devices.flat]
    timed = timing.time_program(compiled, CHIPS["v6e"], places)["bound"]
    gathers = [[o.bytes, o.seconds + o.hidden] for o in timed.operations if o.kind == "collectives"]
    return {
        "gathers": gathers,
        "flops": work.count(traced.jaxpr).flops,
        "matmul": timed.seconds["matmul"],
        "memory": compiled.memory,
        "peak": compiled.peak_bytes,
    }


def too_large(argument, progress):
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from diffusers.tpu.chips.sharding import named

    compiler, mesh = _mesh("v5e-1", (1, 1, 1))
    x = jax.ShapeDtypeStruct((40 << 10, 1 << 20), jnp.bfloat16, sharding=named(mesh, P()))
    compiler.compile(jax.jit(lambda x: x + 1).lower(x))


def meshes(argument, progress):
    """Every slice's devices, and meshes whose degrees are not those of its axes."""
    from diffusers.tpu.chips.figures import TOPOLOGIES

    made = {}
    for name, topology in TOPOLOGIES.items():
        n = topology.devices
        shapes = [(1, n, 1), *([(2, n // 2, 1), (1, 2, n // 2)] if n > 1 else [])]
        made[name] = [sorted({d.id for d in _mesh(name, shape)[1].devices.flat}) for shape in shapes]
    return made


def crash(argument, progress):
    print("about to end badly", file=sys.stderr, flush=True)
    os.abort()


def hang(argument, progress):
    import subprocess

    sleeper = subprocess.Popen(["sleep", "600"])
    progress(str(sleeper.pid))
    sleeper.wait()


def refuse(argument, progress):
    raise aot.BadRequest(f"expected nothing, got {argument}")


# Here


def test_kernels_count_as_by_hand_and_the_same_twice(answers):
    first = answers["copying_kernel"]
    (steps, runs, body, seconds), (steps_2, runs_2, *_) = first["kernels"]
    assert (steps, runs) == (5 * 3, 7)
    assert (steps_2, runs_2) == (10 * 3, 1)
    # 256 x 128 float32 are 32 registers: a load and a store each at least, at most three loads or two stores a bundle.
    assert 16 <= body <= 200
    assert seconds >= 7 * 15 * body / CHIPS["v6e"].clock
    m = first["memory"]
    assert m["arguments"] == m["outputs"] == 1280 * 384 * 4
    assert first["peak"] == m["arguments"] + m["outputs"] - m["aliased"] + m["temporaries"] + m["program"]
    assert answers["again"] == first


def test_the_attention_kernel_counts_as_by_hand_for_every_way(answers):
    """Two heads, 2048 queries and 2000 keys in four blocks of 512:
    more than its two products at the peak rate, or an exponential of 1024 scores a cycle (4.7 us); measured: 42 us online."""
    seconds = answers["attention"]["seconds"]
    least = 2 * (2 * 2 * 2048 * 2048 * 128) / CHIPS["v6e"].flops
    assert least == pytest.approx(2 * 2048 * 2048 / 1024 / CHIPS["v6e"].clock, rel=0.05)
    assert least < seconds["bound"] < seconds["centred"] < seconds["online"] < 10 * least


def test_a_split_product_counts_as_by_hand(answers):
    result = answers["split_product"]
    flops = 2 * 4096 * 2048 * 1024
    assert result["flops"] == flops
    # Four chips share it, both dp halves do the same.
    assert flops / 4 / CHIPS["v6e"].flops < result["matmul"] < 4 * flops / 4 / CHIPS["v6e"].flops
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
    assert with_them["total"] < 0.95 * without["total"]  # 0.84


def test_only_chips_with_sparse_cores_are_told_of_them():
    kinds = {"TPU v5 lite": False, "TPU v5": True, "TPU v6 lite": True, "TPU7x": True, "TPU v4": False, "cpu": False}
    for kind, there in kinds.items():
        device = types.SimpleNamespace(platform="tpu", device_kind=kind)
        assert [set(compiler_options(device, wanted).values()) for wanted in (True, False)] == (
            [{True}, {False}] if there else [set(), set()]
        )


def test_every_slice_takes_every_mesh_of_its_devices(answers):
    from diffusers.tpu.chips.figures import TOPOLOGIES

    made = answers["meshes"]
    assert set(made) == set(TOPOLOGIES)
    for name, meshes in made.items():
        assert all(len(ids) == TOPOLOGIES[name].devices for ids in meshes)


def test_no_room_is_an_answer():
    with pytest.raises(aot.OutOfMemory) as caught:
        ask("too_large")
    assert caught.value.asked >= 80 * 2**30
    assert caught.value.limit == CHIPS["v5e"].hbm_bytes


def test_a_crash_is_an_error_with_its_last_lines():
    with pytest.raises(aot.ChildError, match="SIGABRT(.|\n)*about to end badly"):
        ask("crash")


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
        aot.run_in_child("test_planner_program:hang", {}, seconds=8, on_progress=on_progress)
    (pid,) = started
    assert timers[0][0] == 8
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"


def test_schedules_are_written_where_asked_for(answers):
    without = aot.run_in_child("test_planner_program:product", {}, seconds=120, schedules=False)
    for answer, schedules in ((answers["product"], True), (without, False)):
        assert bool(answer["schedules"]) == schedules and answer["peak"] > 3 * 4 * 512**2


def test_a_refusal_is_a_value_error():
    with pytest.raises(ValueError, match="expected nothing, got {'x': 1}"):
        ask("refuse", {"x": 1})


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(aot.NoCompiler, match="pip install"):
        ask("refuse")


# Readers


HLO = """HloModule m, is_scheduled=true

%fused (p0: bf16[40,128,64], p1: s32[]) -> bf16[1,128,64] {
  %p0 = bf16[40,128,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  ROOT %ds = bf16[1,128,64]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,128,64}
}

%body (s: (s32[], bf16[40,128,64])) -> (s32[], bf16[40,128,64]) {
  %s = (s32[], bf16[40,128,64]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = bf16[40,128,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %start = (bf16[1,128,64]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,128,256]{2,1,0:T(8,128)(2,1)S(1)}) all-gather-start(%w), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={2}
  %slice = bf16[1,128,64]{2,1,0:T(8,128)(2,1)} fusion(%w, %i), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/while/body/[blocks.*]/[attn1]/[to_q]/slice"}, backend_config={"window_config":{"estimated_cycles":"17500","iteration_bounds":["2","3"]}}
  %done = bf16[1,128,256]{2,1,0:T(8,128)(2,1)S(1)} all-gather-done(%start)
  ROOT %t = (s32[], bf16[40,128,64]{2,1,0:T(8,128)(2,1)}) tuple(%i, %w)
}

%cond (c: (s32[], bf16[40,128,64])) -> pred[] {
  %c = (s32[], bf16[40,128,64]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[] constant(40)
  ROOT %lt = pred[] compare(%limit, %limit), direction=LT
}

ENTRY %main (a: bf16[40,128,64]) -> bf16[40,128,64] {
  %a = bf16[40,128,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %loop = (s32[], bf16[40,128,64]{2,1,0:T(8,128)(2,1)}) while(%a), condition=%cond, body=%body
}
"""


def on_a_sparse_core(text: str) -> str:
    """The program's gather as the SparseCore's."""
    small, whole = "bf16[1,128,64]{2,1,0:T(8,128)(2,1)S(1)}", "bf16[1,128,256]{2,1,0:T(8,128)(2,1)S(1)}"
    inside = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={2}"
    computation = (
        f"%gathering (p: {small}) -> {whole} {{\n  %p = {small} parameter(0)\n  ROOT %g = {whole} all-gather(%p),"
        f' {inside}\n}}, execution_thread="sparsecore"\n\n'
    )
    start = f'(({small}, token[]), {whole}) call-start(%w), async_execution_thread="sparsecore", to_apply=%gathering'
    text = text.replace(f"({small}, {whole}) all-gather-start(%w), {inside}", start)
    return text.replace("all-gather-done", "call-done").replace("%body (s", computation + "%body (s")


@pytest.mark.parametrize("written", [str, on_a_sparse_core])
def test_a_program_is_read_with_loops_parts_and_hidden_transfers(written):
    from diffusers.tpu.planner import timing

    chip = CHIPS["v6e"]
    assert written is str or ("call-done" in written(HLO) and " all-gather-start(" not in written(HLO))
    compiled = aot.CompiledProgram(written(HLO), {}, {}, 0)
    places = [(x, y, 0, 0) for x in range(2) for y in range(4)]
    timed = timing.time_program(compiled, chip, places)["bound"]
    part = next(o for o in timed.operations if o.name == "slice")
    # One of forty slices is read, 64 lanes padded to 128, and one written; the index is four bytes.
    assert (part.module, part.runs, part.bytes) == ("blocks.*.attn1.to_q", 40, 2 * 128 * 128 * 2 + 4)
    assert part.seconds == pytest.approx(40 * 17500 / chip.clock)
    gather = next(o for o in timed.operations if o.kind == "collectives")
    assert gather.seconds == 0 and gather.hidden == pytest.approx(40 * 128 * 256 * 2 * 3 / 4 / chip.link_bandwidth)


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{3,2}}", [[0, 1], [3, 2]]),
    ],
)
def test_groups_of_a_collective(notation, groups):
    instruction = hlo.Instruction("x", "all-gather", "f32[4]", [], f", {notation}, dimensions={{0}}")
    assert ici.groups_of(instruction, 4) == groups


@pytest.mark.parametrize(
    ("opcode", "link_loads"),
    # On a line of four chips, in units of one message's bytes: what the fullest link carries.
    [("all-gather", 3 / 4), ("all-reduce", 6 / 4), ("all-to-all", 4 / 4), ("reduce-scatter", 3)],
)
def test_a_line_of_four_chips_by_hand(opcode, link_loads):
    chip = CHIPS["v5e"]
    instruction = hlo.Instruction("x", opcode, "f32[8192]{0:T(1024)}", [], ", replica_groups={{0,1,2,3}}")
    moved = ici.transfer(instruction, [(0, y, 0, 0) for y in range(4)], chip)
    assert moved.seconds == pytest.approx(link_loads * 8192 * 4 / chip.link_bandwidth)


SCHEDULE = """= control target key end

     0   :  { %s1_s0 = smov 0 } /* Start region 1 */
   0x1 LB: > { %s2_s1 = sphi %s1_s0, %s3_s1 /* iteration index, stage = 0 */  ;;  %s9_s9 = sadd.s32 4294967295, %s2_s1 /* iteration index, stage = 1 */ } /* Start region 7 */
   0x2   : > { %p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0 }
   0x3   : > { %10 = sbr.rel (%p1_p0) target = $region9 }
   0x4   : > { %9 = vmatmul.bf16.gmra.mxu2 %v0  ;;  %v1 = vld [vmem:[#a] sm:$0xff]
   continued text of the same bundle } /* Start region 8 */
   0x5   : > { %v2 = vld [vmem:[#a] sm:$0xff] }
   0x6 PF: > { %v3 = vadd.f32 %v1, %v2 } /* Start region 9 */
   0x7   : > { %v4 = vadd.f32 %v1, %v2  ;;  %14 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v7 }
   0x8   : > { %v5 = vadd.f32 %v1, %v2  ;;  %15 = vmatmul.mubr.f32.gmra.mxu0 %v7 }
   0x9   : > { %p2_p1 = scmp.ne.s32.totalorder %s5_s5, 4 }
   0xa   : > { %11 = sbr.rel (%p2_p1) target = $region10 }
   0xb   : > { %v6 = vst %v5 }
   0xc PF: > { %s3_s1 = sadd.s32 1, %s2_s1 } /* Start region 10 */
   0xd   : > { %p3_p2 = scmp.ge.s32.totalorder %s3_s1, 32 /* loop exit test */ }
   0xe   :  { %12 = sbr.rel (!%p3_p2) target = $region7 }
   0xf   :  { %13 = vsyncpa 0 }
  0x10   :  { %14 = vsyncpa 1 }
"""


def test_no_estimate_is_none():
    rest = ', backend_config={"window_config":{"estimated_cycles":"%d"}}'
    for number, cycles in ((17500, 17500), (2**63 - 1, None)):
        assert hlo.Instruction("x", "copy", "f32[4]", [], rest % number).estimated_cycles == cycles


def test_a_schedule_by_hand():
    schedule = bundles.read(SCHEDULE, 0)
    # 32 rounds of a pipelined grid are 30 steps. The counter takes five values: first and last piece run in a fifth.
    assert (schedule.bundles, schedule.steps) == (17, 30)
    assert [(loop.start, loop.stop, loop.trips) for loop in schedule.loops] == [(1, 14, 30)]
    assert schedule.cycles == pytest.approx(3 + 30 * (14 - 3) + 30 * 3 / 5)
    assert schedule.rows == 16 * 30  # of bfloat16 through the first unit; through the third a fifth of that
    # One bundle behind each branch runs as well: there is one more in the loop, and one less in the first piece and the last.
    schedule = bundles.read(SCHEDULE, 1)
    assert [(loop.start, loop.stop, loop.trips) for loop in schedule.loops] == [(1, 15, 30)]
    assert schedule.cycles == pytest.approx(2 + 30 * (15 - 1) + 30 * 1 / 5)


def test_a_size_is_no_counter():
    """`== 0` jumps over what runs where there is anything to do: in every round."""
    text = SCHEDULE.replace("%p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0", "%p1_p0 = scmp.eq.s32.totalorder %s6_s6, 0")
    assert bundles.read(text, 0).cycles == pytest.approx(3 + 30 * (14 - 1) + 30 * 1 / 5)


WAYS_SCHEDULE = """
     0   :  { %s1_s0 = smov 0 } /* Start region 1 */
   0x1 LB: > { %s2_s1 = sphi %s1_s0, %s3_s1 } /* Start region 7 */
   0x2   : > { %p1_p0 = scmp.ne.s32.totalorder %s5_s5, 1000001 }
   0x3   : > { %10 = sbr.rel (%p1_p0) target = $region9 }
   0x4   : > { %v1 = vld [vmem:[#a] sm:$0xff] }
   0x5   : > { %v2 = vld [vmem:[#a] sm:$0xff] }
   0x6 PF: > { %p2_p0 = scmp.eq.s32.totalorder (!%p9_p4), %s5_s5, 1000003 } /* Start region 9 */
   0x7   : > { %11 = sbr.rel (!%p2_p0) target = $region10 }
   0x8   : > { %v3 = vld [vmem:[#a] sm:$0xff]  ;;  %14 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[4].mxu0 %v7 }
   0x9   : > { %v4 = vld [vmem:[#a] sm:$0xff] }
   0xa   : > { %v5 = vld [vmem:[#a] sm:$0xff] }
   0xb PF: > { %s3_s1 = sadd.s32 1, %s2_s1 } /* Start region 10 */
   0xc   : > { %p3_p2 = scmp.ge.s32.totalorder %s3_s1, 6 }
   0xd   :  { %12 = sbr.rel (!%p3_p2) target = $region7 }
"""


def test_one_way_at_a_time_of_a_schedule_by_hand():
    ways = bundles.read_ways(WAYS_SCHEDULE, 0)
    # Six rounds of eight bundles that every way runs; "centred" is not compiled: such heads go online.
    assert {way: schedule.cycles for way, schedule in ways.items()} == {
        "bound": 1 + 6 * (8 + 2), "centred": 1 + 6 * (8 + 3), "online": 1 + 6 * (8 + 3),
    }  # fmt: skip
    assert [ways[way].rows for way in ("bound", "online")] == [0, 16 * 6]
    assert ways["online"].body == 4  # with the branch


def test_what_the_sparse_cores_cannot_exchange_stays_on_the_core(caplog, monkeypatch):
    import jax

    from diffusers.utils import logging

    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    options, asked = compiler_options(types.SimpleNamespace(platform="tpu", device_kind="TPU v6e"), True), []

    def refusing(words):
        def compile(given):
            asked.append(given)
            if any(given.values()):
                raise jax.errors.JaxRuntimeError(words)
            return "executable"

        return types.SimpleNamespace(compile=compile)

    assert compile_lowered(refusing("RET_CHECK failure (xla/sparse_core/emitter.cc:164)"), options) == "executable"
    assert asked == [options, dict.fromkeys(options, False)] and "stay on the core" in caplog.text
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        compile_lowered(refusing("no room"), options)


def test_an_option_that_the_compiler_does_not_have_is_left_out_by_name(caplog, monkeypatch):
    import jax

    from diffusers.utils import logging

    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    options = {"xla_tpu_of_mine": True, "xla_cpu_copy_insertion_use_region_analysis": False, "xla_tpu_of_yours": False}
    assert compile_lowered(lowered, options)(1.0) == 2.0
    said = {record.getMessage().partition(",")[0] for record in caplog.records}
    assert said == {f"this compiler has no option xla_tpu_of_{whose}" for whose in ("mine", "yours")}
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        compile_lowered(lowered, {"xla_cpu_copy_insertion_use_region_analysis": "not a valid one"})


def test_a_matrix_unit_is_occupied_as_long_as_the_peak_says():
    for chip in CHIPS.values():
        products = chip.matrix_units * chip.matrix_side**2 * 16  # of 16 rows on every unit
        assert chip.matrix_cycles(16) / chip.clock == pytest.approx(2 * products / chip.flops)
    assert round(CHIPS["v5e"].matrix_cycles(16)) == 16 and round(CHIPS["v6e"].matrix_cycles(16)) == 8
