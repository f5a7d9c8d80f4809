"""Error responses in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from starlette.responses import JSONResponse


TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(Exception):
    """Raised for a request that gets a status and a message: what was expected, what came, the way out.

    Attributes:
        param: the field of the request that is wrong.
        code: the kind of refusal, for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        # Lone surrogates, which a client's JSON may contain and no response may, are escaped.
        error = {name: value and value.encode("utf-8", "backslashreplace").decode() for name, value in error.items()}
        return JSONResponse({"error": error}, self.status, self.headers)
