"""The laid tree, what it costs without a TPU, and what stands beside it. Oracle: the pinned release, byte for byte; patches/UPSTREAM's digest."""

import hashlib
import json
import re

import pytest

import laying
import series
from conftest import run_python, slow
from upstream import digest, read_pin


def test_the_tree_is_upstream_the_series_and_an_overlay(root, pristine):
    patched = {diff.path for patch in series.read_series(root / "patches") for diff in patch.diffs}
    assert digest(pristine) == read_pin(root).files_sha256
    package = {name for name in pristine if name.startswith("diffusers/")}
    assert patched < package
    for name in package - patched:
        assert (root / "src" / name).read_bytes() == pristine[name], name
    for name, content in series.patched(series.read_series(root / "patches"), pristine).items():
        assert (root / "src" / name).read_bytes() == content != pristine[name], name
    manifest = laying.read_manifest(root)
    assert {*manifest} == package
    for name, hashes in manifest.items():
        assert [hashlib.sha256((root / "src" / name).read_bytes()).hexdigest()] == hashes, name
    ours = [path.relative_to(root / "src").as_posix() for path in (root / "src/diffusers").rglob("*.py")]
    ours = [name for name in ours if laying.is_overlay(name)]
    assert ours and not [name for name in ours if name in pristine]  # the overlay shadows nothing


# In a process of its own, on a host without a TPU: what is touched, what runs and what is imported in each mode.
WITHOUT_A_TPU = """
import contextlib, io, json, os, sys, tempfile, time, torch
names = ("Generator", "randn", "cuda", "device", "compile", "load", "tensor")
before = {name: getattr(torch, name) for name in names}, dict(vars(torch.cuda)), dict(vars(torch.Tensor))
modes = torch.autograd.grad_mode.inference_mode.__enter__, torch.amp.autocast_mode.autocast.__init__
import diffusers
for old, now in zip(before, (torch, torch.cuda, torch.Tensor)):
    assert all(getattr(now, name) is value or vars(now)[name] is value for name, value in old.items())
assert len(before[2]) == len(vars(torch.Tensor))
assert modes == (torch.autograd.grad_mode.inference_mode.__enter__, torch.amp.autocast_mode.autocast.__init__)
began = time.perf_counter()
diffusers.tpu.activate()
assert time.perf_counter() - began < 0.005
assert not torch.cuda.is_available() and not [m for m in sys.modules if m.startswith("diffusers.tpu.idioms")]

sys.path.insert(0, sys.argv[1])
import tiny
from diffusers import WanPipeline
from diffusers.models import attention_dispatch
from diffusers.tpu.apps.cli import main
from diffusers.tpu.chips import devices
devices._generation_on_this_host = lambda: None
registry = attention_dispatch._AttentionBackendRegistry
by_variable, registry._active_backend = registry._active_backend, attention_dispatch.AttentionBackendName.NATIVE
facts = {}
with tempfile.TemporaryDirectory() as folder:
    tiny.wan().save_pretrained(folder)
    for mode in ("auto", "off"):
        os.environ["DIFFUSERS_TPU"] = mode
        pipe = WanPipeline.from_pretrained(folder).to("cpu", torch.float32)
        pipe(**tiny.arguments("wan", num_inference_steps=1))
        with contextlib.redirect_stdout(io.StringIO()) as env:
            main(["env", "--json"])
        facts[mode] = [diffusers.tpu.is_active(), sorted({"jax", "torchax", "jaxlib"} & set(sys.modules))]

facts["env"] = json.loads(env.getvalue())
registry._active_backend = by_variable
try:
    attention_dispatch.dispatch_attention_fn(*torch.zeros(3, 1, 2, 1, 4))
except Exception as error:
    facts["tpu attention"] = str(error)
print(json.dumps(facts))
"""


@pytest.mark.idiom("nothing-touched")
@pytest.mark.parametrize("at_import", ["auto", slow("off")])
def test_without_a_tpu_nothing_of_torch_is_touched_and_pipelines_run_without_jax(root, at_import):
    """Nor does `env` import it. The variable of upstream's dispatcher, read at its import, selects the TPU's attention."""
    words = "-X", "importtime", "-c", WITHOUT_A_TPU, root / "tests" / "tpu"
    result = run_python(*words, DIFFUSERS_TPU=at_import, DIFFUSERS_ATTN_BACKEND="tpu")
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["auto"] == facts["off"] == [False, []]
    assert facts["env"]["chips"] == {"TPU path": "off: DIFFUSERS_TPU=off; plain diffusers runs"}
    assert facts["env"]["settings"]["DIFFUSERS_TPU"] == "off"
    assert [*facts["env"]["patches"]] == [name[:4] for name in series.listed(root / "patches")]
    assert "'tpu' expects the TPU path, which is off here" in facts["tpu attention"]
    imports = re.findall(r"\| +(\d+) \| +(diffusers[.\w]*)$", result.stderr, re.M)
    microseconds = {name: int(time) for time, name in imports}
    assert microseconds["diffusers.tpu"] < 0.05 * microseconds["diffusers"]


BESIDE_US = """
import sys
import diffusers
assert not {"jax", "torchax", "torch_xla"} & {*sys.modules}
from diffusers.pipelines.wan import pipeline_wan
import accelerate, torch, transformers
assert not pipeline_wan.XLA_AVAILABLE and not accelerate.utils.is_torch_xla_available()
assert not transformers.utils.is_torch_xla_available() and "torch_xla" not in sys.modules
try:
    torch.ops.aten.prod.dim_Dimname
except AttributeError:
    import torchax
    try:
        torch.ops.aten.prod.dim_Dimname
    except AttributeError:
        print("as it was")
torch.cuda.synchronize()
assert torch.cuda.memory_allocated() == 0  # JAX is imported: asked for its arrays, it would start with one chip
from diffusers.tpu.chips.devices import find_target, jax_devices
from diffusers.tpu.common.config import read_environment
assert len(jax_devices(find_target(read_environment()))) == 8
"""


@pytest.mark.idiom("torch-xla", "torchax-import")
@pytest.mark.slow
def test_torch_xla_is_left_out_and_torchax_can_be_imported(root, tmp_path, monkeypatch):
    """A stub that cannot be imported stands for torch_xla, in a process that asks for nothing but the path."""
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise RuntimeError('torch_xla is imported')")
    (tmp_path / "torch_xla-2.8.0.dist-info").mkdir()
    (tmp_path / "torch_xla-2.8.0.dist-info" / "METADATA").write_text("Name: torch_xla\nVersion: 2.8.0\n")
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    path = f"{tmp_path}:{root / 'src'}"
    done = run_python("-c", BESIDE_US, DIFFUSERS_TPU="cpu", DIFFUSERS_TPU_DEVICES="8", PYTHONPATH=path)
    assert done.stdout.strip() == "as it was" and done.stderr.count("torch_xla: on the TPU path") == 1
