"""Stage 3, transfers: to and from a chip, the cost of a launch, and which arrays share memory."""

import statistics
import timeit

import jax
import jax.numpy as jnp
import numpy as np

from .chips import devices_here


DISPATCH = "an empty dispatch"


def seconds(function, repeats: int) -> float:
    """The median seconds of `repeats` calls."""
    return statistics.median(timeit.repeat(function, number=1, repeat=repeats))


def run(rows, request: dict):
    device, size = devices_here()[0], request["mib"] << 20
    on_host = np.arange(size // 4, dtype=np.float32)
    to = seconds(lambda: jax.device_put(on_host, device).block_until_ready(), request["repeats"])
    rows.add("to the device", size / to / 1e9, unit="GB/s", note=f"{request['mib']} MiB")
    # One for each repeat, as an array caches its copy on the host.
    arrays = iter([jax.device_put(on_host, device) + n for n in range(request["repeats"])])
    back = seconds(lambda: np.asarray(next(arrays)), request["repeats"])
    rows.add("from the device", size / back / 1e9, unit="GB/s", note=f"{request['mib']} MiB")
    here, there = jax.device_put(on_host, device), np.asarray(jax.device_put(on_host, device) + 0)
    rows.equal("bytes after both ways", bool((there == on_host).all()), True)

    add, x = jax.jit(lambda x: x + 1), jax.device_put(jnp.zeros(()), device)
    add(x).block_until_ready()
    launches = request["dispatches"]
    rows.add(DISPATCH, seconds(lambda: add(x), launches), unit="s", note=f"median of {launches}")
    round_trip = seconds(lambda: float(add(x)), launches // 10)
    rows.add("a round trip", round_trip, unit="s", note="a launch and its value")

    donated = jax.device_put(on_host, device) * 1
    before = donated.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    rows.equal("a donated argument is the result's memory", after.unsafe_buffer_pointer() == before, True)
    rows.equal("a donated argument is gone", donated.is_deleted(), True)
    first = float(here[0])
    on_host[0] = first + 1
    name, note = "an array does not see later writes to the host's", "where it does, memory is shared"
    rows.add(name, float(here[0]) == first, note=note)
