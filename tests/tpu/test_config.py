"""Oracle: none; what a user can get wrong before anything runs, and what detection says of a host."""

import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diffusers.tpu import is_active
from diffusers.tpu.chips import devices, figures
from diffusers.tpu.chips.devices import Target, find_target
from diffusers.tpu.chips.mesh import plan_degrees, regrouped
from diffusers.tpu.chips.sharding import BY_OUTPUT, default_spec, fit, gathered, plan_weights
from diffusers.tpu.common.config import TPUConfig, read_environment
from diffusers.tpu.idioms import chips
from diffusers.tpu.kernels import linear
from diffusers.tpu.kernels.attention import blocks
from diffusers.tpu.kernels.settings import Settings


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("", "nonsense", "auto .*off .*cpu .*'nonsense'"), ("_DEVICES", "0", "positive integer"),
        ("_DEVICES", "eight", "positive integer"), ("_MESH", "2,4", "dp,sp,tp"),
    ],
)  # fmt: skip
def test_environment_is_checked(monkeypatch, name, value, words):
    monkeypatch.setenv(f"DIFFUSERS_TPU{name}", value)
    with pytest.raises(ValueError, match=words):
        read_environment()


WRONG = {
    "mesh": [((2, 4), "three positive integers"), ("2,0,1", "three positive integers")],
    "glue": [("sticky", "resident")],
    "matmul_precision": [("low", "highest")],
    "convolution_precision": [("low", "convolution_precision")],
    "attention": [("flash", "splash.* got 'flash'")],
    "attention_blocks": [
        ((256, 512), r"three positive integers.* got \(256, 512\)"), ((256, 512, 0), "three positive integers"),
        ((256, 512, 384), "a divisor of those"), (256, "three positive integers.* got 256"),
    ],
    "attention_window": [((3,), r"attention_window of two integers.* got \(3,\)"), ((3, -1), "attention_window of two integers")],
    "attention_ring": [(0, "attention_ring of a positive integer, got 0"), ("2", "positive integer, got '2'")],
    "programs": [(0, "programs of a positive integer, got 0"), (True, "programs of a positive integer, got True")],
    "program_gib": [("1", "program_gib of GiB, a number of at least 0, got '1'")],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_config_is_checked_when_made(name):
    for value, words in WRONG[name]:
        with pytest.raises(ValueError, match=words):
            TPUConfig(**{name: value})


def test_a_mesh_is_planned():
    planned = {
        (8, None, 2): (2, 4, 1), (8, None, 1): (1, 8, 1), (8, None, 3): (1, 8, 1), (1, None, 2): (1, 1, 1),
        (8, (1, 3, 1), 2): (1, 3, 1), (8, (2, 2, 2), 2): (2, 2, 2),
    }  # fmt: skip
    assert {given: plan_degrees(*given) for given in planned} == planned


def test_a_tpu_is_found_on_the_pci_bus(tmp_path, monkeypatch):
    bus = tmp_path / "devices"
    for slot, (vendor, device) in enumerate([("0x8086", "0x006f"), ("0x1ae0", "0xffff"), ("0x1ae0", "0x006f")]):
        (bus / str(slot)).mkdir(parents=True)
        (bus / str(slot) / "vendor").write_text(vendor + "\n")
        (bus / str(slot) / "device").write_text(device + "\n")
    assert devices._generation_on_this_host(str(bus)) == "v6e"
    assert devices._generation_on_this_host(str(tmp_path / "none")) is None
    assert devices.device_nodes(str(tmp_path)) == []
    for node in ("vfio/vfio", "vfio/0", "accel", "accel3"):
        (tmp_path / node).parent.mkdir(exist_ok=True)
        (tmp_path / node).write_text("")
    assert devices.device_nodes(str(tmp_path)) == [str(tmp_path / "accel3"), str(tmp_path / "vfio/0")]


NODE = "/dev/vfio/0"


@pytest.mark.parametrize(
    "mode, platforms, generation, nodes, found",
    [
        ("", "", "v6e", [NODE], Target("tpu", "v6e")),
        ("auto", "tpu,cpu", "v6e", ["/dev/accel0"], Target("tpu", "v6e")),
        ("off", "", "v6e", [NODE], "DIFFUSERS_TPU=off"),
        ("", "cpu", "v6e", [NODE], "JAX_PLATFORMS=cpu"),
        ("", "", "v6e", [], "a TPU v6e on the bus of this host, but no /dev/vfio/N or /dev/accelN"),
        ("", "", None, [], "no TPU on this host"),
        ("tpu", "", None, [], Target("tpu")),
        ("tpu", "tpu", "v5e", [], Target("tpu", "v5e")),
        ("tpu", "cpu", "v5e", [NODE], ValueError),
    ],
)
def test_what_a_host_shows_of_a_tpu(monkeypatch, mode, platforms, generation, nodes, found):
    """A stub of the bus and of /dev; none is asked for."""
    monkeypatch.setenv("DIFFUSERS_TPU", mode)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(devices, "_generation_on_this_host", lambda: generation)
    monkeypatch.setattr(devices, "device_nodes", lambda: nodes)
    if found is ValueError:
        with pytest.raises(ValueError, match="expected JAX_PLATFORMS to name tpu, .* got 'cpu'"):
            is_active()
    elif isinstance(found, Target):
        assert is_active() and find_target(read_environment()) == found
    else:
        assert not is_active() and find_target(read_environment()) is None
        assert devices.why_off(read_environment()).startswith(found)


@pytest.mark.idiom("torch-tpu")
def test_the_chips_are_left_to_torchtpu_where_it_is_loaded(monkeypatch):
    """A stub stands for torch_tpu."""
    said = []
    monkeypatch.setattr(devices.notices, "warn_once", said.append)
    monkeypatch.setattr(devices, "torch_tpu_is_loaded", devices.torch_tpu_is_loaded.__wrapped__)
    monkeypatch.setitem(sys.modules, "torch_tpu", SimpleNamespace())
    monkeypatch.setattr(devices, "device_nodes", lambda: [NODE])
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for mode, generation, active in (("auto", "v6e", False), ("auto", None, False), ("cpu", "v6e", True)):
        monkeypatch.setenv("DIFFUSERS_TPU", mode)
        monkeypatch.setattr(devices, "_generation_on_this_host", lambda: generation)
        assert is_active() == active
        assert devices.why_off(read_environment()).startswith("torch_tpu") == bool(generation)
    assert len(said) == 1 and said[0].startswith("the TPU path is off: torch_tpu is loaded")
    monkeypatch.setenv("DIFFUSERS_TPU", "tpu")
    with pytest.raises(RuntimeError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        is_active()
    monkeypatch.delitem(sys.modules, "torch_tpu")
    assert is_active()


def test_a_tpu_that_the_bus_does_not_show_is_named_by_jax(monkeypatch):
    device = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite", process_index=0, memory_stats=lambda: None)
    monkeypatch.setenv("DIFFUSERS_TPU", "tpu")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(devices, "_generation_on_this_host", lambda: None)
    for room in (devices, chips):
        monkeypatch.setattr(room, "jax_devices", lambda target: (device,) * 4)
    assert chips.name() == "TPU v6e" and chips.bytes_in_all() == 4 * figures.CHIPS["v6e"].hbm_bytes


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v9"])
def test_chips_that_are_not_there_are_refused_where_they_would_run(chips, kind, monkeypatch):
    """More than JAX was started with, or of another generation."""
    with pytest.raises(RuntimeError, match="16 simulated chips, got 8"):
        devices.jax_devices(Target("cpu", simulated=16))
    device = SimpleNamespace(platform="tpu", device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda platform: [device])
    words = f"among v5e v5p v6e v7x, got .*{kind[-2:]}.*DIFFUSERS_TPU=off"
    with pytest.raises(NotImplementedError, match=words):
        devices.jax_devices(Target("tpu", kind[-2:]))
    for wrong in ({"platform": "tpu"}, {"platform": "tpu", "generation": "v4"}, {"generation": "v4"}):
        with pytest.raises(NotImplementedError, match="among v5e v5p v6e v7x"):
            Settings(**wrong)
    for choose in (blocks.choose, blocks.candidates):
        with pytest.raises(NotImplementedError, match="got v4"):
            choose(blocks.Shape(900, 900, 128, 128), "v4")
    with pytest.raises(NotImplementedError, match="got v4"):
        linear.choose(2048, 1024, 1024, "v4")
    device.device_kind = "TPU v5 lite"
    assert figures.generation_of(device) == "v5e" and figures.generation_of(SimpleNamespace(platform="cpu")) is None


def test_specs_fit_their_weights(make_mesh):
    mesh = make_mesh(2, 2, 2)
    assert fit(P("tp", ("dp", "sp")), (6, 12), mesh) == P("tp", ("dp", "sp"))
    assert fit(P("tp", ("dp", "sp")), (7, 6), mesh) == P(None, "dp")
    assert gathered(P("tp", ("dp", "sp"))) == P("tp", None) and gathered(P(("sp", "tp"))) == P("tp")
    assert default_spec((512, 1024), mesh) == P(None, ("dp", "sp", "tp"))
    assert default_spec((511, 1028), mesh) == P(None, ("dp", "sp"))
    assert default_spec((510, 1021), mesh) == P("sp", None)
    assert default_spec((511, 1021), mesh) == P() and default_spec((8, 8), mesh) == P()


def test_weights_by_rules(make_mesh):
    """What peft wraps keeps its rule; replication is reported, dead rules are refused."""
    rule, mesh = (r"to_q\.weight$", P(None, ("dp", "sp"))), make_mesh(2, 4, 1)
    shapes = {"to_q.base_layer.weight": ((512, 512), 1 << 20), "to_q.lora_A.default.weight": ((8, 512), 1 << 14)}
    assert [*plan_weights(shapes, (rule,), mesh)[0].values()] == [rule[1], P()]
    shapes = {"blocks.*.to_q.weight": ((512, 512), 4 << 20), "odd.weight": ((511, 1021), 2 << 20), "b": ((4,), 16)}
    _, coverage = plan_weights(shapes, (rule,), mesh)
    assert coverage.replicated == {"odd.weight": 2 << 20}
    assert coverage.bytes_per_chip == (4 << 20) // 8 + (2 << 20) + 16
    with pytest.raises(ValueError, match="dead rules"):
        plan_weights(shapes, ((r"to_qkv\.weight$", P("tp")),), mesh)


@pytest.mark.parametrize("degrees", [(1, 8, 1), (1, 4, 2), (2, 4, 1)])
def test_weights_by_output_stay_where_they_are_in_a_program_with_more_on_dp(make_mesh, degrees):
    mesh, rules = make_mesh(*degrees), ((r"linear\.weight$", BY_OUTPUT),)
    (spec,) = plan_weights({"norm.linear.weight": ((48, 8), 768)}, rules, mesh)[0].values()
    parts = [NamedSharding(regrouped(mesh, dp), spec).devices_indices_map((48, 8)) for dp in (degrees[0], 2, 4)]
    assert parts[0] == parts[1] == parts[2] and len({*map(str, parts[0].values())}) == 8
