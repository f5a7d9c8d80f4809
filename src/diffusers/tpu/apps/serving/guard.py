"""Checks before any endpoint: who may send a request, and how large it may be."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refused
from .jobs import Metrics
from .sizes import Settings, is_loopback


TOKEN_PATHS = ("/v1/", "/metrics")  # the page has a login of its own; /health is open
UPLOAD = "/gradio_api/upload"


def same(token: str, given: str) -> bool:
    """Whether they are equal, compared in constant time."""
    return hmac.compare_digest(token.encode(), given.encode())


def _name(host: str) -> str | None:
    """The name in a header `Host`, without the port; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Guard:
    """An ASGI application around another.

    - With a token, `/v1/` and `/metrics` require `Authorization: Bearer TOKEN`.
    - Bound to loopback, a request must name loopback as its host, not another name that resolves to it.
    - A browser's request from another site's page is refused.
    - The page's uploads are refused unless it takes a picture to start from.
    - A body beyond the limit is refused: by its Content-Length if it has one, and while it is received.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, uploads: bool = False):
        self.app, self.token, self.metrics, self.uploads = app, settings.token, metrics, uploads
        self.loopback, self.body_bytes = is_loopback(settings.host), settings.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen = 0

        async def counted(message: Message):
            if message["type"] == "http.response.start":
                self.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.body_bytes:
                raise self._too_large(f"{seen} and more")
            return message

        try:
            self._check(scope["path"], Headers(scope=scope))
        except Refused as refused:
            return await refused.response()(scope, receive, counted)
        await self.app(scope, limited, counted)

    def _check(self, path: str, headers: Headers):
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.loopback and not is_loopback(_name(host)):
            raise Refused(403, f"expected a local host name of a server bound to loopback, got {host!r}", code="host")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, f"expected a page of this server, got one of {origin!r}", code="origin")
        if path.startswith(UPLOAD) and not self.uploads:  # Gradio's, even if the page has no field for files
            raise Refused(404, f"expected no files at {UPLOAD}: the page takes none", code="not_found")
        if self.token is not None and path.startswith(TOKEN_PATHS):
            kind, _, given = headers.get("authorization", "").partition(" ")
            texts = given, given.encode("latin-1").decode("utf-8", "replace")  # a client names no encoding
            if kind.lower() != "bearer" or not any(same(self.token, text.strip()) for text in texts):
                header = "expected the header Authorization: Bearer TOKEN with this server's token"
                got = "another one" if given else "none"
                raise Refused(401, f"{header}, got {got}", code="invalid_api_key", WWW_Authenticate="Bearer")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.body_bytes:
            raise self._too_large(length)

    def _too_large(self, length) -> Refused:
        message = f"expected a body of at most {self.body_bytes} bytes, got {length}"
        return Refused(413, message, code="too_large", Connection="close")
