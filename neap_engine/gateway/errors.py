"""The one table from neap's errors to HTTP statuses and OpenAI's error objects.

The codes follow google.rpc.Code's own mapping to HTTP:
https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
"""

import math
import secrets
from http import HTTPStatus
from typing import Any

import structlog
from grpc import StatusCode

from shared.errors import RETRY_AFTER_S, Cancelled, Exhausted, InvalidInput, NeapError, NotFound, Unavailable
from shared.rpc.status import code_of

REQUEST, AUTHENTICATION, PERMISSION = ("invalid_request_error", "authentication_error", "permission_error")
LIMIT, SERVER = "rate_limit_error", "server_error"
CLIENT_CLOSED_REQUEST = 499

# gRPC code -> (HTTP status, OpenAI's error type).
STATUSES: dict[StatusCode, tuple[int, str]] = {
    StatusCode.INVALID_ARGUMENT: (400, REQUEST),
    StatusCode.FAILED_PRECONDITION: (400, REQUEST),
    StatusCode.UNAUTHENTICATED: (401, AUTHENTICATION),
    StatusCode.PERMISSION_DENIED: (403, PERMISSION),
    StatusCode.NOT_FOUND: (404, REQUEST),
    StatusCode.ALREADY_EXISTS: (409, REQUEST),
    StatusCode.ABORTED: (409, REQUEST),
    StatusCode.RESOURCE_EXHAUSTED: (429, LIMIT),
    StatusCode.CANCELLED: (CLIENT_CLOSED_REQUEST, REQUEST),
    StatusCode.INTERNAL: (500, SERVER),
    StatusCode.DATA_LOSS: (500, SERVER),
    StatusCode.UNAVAILABLE: (503, SERVER),
    StatusCode.DEADLINE_EXCEEDED: (504, SERVER),
}
# Reasons with an HTTP status of their own.
REASONS: dict[str, int] = {
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    # The target is no worker, or answers something that is not gRPC.
    "GRPC_UNIMPLEMENTED": 502,
    "GRPC_UNKNOWN": 502,
    "GRPC_INTERNAL": 502,
}
# Reasons for which OpenAI has a code. Others become the reason in lower case.
CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "TOKEN_UNKNOWN": "invalid_api_key",
    "TOKEN_MISSING": "invalid_api_key",
    "TOKEN_MALFORMED": "invalid_api_key",
}

log = structlog.get_logger("neap.gateway")


def gateway_full(what: str) -> Exhausted:
    return Exhausted(f"the gateway has {what}", reason="GATEWAY_FULL", retry_after_s=RETRY_AFTER_S)


def refused(message: str, field: str | None = None, reason: str = "INVALID_INPUT") -> InvalidInput:
    """Return the error for a request whose `field` is invalid. None: no single field is."""
    return InvalidInput(message, reason=reason, metadata={"field": field} if field else None)


def path_error(status: int, path: str) -> NeapError:
    """Return the error for an HTTP status of the router: an unknown path or method."""
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return InvalidInput(f"{path} does not allow this method", reason="METHOD_NOT_ALLOWED")
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(f"there is nothing at {path[:200]}", reason="PATH_NOT_FOUND")
    return refused("the request is invalid")


def unexpected(error: BaseException) -> NeapError:
    """Log an exception that is no NeapError and return an error that shows nothing but the id of the log line."""
    error_id = secrets.token_hex(8)
    log.error("unexpected error", error_id=error_id, exc_info=error)
    return NeapError(
        f"internal error; the log of the gateway has details under the id {error_id}", metadata={"error_id": error_id}
    )


def http_status(error: NeapError) -> int:
    return REASONS.get(error.reason) or STATUSES[code_of(error)][0]


def error_object(error: NeapError) -> dict[str, Any]:
    """Return OpenAI's error object. `neap` in it has the reason, the gRPC code and the metadata as the worker sent
    them.

    A failure that gRPC itself reports may have addresses in its text, so that text is only in the gateway's log.
    """
    message = error.message
    if error.reason.startswith("GRPC_") and isinstance(error, Unavailable):
        message = "no worker serves: none answers, all load their models or end, or the connection was lost"
    elif error.reason.startswith("GRPC_"):
        message = f"the call to the worker failed ({error.reason})"
    return {
        "message": message,
        "type": STATUSES[code_of(error)][1],
        "param": error.metadata.get("field"),
        "code": CODES.get(error.reason, error.reason.lower()),
        "neap": {"reason": error.reason, "grpc_code": code_of(error).name, "metadata": error.metadata},
    }


def error_headers(error: NeapError) -> dict[str, str]:
    """Return Retry-After where waiting helps, x-should-retry (which OpenAI's clients follow) where it does not, and the
    challenge of a 401."""
    status = http_status(error)
    headers: dict[str, str] = {}
    if isinstance(error, Unavailable):
        headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
    elif isinstance(error, Exhausted) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    elif not isinstance(error, Cancelled):
        headers["x-should-retry"] = "false"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return headers
