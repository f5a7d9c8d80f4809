"""What the tests share: the root of the tree, the patch set's modules, and upstream's own modules beside the patched ones."""

import contextlib
import gc
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


# Before any test starts JAX: eight simulated chips, no probe for a TPU, and programs that run once or twice compiled
# without what pays later only (of a tiny Wan: 6 s of processor time instead of 23).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; no test asks the network
GIVEN_FLAGS = os.environ.get("XLA_FLAGS", "")
QUICK_FLAGS = {
    "xla_force_host_platform_device_count": 8,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": 1,
}
os.environ["XLA_FLAGS"] = " ".join([GIVEN_FLAGS, *(f"--{name}={value}" for name, value in QUICK_FLAGS.items())])

os.environ.setdefault("NPROC", "32")  # threads: as `chips.devices` asks for

# Models are so small that a second thread only waits, and beside this process another worker wants a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# A trace makes millions of objects that live on: looking through them again and again is a tenth of the time.
gc.set_threshold(100_000, 50, 100)

# For `jax.jit`'s `compiler_options`: a third of the time to compile, and the values are as good.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}

# Of all that tests draw: a run repeats another one's draws by its seed, and a test has the same ones alone and among others.
SEED = int(os.environ.get("DIFFUSERS_TPU_TEST_SEED", "0"))

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("patches", "examples/tpu", "examples/tpu/results")]

from small_fork import make_fork  # noqa: E402
from upstream import open_store  # noqa: E402


def start_draws(name: str):
    """Seed what draws without a generator of its own: random, NumPy and torch."""
    entropy = zlib.crc32(f"{SEED} {name}".encode())
    random.seed(entropy), np.random.seed(entropy), torch.manual_seed(entropy)


def default_rng(seed=None, make=np.random.default_rng) -> np.random.Generator:
    """NumPy's, whose entropy is this run's too where no seed is given."""
    return make(np.random.randint(1 << 31) if seed is None else seed)


np.random.default_rng = default_rng


@contextlib.contextmanager
def draws_of(name: str):
    """What several tests share draws the same whichever of them comes first, and takes nothing from that one's draws."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    start_draws(name)
    try:
        yield
    finally:
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with draws_of(collector.nodeid):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    start_draws(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    with draws_of(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}"):
        return (yield)


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"the same draws again: DIFFUSERS_TPU_TEST_SEED={SEED}")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pristine():
    """Every file of the pinned release by its name in the wheel."""
    return open_store(ROOT)


@pytest.fixture(scope="session")
def upstream(pristine):
    """A function from a module's name to upstream's unpatched module, in this process, under a name of its own."""

    def load(name: str) -> ModuleType:
        package, _, leaf = name.rpartition(".")
        alias = f"{package}._upstream_{leaf}"
        if alias not in sys.modules:
            spec = importlib.util.spec_from_loader(alias, loader=None, origin=f"upstream {name}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[alias] = module
            source = pristine[name.replace(".", "/") + ".py"]
            exec(compile(source, spec.origin, "exec"), module.__dict__)
        return sys.modules[alias]

    return load


@pytest.fixture(scope="session", autouse=True)
def programs_for_tpus_as_a_run_has_them():
    """The quick flags are for programs that run here."""
    if "diffusers" not in sys.modules:  # nothing collected compiles
        yield
        return
    from diffusers.tpu.planner import aot

    inherited = aot._environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "_environment", lambda work: {**inherited(work), "XLA_FLAGS": GIVEN_FLAGS})
        yield


@pytest.fixture(autouse=True)
def attention_backend_as_before(monkeypatch):
    """Upstream's `set_attention_backend` also changes the backend of every model to come."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        registry = dispatch._AttentionBackendRegistry
        monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def new_garbage():
    """Garbage is looked for among what the test makes: all that is there already takes seconds to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


def slow(*case):
    """A case of a parametrized test that `make test-all` alone runs: the sweep, or a case beside it, has what it shows."""
    return pytest.param(*case, marks=pytest.mark.slow)


def needs(*packages: str):
    """Skips the module, or the test, without these packages."""
    for package in packages:
        pytest.importorskip(package, reason="the extras serve and ray are not installed")


def table(name: str):
    """What a JSON file of this folder holds."""
    return json.loads((ROOT / f"tests/tpu/{name}.json").read_text())


def run_python(*words, cwd=None, timeout=None, **variables) -> subprocess.CompletedProcess:
    """A process of Python with these words and variables that ends well: what it said, in text. Of the package it sees this tree's."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def assert_same(ours, theirs):
    """Equal to the last bit, NaN where the other has NaN, of one dtype."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def fork(root, tmp_path):
    """A small fork, laid (see small_fork.py)."""
    return make_fork(root, tmp_path / "fork")


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory) -> str:
    """A folder with a tiny Wan, which nobody changes."""
    import tiny

    tiny.wan().save_pretrained(folder := tmp_path_factory.mktemp("wan"))
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory) -> str:
    """The cache of this run, as a user has one: the same tiny program is compiled once, whatever test or worker asks."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSERS_TPU_CACHE", str(folder))
        if "diffusers" in sys.modules:
            from diffusers.tpu.chips.devices import keep_compiled_programs

            keep_compiled_programs(str(folder))  # JAX looks for its own once: not in a test's `own_store`
        yield str(folder)


@pytest.fixture
def own_store(monkeypatch, tmp_path) -> Path:
    """A store that is empty and of this test alone: it counts what is traced or compiled, or changes what of ours a trace runs."""
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "executables"


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """A host without a TPU and without settings; the working directory is empty."""
    monkeypatch.setenv("DIFFUSERS_TPU", "auto")
    monkeypatch.setattr("diffusers.tpu.chips.devices._generation_on_this_host", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def chips(monkeypatch) -> tuple:
    """The TPU path on 8 simulated chips, for one test: its devices."""
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    from diffusers.tpu.chips.devices import find_target, jax_devices
    from diffusers.tpu.common.config import read_environment

    return jax_devices(find_target(read_environment()))


@pytest.fixture(scope="module")
def idioms():
    """The TPU path on two simulated chips as `import diffusers` finds it, for one module: the idioms are on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSERS_TPU", "cpu")
        patch.setenv("DIFFUSERS_TPU_DEVICES", "2")
        from diffusers.tpu import activate, idioms
        from diffusers.tpu.chips.devices import find_target, jax_devices
        from diffusers.tpu.common import notices
        from diffusers.tpu.common.config import Environment

        jax_devices(find_target(Environment("cpu", 8, None, None)))  # first: other modules want eight
        activate()
        yield idioms
        idioms.off()
        notices._said.clear()


@contextlib.contextmanager
def warnings_of(*names: str):
    """A list that is filled with the warnings of these loggers."""
    sentences, loggers, handler = [], [logging.getLogger(name) for name in names], logging.Handler(logging.WARNING)
    handler.emit = lambda record: sentences.append(record.getMessage())
    for logger in loggers:
        logger.addHandler(handler)
    yield sentences
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def warned():
    """What diffusers and JAX warn of."""
    with warnings_of("diffusers", "jax") as sentences:
        yield sentences


@pytest.fixture
def said(idioms):
    """What is said from here on, as if nothing had been."""
    from diffusers.tpu.common import notices

    notices._said.clear()
    with warnings_of("diffusers.tpu.common.notices") as sentences:
        yield sentences


@pytest.fixture(scope="module")
def wan():
    """One tiny Wan for a module's tests; each leaves it without the TPU path."""
    import tiny

    return tiny.wan()


@pytest.fixture(scope="module")
def flux():
    """A tiny Flux, as upstream runs it."""
    import tiny

    return tiny.flux()


@pytest.fixture
def make_mesh(chips):
    """A function from degrees dp, sp, tp to a mesh of simulated chips."""
    from diffusers.tpu.chips import mesh

    return lambda *degrees: mesh.make_mesh(chips, degrees)


@pytest.fixture
def attach(make_mesh):
    """A function that compiles a module: to its runner on a mesh of these degrees, with these fields of TPUConfig."""
    from diffusers.tpu.chips.sharding import ModelPlan
    from diffusers.tpu.common.config import TPUConfig
    from diffusers.tpu.compile.module import CompiledModule
    from diffusers.tpu.pipelines.attach import Ownership

    def attach(module, *degrees, plan=ModelPlan(), **settings):
        runner = CompiledModule(module.eval(), plan, make_mesh(*degrees), TPUConfig(**settings))
        runner.ownership = Ownership()
        runner.attach()
        return runner

    return attach


def wide(x) -> np.ndarray:
    """A tensor or an array in float64."""
    return np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x, np.float64)


def relative(ours, oracle) -> float:
    """|ours - oracle| / |oracle| in the Euclidean norm, in float64."""
    ours, oracle = wide(ours), wide(oracle)
    return float(np.linalg.norm(ours - oracle) / np.linalg.norm(oracle))


def programs_of(runner) -> int:
    """How many programs a module and its parts have, compiled here or found in the store."""
    return sum(len(one.programs) for _, one in runner.nested())
