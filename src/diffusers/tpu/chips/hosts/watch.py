"""When one process of a run ends, the others end at once and print which one it was and its error.

Inside a program chips wait for each other, and no exception reaches the process. JAX's runtime ends it when another process's
heartbeats stop, 90 s later, and names a number only. So each process has a TCP connection to the first one, which the operating
system closes when the process ends; keep-alive probes find a lost host and keep firewalls from dropping an idle connection. A line
is sent over it: `bye` before a script ends, `failed` with the error of a process that fails. Who has to end prints the reason and
exits with status 1.
"""

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable


PROBES = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 8,
}  # a lost host is found after 90 s, as by JAX's heartbeats
FIRST_WORD = 30.0  # seconds that a process has for connecting
HEARD = 1.0  # seconds for the others to read the news before the first one ends, and JAX's runtime with it
FROM_OTHERS = 2.0  # seconds for the news that another process's end is the reason of an error
LONGEST = 2000  # letters of an error


class Watch:
    """This process's connections: the first one's to all others, theirs to the first.

    Attributes:
        left: numbers of the processes whose scripts have come to their end.
        ending: this process ends in an error of its own, which the others know.
    """

    def __init__(self, run, connections: dict[int, socket.socket]):
        self.run, self.connections = run, connections
        self.left: set[int] = set()
        self.ending = False
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="diffusers-tpu watches processes", daemon=True).start()

    def tell(self, line: str, but: int | None = None):
        """Send a line over every connection."""
        with self._sending:
            for number, connection in self.connections.items():
                if number != but:
                    try:
                        connection.sendall(line.encode() + b"\n")
                    except OSError:  # it is gone: who listens to it knows
                        pass

    def _listen(self):
        ready, lines = selectors.DefaultSelector(), {}
        for number, connection in self.connections.items():
            ready.register(connection, selectors.EVENT_READ, number)
            lines[number] = b""
        while ready.get_map():
            for key, _ in ready.select():
                try:
                    data = key.fileobj.recv(65536)
                except OSError as error:
                    data = self._lost(key.data, f"its host does not answer ({error.strerror})")
                if not data:
                    ready.unregister(key.fileobj)
                    self._lost(key.data, "it was killed, or its host is gone; its own output may say more")
                *whole, lines[key.data] = (lines[key.data] + data).split(b"\n")
                for line in whole:
                    self._heard(line.decode(errors="replace"), key.data)

    def _heard(self, line: str, sender: int):
        word, _, rest = line.partition(" ")
        number, _, text = rest.partition(" ")
        if self.run.number == 0:
            self.tell(line, but=sender)
        if word == "bye":
            self.left.add(int(number))
        else:
            self._end(int(number), text)

    def _lost(self, number: int, why: str) -> bytes:
        if number not in self.left:
            if self.run.number == 0:
                self.tell(f"failed {number} {why}", but=number)
            self._end(number, why)
        return b""

    def _end(self, number: int, text: str):
        if self.ending:
            return
        me, other = self.run.names[self.run.number], self.run.names[number]
        said = text.replace("\\n", "\n  ")
        sys.stderr.write(f"diffusers on TPU: {other} has ended: {said}\n{me} cannot go on without it and ends too.\n")
        self._exit(1)

    def _exit(self, status: int):
        """JAX's runtime would wait for the others, and the main thread may be inside of a program that does so for good."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self.run.number == 0:
            time.sleep(HEARD)
        os._exit(status)

    def fail(self, text: str, status: int):
        """This process ends in an error: the others are told, and it waits for nobody."""
        if self.run.number in self.left:
            return
        self.ending = True
        line = text[:LONGEST].replace("\n", "\\n")
        self.tell(f"failed {self.run.number} {line}")
        self._exit(status)

    def leave(self):
        """The script has come to its end."""
        if not self.ending and self.run.number not in self.left:
            self.left.add(self.run.number)
            self.tell(f"bye {self.run.number}")


_watch: Watch | None = None


def start(run, coordinator: str, of_first: Callable[[str], str]):
    """Connect with the others, and tell them from here on how this process ends. `of_first`: what the first process gives."""
    global _watch
    _watch = Watch(run, (_accepted if run.number == 0 else _connected)(run, coordinator, of_first))
    former = sys.excepthook

    def told(kind, error, trace):
        time.sleep(FROM_OTHERS)  # another's end may be the reason: then that is said, not this
        former(kind, error, trace)
        failed("".join(traceback.format_exception_only(kind, error)).strip())

    sys.excepthook = told
    atexit.register(_watch.leave)


def failed(text: str, status: int = 1):
    """This process ends now, in an error: the others end too, and say this text. Nothing where it is alone."""
    if _watch is not None:
        _watch.fail(text, status)


def still_there(number: int, what: str):
    """Raises RuntimeError where the process has come to the end of its script, and will not come to `what`."""
    if _watch is not None and number in _watch.left:
        raise RuntimeError(
            f"expected all processes to come to {what}, got the end of the script in {_watch.run.names[number]}. Every process"
            " runs the same script on the same arguments"
        )


def _accepted(run, coordinator: str, of_first) -> dict[int, socket.socket]:
    """The first process's: one from each of the others, who know a word that strangers do not."""
    word, host = secrets.token_hex(16), coordinator.rpartition(":")[0].strip("[]")
    listening = _listening(host)
    listening.settimeout(FIRST_WORD)
    of_first(f"{listening.getsockname()[1]} {word}")
    connections = {}
    with listening:
        while len(connections) < run.count - 1:
            try:
                connection, _ = listening.accept()
                connection.settimeout(FIRST_WORD)
                said, number = _line(connection).split()
            except (TimeoutError, ValueError) as error:
                raise _unconnected(run, "a connection from each", f"{len(connections)} ({error})") from error
            if secrets.compare_digest(said, word) and 0 < int(number) < run.count:
                connections[int(number)] = _probed(connection)
    return connections


def _line(connection: socket.socket) -> str:
    """The first one, and nothing of what may come behind it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 100 and (letter := connection.recv(1)):
        line += letter
    return line.decode()


def _listening(host: str) -> socket.socket:
    """At the address that the others know the first process by; at all of them where that is another machine's name for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        return socket.create_server(("", 0), family=family)


def _connected(run, coordinator: str, of_first) -> dict[int, socket.socket]:
    """Another's: the one to the first process."""
    port, word = of_first("").split()
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        connection = socket.create_connection((host, int(port)), timeout=FIRST_WORD)
        connection.sendall(f"{word} {run.number}\n".encode())
    except OSError as error:
        raise _unconnected(run, f"to reach the first process at {host}, port {port}", str(error)) from error
    return {0: _probed(connection)}


def _probed(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return connection


def _unconnected(run, expected: str, got: str) -> RuntimeError:
    return RuntimeError(
        f"expected {run.names[run.number]} {expected}, got {got}. Processes of a run must reach each other on any port: open the"
        " firewall between their hosts"
    )
