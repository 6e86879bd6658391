"""The one table between neap's errors and gRPC's status codes, and the way from a failed call to the error.

The services send an error as `google.rpc.Status` in the trailing metadata: https://google.aip.dev/193.
"""

from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from neap_client import errors
from neap_client.errors import NeapError

DOMAIN = "neap"
# gRPC's text for a call that its own caller cancelled.
LOCALLY_CANCELLED = "Locally cancelled by application!"

CODES: dict[type[NeapError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Corrupt: grpc.StatusCode.DATA_LOSS,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}

_CLASSES = {code: error for error, code in CODES.items()}
_REFINED: dict[str, type[NeapError]] = {
    error.default_reason: error for error in (errors.PromptTooLong, errors.UnsupportedModel, errors.RouterMismatch)
}


def from_rpc_error(error: grpc.RpcError) -> NeapError:
    """Convert a failed call to the NeapError that the service raised, with its class, message, reason and metadata.

    A failure that gRPC itself reports (no connection, message too large) has a reason that starts with "GRPC_".
    CANCELLED that comes neither from the service nor from this process means that the connection was lost, so it
    becomes Unavailable. gRPC ends calls in this way if they reach a server while it stops, before any handler has seen
    them.
    """
    call: Any = error  # an RpcError of either kind is also its Call; the type stubs do not say so
    code: grpc.StatusCode = call.code()
    message: str = call.details() or code.name
    reason = f"GRPC_{code.name}"
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # a proxy may send details that contradict the call's own code or text
        status = None
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    kind = _CLASSES.get(code, NeapError)
    is_signed = not reason.startswith("GRPC_")
    if kind is errors.Cancelled and not is_signed and message != LOCALLY_CANCELLED:
        kind = errors.Unavailable
    refined = _REFINED.get(reason, kind)
    if issubclass(refined, kind):
        kind = refined
    if kind is errors.Exhausted:
        return errors.Exhausted(message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)
    return kind(message, reason=reason, metadata=metadata)
