"""A client of the HTTP API of `diffusers-tpu serve` that needs Python's standard library only."""

import http.client
import json
import os
import select
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit


TOKEN = "DIFFUSERS_TPU_TOKEN"  # of the environment: a graph is saved with its outputs and is no place for it
LOOK_SECONDS = 0.2


class ServerError(RuntimeError):
    """The server returned the error `status`, or was not reached (0)."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Client:
    """A client of one server.

    `look` is called every `LOOK_SECONDS` until a response begins; an exception that it raises closes the connection.
    """

    def __init__(self, address: str, look: Callable[[], None] = lambda: None):
        self.parts, self.look, self.address = urlsplit(address.strip().rstrip("/")), look, address
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise ValueError(f"expected a server's address as http://HOST:PORT, got {address!r}")

    def ask(self, method: str, path: str, fields: dict | None = None, picture: bytes | None = None):
        """Returns the response's body, parsed where it is JSON. Raises ServerError.

        Args:
            fields: sent as JSON, or as a form where there is a picture.
        """
        kind, body = "application/json", None if fields is None else json.dumps(fields)
        if picture is not None:
            kind, body = form(fields, picture)
        headers = {"Content-Type": kind, "Authorization": f"Bearer {os.environ.get(TOKEN, '')}"}
        connect = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(self.parts.hostname, self.parts.port, timeout=10)
        try:
            connection.connect()
            connection.sock.settimeout(None)
            connection.request(method, self.parts.path + path, body, headers)
            while not select.select([connection.sock], [], [], LOOK_SECONDS)[0]:
                self.look()
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"expected a server at {self.address}, got {error or type(error).__name__}. Start it on the TPU's host"
                f" (`diffusers-tpu serve MODEL --port {connection.port}`), or correct the node's `server`."
            ) from error
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        content = json.loads(content) if is_json else content
        if response.status >= 400:
            message = content["error"]["message"] if is_json and "error" in content else f"got {response.reason}"
            way_out = f" (set {TOKEN} in ComfyUI's environment)" if response.status == 401 else ""
            raise ServerError(f"{self.address}: {message}{way_out}", response.status)
        return content


def form(fields: dict, picture: bytes) -> tuple[str, bytes]:
    """Returns content type and body of a form with the picture as `input_reference`."""
    edge = uuid.uuid4().hex
    head = f'--{edge}\r\nContent-Disposition: form-data; name="'
    text = "".join(f'{head}{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    text += f'{head}input_reference"; filename="picture.png"\r\nContent-Type: image/png\r\n\r\n'
    return f"multipart/form-data; boundary={edge}", text.encode() + picture + f"\r\n--{edge}--\r\n".encode()
