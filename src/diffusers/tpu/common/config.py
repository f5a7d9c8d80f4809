"""The user's settings: `TPUConfig` of a pipeline, and the environment variables."""

import operator
import os
from dataclasses import dataclass


ACCELERATORS = ("cuda", "tpu", "xla", "jax")  # names of devices that mean the TPU on the TPU path
MODES = ("auto", "off", "cpu", "tpu")
GLUES = ("auto", "resident", "host")
PRECISIONS = ("highest", "high", "default")
ATTENTIONS = ("auto", "kernel", "online", "splash", "reference")
LAYERS = ("auto", "kernel", "xla")
LINEAR = ("bfloat16", "int8", "fp8")


@dataclass(frozen=True)
class Environment:
    """The process-wide settings."""

    mode: str  # DIFFUSERS_TPU: "auto" (a TPU if one is here), "off", "cpu" (simulated chips) or "tpu" (whatever this host shows of it)
    simulated_devices: int  # DIFFUSERS_TPU_DEVICES, how many chips "cpu" simulates
    mesh: tuple[int, int, int] | None  # DIFFUSERS_TPU_MESH, dp,sp,tp of pipelines whose TPUConfig names none
    cache_dir: str | None  # DIFFUSERS_TPU_CACHE, where compiled programs are kept between processes; "off" keeps none
    platforms: str = ""  # JAX_PLATFORMS, the platforms that JAX may run on, in its order; "" leaves it to JAX

    @property
    def leaves_tpu_out(self) -> bool:
        """Whether JAX_PLATFORMS is set, without "tpu"."""
        return bool(self.platforms) and "tpu" not in self.platforms.split(",")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, one per host; None: not given."""

    coordinator: str | None = None  # JAX_COORDINATOR_ADDRESS, HOST:PORT of the first process, the port free there
    count: int | None = None  # JAX_NUM_PROCESSES
    number: int | None = None  # JAX_PROCESS_ID, from 0

    @property
    def any(self) -> bool:
        return self != Processes()

    @property
    def complete(self) -> bool:
        return None not in (self.coordinator, self.count, self.number)

    def checked(self) -> "Processes":
        """Returns self. Raises ValueError if a value is missing, or the values are inconsistent."""
        if not self.complete or not 0 <= self.number < self.count or not self.coordinator.rpartition(":")[2].isdigit():
            raise ValueError(
                "expected JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and a smaller JAX_PROCESS_ID, or none of them, got"
                f" {self.coordinator!r}, {self.count} and {self.number}"
            )
        return self


@dataclass(frozen=True)
class TPUConfig:
    """How one pipeline runs on the TPU.

    Args:
        mesh: degrees `(dp, sp, tp)`: guidance branches and prompts, sequence, heads and features. None chooses: as many guidance
            branches on dp as divide the chips, if the pipeline calls its denoiser once per branch; tp only if weights do not fit
            otherwise; the rest sp.
        regroup: if `mesh` is None, a denoiser's call with a batch (images, guidance branches) uses the largest dp that divides it
            and dp x sp, and the rest as sp. Weights are not moved.
        glue: where schedulers and guidance arithmetic run. "resident" keeps latents on the device for the whole loop, "host" moves
            them once each way per step; "auto" is resident for pipelines with a plan, else host.
        scan: trace a run of equal blocks once and scan it over stacked weights.
        matmul_precision: of float32 products ("highest" is true float32; bfloat16 products are not affected).
        convolution_precision: of float32 convolutions. Three products of bfloat16 numbers ("high") have errors of 1e-5, where torch
            on CUDA rounds to TF32 (3e-4) unless told otherwise; "highest" takes six.
        attention: the attention of one chip. "auto": our kernel on a TPU; the reference on simulated chips and, with one warning,
            for calls that the kernel does not support. For a kernel by name such calls are an error: "kernel"; "online", the kernel
            with a running maximum only; "splash", JAX's own; "reference".
        attention_blocks: queries, keys, and keys of one product of the kernel's blocks; None: tuned, or by a cost model.
        attention_smoothing: heads whose scores have no small bound may use one around the mean key, which also needs no running
            maximum. Values are the same either way.
        attention_window: (left, right): in the denoiser's self-attention, queries see only so many tokens before and after them.
        attention_sparsity: the share of a video that its tokens do not see: tiles that are far from them in time and space.
            Attention takes so much less time, with a loss (examples/tpu/CACHES.md). 0: they see all, as always in calls that are
            differentiated.
        attention_sparse_below: sparse attention applies in denoising steps whose timestep, of 1,000, is at most this one.
        attention_ring: how many of the chips that split the sequence pass keys around a ring; None: as few as heads allow.
        attention_tally: `report(pipe)` says which softmax modes heads took; each call of attention then waits for the host.
        layers: large linear layers in bfloat16, and norm with rotation. "auto": our kernels on a TPU; "kernel": also elsewhere,
            interpreted; "xla": the compiler's, and upstream's attention processors.
        linear: products of the denoiser's linear layers in bfloat16 that have some two thousand tokens a chip: "bfloat16"; "int8"
            (v5e, v5p, v6e) or "fp8" (v7x) at twice the rate and with a loss (examples/tpu/CACHES.md): inputs and weights become
            8-bit numbers, with a scale per token and per output channel. Calls that are differentiated stay in bfloat16.
        sparse_cores: exchanges between chips run on the SparseCores (v5p, v6e; on v7x gathers of weights) while the core computes.
            If False, and on v5e, only all-to-alls run while it computes.
        host: names of components that stay on the host and run there as upstream's, such as ("text_encoder",).
        hbm_gib: HBM of a chip; None: that of its generation, simulated chips have no limit. If the weights of all components do not
            fit, those not in use stay on the host.
        reserve_gib: the part of `hbm_gib` that weights leave to activations and programs; None: a quarter.
        programs: how many compiled programs of a model are kept in memory. The least recently used are dropped (`report(pipe)`
            counts them) and later loaded from the cache folder, or compiled, again.
        program_gib: the part of a chip's HBM that these programs' code may take; None: a sixteenth, simulated chips have no limit.
    """

    mesh: tuple[int, int, int] | None = None
    regroup: bool = True
    glue: str = "auto"
    scan: bool = True
    matmul_precision: str = "highest"
    convolution_precision: str = "high"
    attention: str = "auto"
    attention_blocks: tuple[int, int, int] | None = None
    attention_smoothing: bool = True
    attention_window: tuple[int, int] | None = None
    attention_sparsity: float = 0.0
    attention_sparse_below: float = 900.0
    attention_ring: int | None = None
    attention_tally: bool = False
    layers: str = "auto"
    linear: str = "bfloat16"
    sparse_cores: bool = True
    host: tuple[str, ...] = ()
    hbm_gib: float | None = None
    reserve_gib: float | None = None
    programs: int = 64
    program_gib: float | None = None

    def __post_init__(self):
        if self.mesh is not None:
            object.__setattr__(self, "mesh", parse_mesh(self.mesh))
        choices = {"glue": GLUES, "attention": ATTENTIONS, "layers": LAYERS, "linear": LINEAR}
        for name, allowed in {**choices, "matmul_precision": PRECISIONS, "convolution_precision": PRECISIONS}.items():
            self._expect(name, getattr(self, name) in allowed, f"to be one of {allowed}")
        given = self.attention_blocks, self.attention_window, self.attention_ring, self.host
        blocks, window, ring, host = (None if value is None else _as_tuple(value) for value in given)
        is_right = blocks is None or (_integers(blocks, 3, 1) and not blocks[1] % blocks[2])
        self._expect("attention_blocks", is_right, "of three positive integers, queries, keys and a divisor of those")
        is_right = window is None or _integers(window, 2, 0)
        self._expect("attention_window", is_right, "of two integers, tokens before and after")
        self._expect("attention_ring", ring is None or _integers(ring, 1, 1), "of a positive integer")
        self._expect("programs", _integers((self.programs,), 1, 1), "of a positive integer")
        self._expect("host", all(isinstance(name, str) for name in host), "of names of components")
        for name in ("regroup", "scan", "attention_smoothing", "attention_tally", "sparse_cores"):
            self._expect(name, isinstance(getattr(self, name), bool), "to be True or False")
        for name in ("hbm_gib", "reserve_gib", "program_gib"):
            value = getattr(self, name)
            is_right = value is None or (isinstance(value, (int, float)) and value >= 0)
            self._expect(name, is_right, "of GiB, a number of at least 0")
        for name, most in (("attention_sparsity", 0.95), ("attention_sparse_below", 1000)):
            value = getattr(self, name)
            is_right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
            self._expect(name, is_right, f"of a number from 0 to {most}")
        for name, value in (("attention_blocks", blocks), ("attention_window", window), ("host", host)):
            object.__setattr__(self, name, value)

    def _expect(self, name: str, is_right: bool, what: str):
        if not is_right:
            raise ValueError(f"expected TPUConfig.{name} {what}, got {getattr(self, name)!r}")


def _integers(values: tuple, count: int, least: int) -> bool:
    return len(values) == count and all(type(value) is int and value >= least for value in values)


def names_accelerator(device) -> bool:
    """Whether `device` (a name, a torch.device, an index) is an accelerator, which means the TPU on the TPU path."""
    kind = getattr(device, "type", device)
    if isinstance(kind, str):
        return kind.partition(":")[0] in (*ACCELERATORS, "privateuseone")  # the last is torchax's
    return isinstance(device, int) and not isinstance(device, bool)


def _as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def parse_mesh(value) -> tuple[int, int, int]:
    """`"2,4,1"` or `(2, 4, 1)` as `(dp, sp, tp)`. Raises ValueError for anything but three positive integers."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        degrees = tuple(int(part) if isinstance(part, str) else operator.index(part) for part in parts)
    except (TypeError, ValueError):
        degrees = ()
    if len(degrees) != 3 or min(degrees) < 1:
        raise ValueError(f"expected a mesh of three positive integers dp,sp,tp such as 2,4,1, got {value!r}")
    return degrees


def read_environment() -> Environment:
    """The environment variables, checked. Raises ValueError that lists what is allowed."""
    mode = os.environ.get("DIFFUSERS_TPU", "auto").strip().lower() or "auto"
    if mode not in MODES:
        raise ValueError(
            f"expected DIFFUSERS_TPU to be one of: auto (use a TPU if one is here), off (plain diffusers), "
            f"cpu (the TPU path on simulated chips), tpu (a TPU, whatever this host shows of it); got {mode!r}"
        )
    devices = os.environ.get("DIFFUSERS_TPU_DEVICES", "8")
    if not devices.isdigit() or int(devices) < 1:
        raise ValueError(f"expected DIFFUSERS_TPU_DEVICES to be a positive integer (default 8), got {devices!r}")
    mesh = os.environ.get("DIFFUSERS_TPU_MESH")
    default_cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diffusers-tpu")
    cache = os.environ.get("DIFFUSERS_TPU_CACHE") or default_cache
    platforms = os.environ.get("JAX_PLATFORMS", "").strip().lower()
    mesh, cache = parse_mesh(mesh) if mesh else None, None if cache == "off" else cache
    found = Environment(mode, int(devices), mesh, cache, platforms)
    if mode == "tpu" and found.leaves_tpu_out:
        raise ValueError(
            f"expected JAX_PLATFORMS to name tpu, or not to be set, with DIFFUSERS_TPU=tpu, got {platforms!r}"
        )
    return found


def read_processes() -> Processes:
    """JAX's variables about the processes of a run. Raises ValueError for one that should be a number and is not."""
    given = {name: os.environ.get(name) or None for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
    for name, text in given.items():
        if text is not None and not text.isdigit():
            raise ValueError(f"expected {name} to be a number of at least 0, got {text!r}")
    numbers = (text and int(text) for text in given.values())
    return Processes(os.environ.get("JAX_COORDINATOR_ADDRESS") or None, *numbers)
