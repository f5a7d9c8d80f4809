"""Stage 6, executables: compiled for these chips by a process without chips, then loaded and run here."""

import os
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from ... import TPUConfig, install, planner
from ...chips.figures import find_topology
from ...chips.mesh import make_mesh
from ...planner import SIMULATED, ahead
from ...planner.aot import Compiler, run_in_child
from . import wan
from .chips import devices_here, topology_of
from .programs import Program


def program_of(devices: tuple, side: int) -> Program:
    """A program of a product and a sum on one device."""

    def function(x, y):
        return jnp.tanh(x @ y).sum(0)

    return Program(
        function, (jax.ShapeDtypeStruct((side, side), jnp.float32),) * 2, make_mesh(tuple(devices[:1]), (1, 1, 1))
    )


def devices_of(topology: str) -> tuple:
    return devices_here() if topology == SIMULATED else Compiler(find_topology(topology)).devices


def compile_ahead(argument: dict, progress) -> dict:
    """Runs in the compiler's process: compiles the program for the topology and writes it to the file."""
    compiled = program_of(devices_of(argument["topology"]), argument["side"]).compile()
    Path(argument["file"]).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return {}


def run(rows, request: dict):
    folder = Path(request["cache"], "ahead")
    folder.mkdir()
    devices = devices_here()
    topology = request["topology"] if request["simulated"] else topology_of(devices, request).name
    with rows.trying("an executable made ahead"):
        check_program(rows, request, devices, topology, folder / "program")
    with rows.trying("a model's executables made ahead"):
        check_model(rows, request, len(devices), topology, folder)


def check_program(rows, request: dict, devices: tuple, topology: str, file: Path):
    variables = {"DIFFUSERS_TPU": "cpu"} if topology == SIMULATED else {}
    argument = {"topology": topology, "side": request["side"], "file": str(file)}
    how = {"seconds": request["seconds"] / 2, "schedules": False, "environment": variables}
    run_in_child(f"{__name__}:compile_ahead", argument, **how)
    rows.add("made by another process", file.stat().st_size, unit="bytes")
    program = program_of(devices, request["side"])
    rng = np.random.default_rng(0)
    arguments = program.placed([rng.standard_normal(x.shape).astype(np.float32) for x in program.arguments])
    loaded = load(file, devices)
    rows.add("it is loaded")
    here = program.compile()
    rows.equal("the same bits as compiled here", bool((loaded(*arguments) == here(*arguments)).all()), True)
    for name, one in (("loaded", loaded), ("compiled here", here)):
        with rows.trying(f"as_text of what was {name}"):
            rows.add(f"as_text of what was {name}", len(one.as_text()), unit="characters")


def load(file: Path, devices: tuple):
    """The executable of a file, on the first device."""
    return serialize_executable.deserialize_and_load(*pickle.loads(file.read_bytes()), devices[0].client, [devices[0]])


def check_model(rows, request: dict, chips: int, topology: str, folder: Path):
    """Another process compiles all programs of stage 7's model; this process must compile none."""
    of_model = wan.model_request(request)
    pipe, size = wan.make_pipeline(of_model["heads"]), wan.size_of(of_model, chips)
    pipe.save_pretrained(folder / "model")
    config = {"config": of_model["config"], "dtype": "float32", "arguments": size}
    made = ahead.make(planner.request_of(str(folder / "model"), topology, **config), folder)
    rows.add("a model's programs made ahead", len(made["programs"]), not made["left"], note=" ".join(made["left"]))
    os.environ["DIFFUSERS_TPU_CACHE"] = str(folder)
    loaded = type(pipe).from_pretrained(folder / "model")
    loaded.set_progress_bar_config(disable=True)
    install(loaded, TPUConfig(**of_model["config"]))
    wan.call(loaded, size)
    found = wan.compilations(loaded)
    rows.equal("programs that this process compiled", sum(found.values()), 0, note=str(found))
