"""Finds the processes of this run and joins them: `jax.distributed.initialize`, once, before JAX's devices are used.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them, or JAX finds them in the cluster of a TPU host (TPU VM,
GKE, Slurm, Open MPI, Kubernetes). With JAX_NUM_PROCESSES=1 this process is alone, whatever the cluster says.
"""

import functools
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from ...common import notices
from ...common.config import Processes, read_processes
from . import agreement, watch


# Seconds. JAX's runtime considers a process dead after HEARTBEAT without a heartbeat; a host may pause for PAUSE while it is
# migrated, the longest that Google announces for maintenance.
PAUSE = 60
HEARTBEAT = 90
# Between the ends of the first and the last process: a script may still write its results on one of them.
LEAVING = 300
WORTH_A_WORD = 10.0  # of waiting for the others to join
ASKING = 15.0  # for the metadata server: JAX would ask six times for a minute each


class Run(NamedTuple):
    """The run of several processes to which this one belongs: its `number`, the `names` of all, "process 1 of 2 (HOST, pid 7)"."""

    number: int
    names: tuple[str, ...]


_joined: Run | None = None
_alone: set[str] = set()  # platforms on which this process is known to be alone


def process_count() -> int:
    """The number of processes of this run; 1 before they are joined."""
    return 1 if _joined is None else len(_joined.names)


def number(platform: str) -> int:
    """This process's number in its run, also before it has joined; number 0 writes results."""
    if _joined is not None:
        return _joined.number
    found = find(platform)
    return 0 if found is None else found.number


def find(platform: str) -> Processes | None:
    """The processes of the run that this one belongs to; None: it is alone.

    Raises ValueError for incomplete variables. On simulated chips ("cpu") only the variables count.
    """
    given = read_processes()
    if given.count == 1:
        return None
    found = None if platform == "cpu" or given.complete else _of_cluster(given.number)
    if found is None:
        return given.checked() if given.any else None
    count = given.count or found.count
    return None if count == 1 else Processes(given.coordinator, count, found.number)


@functools.cache
def _of_cluster(number: int | None) -> Processes | None:
    """What JAX's cluster detection finds, in JAX's order (JAX 0.10.2, `jax/_src/clusters`); cached. `number`: if it was given."""
    from jax._src.clusters import ClusterEnv

    count = "several"
    for kind in ClusterEnv._cluster_types:
        try:
            if not kind.opt_in_only_method and _in_time(kind.is_env_present):
                count = int(_in_time(kind.get_process_count))
                if number is None:
                    number = 0 if count == 1 else int(_in_time(kind.get_process_id))
                return Processes(None, count, number)
        except ValueError as error:
            raise ValueError(
                f"expected to hear which of the {count} processes of this run this one is, got nothing from {kind.__name__}"
                f" ({error}). Set TPU_WORKER_ID (from 0, another on each host) beside TPU_WORKER_HOSTNAMES, or JAX_PROCESS_ID; a"
                " run of this host alone: JAX_NUM_PROCESSES=1"
            ) from error
        except (OSError, RuntimeError) as error:
            # A TPU VM's metadata server does not answer: JAX would end the program.
            notices.warn(
                f"this host is taken for the only one of the run: {kind.__name__} cannot be asked ({error}). Several: set"
                " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; one: JAX_NUM_PROCESSES=1"
            )
    return None


def _in_time(ask: Callable):
    """The result of `ask()`. Raises TimeoutError after `ASKING`; the call then continues in a daemon thread."""
    answer = Future()

    def run():
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="diffusers-tpu asks the cluster", daemon=True)
    thread.start()
    thread.join(ASKING)
    if not answer.done():
        raise TimeoutError(f"no answer within {ASKING:.0f} s")
    return answer.result()


def join(platform: str):
    """Joins the other processes of this run, if there are any; later calls do nothing.

    Raises:
        ValueError: the variables are incomplete.
        RuntimeError: JAX has already started without the others, or they cannot be reached.
    """
    global _joined
    if _joined is not None or platform in _alone:
        return
    if "jax" not in sys.modules or not sys.modules["jax"].distributed.is_initialized():  # a script may have called it
        if (found := find(platform)) is None:
            _alone.add(platform)
            return
        _initialize(platform, found)
    from jax._src.distributed import global_state as state

    if state.num_processes == 1:
        _alone.add(platform)
        return
    own = f"process {state.process_id} of {state.num_processes} ({socket.gethostname()}, pid {os.getpid()})"
    run = Run(state.process_id, agreement.start(state.client, state.process_id, state.num_processes, own))
    watch.start(run, state.coordinator_address, agreement.of_first)
    agreement.same_draws()
    _joined = run


def _initialize(platform: str, found: Processes):
    import jax

    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It turns SIGTERM into a notice that nothing here reads: SIGTERM would not end the process.
    jax.config.update("jax_enable_preemption_service", False)
    given = read_processes()

    def missing(seconds: float) -> str:
        return (
            f"process {found.number} waits for the {found.count - 1} other processes of this run since {seconds:.0f} s: each host"
            " starts the same script. JAX_NUM_PROCESSES=1 runs this host alone"
        )

    try:
        with notices.warn_while(missing, WORTH_A_WORD):
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
