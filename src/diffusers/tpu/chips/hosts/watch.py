"""If one process of a run fails, the others exit at once and print which one it was and its error.

Inside a program chips wait for each other, and no exception reaches the process. JAX's runtime ends it when another process's
heartbeats stop, 90 s later, and names a number only. So each process has a connection to the first one, which the operating system
closes when the process ends. Over it a process sends [number, None] before its script ends, or [number, error] if it fails.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait


IDLE = 60  # seconds, after which a probe keeps firewalls from dropping the connection
FIRST_WORD = 30.0  # seconds that a process has for connecting
HEARD = 1.0  # seconds for the others to read the message before the first one, and JAX's runtime with it, exits
FROM_OTHERS = 2.0  # seconds to wait for a message that another process's failure caused an error
LONGEST = 2000  # most characters of an error


_run = None
_connections: dict[Connection, int] = {}  # the first process's to all others, theirs to the first
_left: set[int] = set()  # numbers of the processes whose scripts have ended
_ending = False  # by an error of its own, which the others have been sent
_sending = threading.Lock()


def start(run, coordinator: str, of_first: Callable[[str], str]):
    """Connects to the others, which are then told how this process ends. `of_first`: `agreement.of_first`.

    Raises RuntimeError if the processes do not reach each other.
    """
    global _run
    try:
        _connections.update(_accepted(run, of_first) if run.number == 0 else _connected(run, coordinator, of_first))
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"expected {run.names[run.number]} to connect with {'the others' if run.number == 0 else run.names[0]}, got {error}."
            " Processes of a run must reach each other on any port: open the firewall between their hosts"
        ) from error
    _run, former = run, sys.excepthook
    threading.Thread(target=_listen, name="diffusers-tpu watches processes", daemon=True).start()

    def told(kind, error, trace):
        time.sleep(FROM_OTHERS)  # another's failure may be the cause: then that is reported instead
        former(kind, error, trace)
        failed("".join(traceback.format_exception_only(kind, error)).strip())

    sys.excepthook = told
    atexit.register(_leave)


def failed(text: str, status: int = 1):
    """Exits with an error: the other processes exit too and print this text. Does nothing without others."""
    global _ending
    if _run is not None and _run.number not in _left:
        _ending = True
        _tell(_run.number, text[:LONGEST])
        _exit(status)


def still_there(number: int, what: str):
    """Raises RuntimeError if the script of process `number` has ended, so that it will not reach `what`."""
    if number in _left:
        raise RuntimeError(
            f"expected all processes to come to {what}, got the end of the script in {_run.names[number]}. Every process runs the"
            " same script on the same arguments"
        )


def _leave():
    if not _ending and _run.number not in _left:
        _left.add(_run.number)
        _tell(_run.number, None)


def _tell(number: int, error: str | None, but: int | None = None):
    """Sends how a process ends over every connection, except that to `but`."""
    with _sending:
        for connection, receiver in [*_connections.items()]:
            if receiver != but:
                with contextlib.suppress(OSError):  # it is closed, which `_listen` notices
                    connection.send_bytes(json.dumps([number, error]).encode())


def _listen():
    while _connections:
        for connection in wait([*_connections]):
            sender = _connections[connection]
            try:
                number, error = json.loads(connection.recv_bytes())
            except (OSError, EOFError):
                del _connections[connection]
                if sender in _left:
                    continue
                number, error = sender, "it was killed, or its host is gone; its own output may say more"
            if _run.number == 0:
                _tell(number, error, but=sender)
            if error is None:
                _left.add(number)
            elif not _ending:
                me, other, error = _run.names[_run.number], _run.names[number], error.replace("\n", "\n  ")
                sys.stderr.write(
                    f"diffusers on TPU: {other} has ended: {error}\n{me} cannot go on without it and ends too.\n"
                )
                _exit(1)


def _exit(status: int):
    """Exits at once: JAX's runtime would wait for the others, and the main thread may be in a program that waits forever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _run.number == 0:
        time.sleep(HEARD)
    os._exit(status)


def _accepted(run, of_first) -> dict[Connection, int]:
    """The first process's connections, one from each of the others, which authenticate by a secret word."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    word, connections = secrets.token_hex(16), {}
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listening:
        listening.settimeout(FIRST_WORD)
        of_first(f"{listening.getsockname()[1]} {word}")
        while len(connections) < len(run.names) - 1:
            connection = _kept(listening.accept()[0])
            with contextlib.suppress(OSError, EOFError, ValueError):  # a stranger's words
                words = connection.recv_bytes(100) if connection.poll(FIRST_WORD) else b""
                said, number = words.decode().split()
                if secrets.compare_digest(said, word) and 0 < int(number) < len(run.names):
                    connections[connection] = int(number)
            if connection not in connections:
                connection.close()
    return connections


def _connected(run, coordinator: str, of_first) -> dict[Connection, int]:
    port, word = of_first("").split()
    connection = _kept(socket.create_connection((coordinator.rpartition(":")[0].strip("[]"), int(port)), FIRST_WORD))
    connection.send_bytes(f"{word} {run.number}".encode())
    return {connection: 0}


def _kept(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    return Connection(connected.detach())
