"""Which processes make this run, and joining them: `jax.distributed.initialize`, once, before JAX's first device is asked for.

Who they are is said by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or found by JAX in the cluster that a TPU
host is in (TPU VM, GKE, Slurm, Open MPI, Kubernetes). JAX_NUM_PROCESSES=1: this process is alone, whatever the cluster says.
"""

import os
import socket
import sys
from dataclasses import dataclass

from ..config import Processes, read_processes


# Seconds. JAX's runtime takes a process for dead after HEARTBEAT without a sign of life; `watch` mostly knows at once.
HEARTBEAT = 20
# From the first process that has come to its end until the last: a script may write its results on one of them meanwhile.
LEAVING = 300


@dataclass(frozen=True)
class Run:
    """A run of several processes that this one is a part of: its `number`, the `names` of all, "process 1 of 2 (HOST, pid 7)"."""

    number: int
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)


_joined: Run | None = None
_alone: set[str] = set()  # platforms of which it is known that this process is alone


def joined() -> Run | None:
    """The run of several processes that this one has joined; None: it is alone, or JAX was not asked for devices yet."""
    return _joined


def process_count() -> int:
    """How many processes make this run, as far as it was joined."""
    return 1 if _joined is None else _joined.count


def number(platform: str) -> int:
    """This process's number in its run, before it has joined too: 0 is the one that writes results."""
    if _joined is not None:
        return _joined.number
    found = find(platform)
    return 0 if found is None else found.number


def is_main(platform: str) -> bool:
    """Whether this process is the one that writes results."""
    return number(platform) == 0


def find(platform: str) -> Processes | None:
    """The processes of the run that this one belongs to; None: it is alone.

    Raises ValueError for variables that do not say enough. On simulated chips ("cpu") they alone say it.
    """
    given = read_processes()
    if given.count == 1:
        return None
    if platform == "cpu" or given.complete:
        return given.checked() if given.any else None
    found = _of_cluster()
    if found is None:
        return given.checked() if given.any else None
    count, own = given.count or found.count, found.number if given.number is None else given.number
    return None if count == 1 else Processes(given.coordinator, count, own)


def _of_cluster() -> Processes | None:
    """What JAX finds out where it runs, in its order (JAX 0.10.2, `jax/_src/clusters`)."""
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        try:
            if not kind.opt_in_only_method and kind.is_env_present():
                return Processes(None, int(kind.get_process_count()), int(kind.get_process_id()))
        except OSError as error:  # the metadata server of a TPU VM does not answer: JAX would end the program
            from ...utils import logging

            logging.get_logger(__name__).warning(
                f"this host is taken for the only one of the run: {kind.__name__} cannot be asked ({error}). Several: set"
                " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; one: JAX_NUM_PROCESSES=1"
            )
    return None


def join(platform: str):
    """Join the other processes of this run, if there are any; the first call does it.

    Raises:
        ValueError: the variables do not say enough.
        RuntimeError: JAX runs already, without the others.
    """
    global _joined
    if _joined is not None or platform in _alone:
        return
    if "jax" not in sys.modules or not sys.modules["jax"].distributed.is_initialized():  # a script may have called it
        found = find(platform)
        if found is None:
            _alone.add(platform)
            return
        _initialize(platform, found)
    from jax._src.distributed import global_state as state

    if state.num_processes == 1:
        _alone.add(platform)
        return
    _joined = _acquainted(state)


def _initialize(platform: str, found: Processes):
    import jax

    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It turns SIGTERM into a notice that nobody here reads: a process that is asked to end would go on.
    jax.config.update("jax_enable_preemption_service", False)
    given = read_processes()
    try:
        jax.distributed.initialize(
            *((given.coordinator, found.count, found.number) if given.any else ()),
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=LEAVING,
            **({"cluster_detection_method": "deactivate"} if given.complete else {}),
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"expected to join the {found.count} processes of this run as process {found.number}, got: {error} Load the"
            " pipeline before other code starts JAX, see that all processes are started and reach the first one's address, or"
            " set JAX_NUM_PROCESSES=1 for a run of this host alone."
        ) from error


def _acquainted(state) -> Run:
    """All processes' names, one seed for what they draw, and each watched by the others."""
    from . import agreement, watch

    agreement.start(state.client, state.process_id, state.num_processes)
    own = f"process {state.process_id} of {state.num_processes} ({socket.gethostname()}, pid {os.getpid()})"
    run = Run(state.process_id, tuple(agreement.told(own)))
    watch.start(run, state.coordinator_address)
    agreement.same_draws()
    return run
