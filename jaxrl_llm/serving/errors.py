"""Replies that are errors, in OpenAI's shape."""

from collections.abc import Mapping

Headers = Mapping[str, str] | None


class ApiError(Exception):
    """A request that is answered by an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str = "",
        param: str = "",
        headers: Headers = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": error}


class Refused(ApiError):
    """A request that the driver did not serve, or not to its end."""

    reply: tuple[int, str, str, Headers]  # status, OpenAI's type and code, headers

    def __init__(self, message: str):
        status, kind, code, headers = self.reply
        super().__init__(status, message, kind, code, headers=headers)


class QueueFull(Refused):
    """As many samples wait as may; try again later."""

    reply = (429, "rate_limit_error", "queue_full", {"Retry-After": "1"})


class NotServing(Refused):
    """The driver has not started, is stopping, or stopped before the request was done."""

    reply = (503, "server_error", "not_serving", {"Retry-After": "5"})


class Unfit(Refused):
    """The engine cannot serve such a request; trying again will not help."""

    reply = (400, "invalid_request_error", "", None)


class RequestFailed(Refused):
    """This request raised an error; others do not notice."""

    reply = (500, "server_error", "request_failed", None)


class EngineFailed(Refused):
    """The engine broke; nothing is served any more."""

    reply = (500, "server_error", "engine_failed", None)
