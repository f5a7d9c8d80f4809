"""Stage 0, the host: what a TPU needs from it. Imports only the standard library, as JAX or torch may be what fails."""

import glob
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import stat
import time
from pathlib import Path


GOOGLE = "0x1ae0"  # the vendor on the PCI bus
METADATA = ("169.254.169.254", 80)  # of Google's machines; the response is not used
PACKAGES = "diffusers torch torchax jax jaxlib libtpu transformers accelerate numpy flax".split()
# Shown with their values, which identify nobody. Of `NAMED`, which name hosts or folders, only whether they are set is shown.
SHOWN = (
    "DIFFUSERS_TPU DIFFUSERS_TPU_DEVICES DIFFUSERS_TPU_MESH JAX_PLATFORMS JAX_ENABLE_X64 JAX_DEFAULT_MATMUL_PRECISION XLA_FLAGS"
    " LIBTPU_INIT_ARGS TPU_ACCELERATOR_TYPE TPU_TOPOLOGY TPU_WORKER_ID TPU_CHIPS_PER_HOST_BOUNDS TPU_HOST_BOUNDS TPU_PROCESS_BOUNDS"
    " TPU_CHIPS_PER_PROCESS_BOUNDS TPU_VISIBLE_CHIPS TPU_VISIBLE_DEVICES TPU_SKIP_MDS_QUERY"
).split()
NAMED = "TPU_WORKER_HOSTNAMES TPU_PROCESS_ADDRESSES TPU_LIBRARY_PATH TPU_NAME JAX_COORDINATOR_ADDRESS JAX_COMPILATION_CACHE_DIR".split()


def run(rows, request: dict):
    real = not request["simulated"]
    for part in (chips_on_the_bus, device_nodes, memory, software, variables, metadata_server):
        with rows.trying(part.__name__.replace("_", " ")):
            part(rows, request, real)


def chips_on_the_bus(rows, request, real: bool):
    figures = json.loads(Path(__file__).parents[2].joinpath("chips", "figures.json").read_text())
    known = {number: name for name, chip in figures.items() for number in chip.get("pci_devices", ())}
    vendors = (path for path in Path("/sys/bus/pci/devices").glob("*/vendor") if path.read_text().strip() == GOOGLE)
    found = [path.with_name("device").read_text().strip() for path in vendors]
    named = sorted(f"{number} {known[number]}" for number in found if number in known)
    # Network cards, disks, or a new chip.
    others = sorted(number for number in found if number not in known)
    status = bool(named) if real else "not applicable"
    rows.add("TPUs on the PCI bus", named, status, expected=sorted(known), note=f"others of Google: {others}")


def device_nodes(rows, request, real: bool):
    nodes = sorted(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))
    holders = {node: [] for node in nodes}
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if (node := os.readlink(link)) in holders:
                holders[node].append(Path(link).parents[1].joinpath("comm").read_text().strip())
        except OSError:  # the process ended, or is another user's
            continue
    if not nodes:
        rows.add("device nodes", [], False if real else "not applicable", note="neither accelN nor vfio/N in dev")
    for node in nodes:
        status = os.stat(node)
        owner = f"{_whose(status.st_uid, [os.getuid()])}:{_whose(status.st_gid, os.getgroups())}"
        may = os.access(node, os.R_OK | os.W_OK)
        note = f"{stat.filemode(status.st_mode)} {owner}; held by {holders[node] or 'no process that is seen'}"
        rows.add(f"device node {node.removeprefix('/dev/')}", may, may and not holders[node], expected=True, note=note)


def _whose(number: int, ours: list[int]) -> str:
    """A word for a user's or a group's number, without its name."""
    return "root" if number == 0 else "ours" if number in ours else "another"


def memory(rows, request, real: bool):
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    measured = "unlimited" if unlimited else soft
    rows.add("locked memory", measured, unlimited or not real, expected="unlimited", unit="bytes", note="ulimit -l")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = re.search(r"\[(\w+)\]", huge.read_text())[1] if huge.exists() else None
    note = "transfers are slower without"
    rows.add("transparent hugepages", mode, mode == "always" or not real, expected="always", note=note)
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", Path("/proc/meminfo").read_text(), re.M))
    for name, kilobytes in sizes.items():
        rows.add(name, round(int(kilobytes) / 2**20, 1), unit="GiB")
    rows.add("processors", os.cpu_count())
    for name, folder in (("home", Path.home()), ("temporary folder", Path("/tmp"))):
        free, least = shutil.disk_usage(folder).free / 2**30, request["least_gib"]
        rows.add(f"free disk, {name}", round(free, 1), free >= least or not real, limit=least, unit="GiB")


def software(rows, request, real: bool):
    note = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    rows.add("Python", platform.python_version(), note=note)
    for name in PACKAGES:
        version = _version(name)
        needed = name in ("diffusers", "torch", "torchax", "jax", "jaxlib") or (real and name == "libtpu")
        rows.add(f"version of {name}", version, version is not None or not needed)
    rows.equal("torch_xla", _version("torch_xla"), None, note="whoever imports it first holds the chips")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def variables(rows, request, real: bool):
    rows.add("variables", {name: os.environ[name] for name in SHOWN if name in os.environ})
    rows.add("variables that are set, values left out", [name for name in NAMED if name in os.environ])


def metadata_server(rows, request, real: bool):
    start = time.perf_counter()
    try:
        with socket.create_connection(METADATA, timeout=2) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\nMetadata-Flavor: Google\r\n\r\n")
            connection.recv(1)
    except OSError as error:
        status = False if real else "not applicable"
        return rows.add("metadata server", None, status, unit="ms", note=f"{type(error).__name__}: not reached")
    rows.add("metadata server", round(1e3 * (time.perf_counter() - start), 2), limit=None, unit="ms")
