"""The one table between neap's errors and gRPC's status codes, in both directions.

An error is sent as `google.rpc.Status` in the trailing metadata, with an `ErrorInfo` (reason, domain "neap", metadata). It has a
`RetryInfo` if waiting helps, and a `BadRequest` if one field of the request is invalid: https://google.aip.dev/193.
`grpc-retry-pushback-ms` is sent, too, because gRPC's own retry policy follows it:
https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from shared import errors
from shared.errors import NeapError

DOMAIN = "neap"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
NEVER_RETRY = "-1"
ERROR_ID_KEY = "error_id"
# Common proxies drop trailing metadata above 8 KiB, and the message is sent twice, once percent-encoded.
MAX_MESSAGE_CHARACTERS = 1000
MAX_METADATA_CHARACTERS = 400
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
    error.default_reason: error
    for error in (errors.PromptTooLong, errors.UnsupportedModel, errors.RouterMismatch)
}


def code_of(error: NeapError) -> grpc.StatusCode:
    """Return the gRPC code of the nearest base class in the table. INTERNAL for a plain NeapError."""
    for base in type(error).__mro__:
        if base in CODES:
            return CODES[base]
    return grpc.StatusCode.INTERNAL


def to_status(error: NeapError) -> status_pb2.Status:
    """Build a `google.rpc.Status` with ErrorInfo.

    It has a RetryInfo if `retry_after_s` is set, and a BadRequest if an InvalidInput has a "field" in its metadata.
    """
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={key: value[:MAX_METADATA_CHARACTERS] for key, value in error.metadata.items()},
    )
    details = [_packed(info)]
    if isinstance(error, errors.InvalidInput) and "field" in error.metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.metadata["field"],
            description=_shortened(error.message, MAX_METADATA_CHARACTERS),
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, errors.Exhausted) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=code_of(error).value[0],
        message=_shortened(error.message, MAX_MESSAGE_CHARACTERS),
        details=details,
    )


def unexpected_status(error_id: str) -> status_pb2.Status:
    """Build the status of an unexpected exception. It shows only an id, under which the exception is in the log."""
    info = error_details_pb2.ErrorInfo(
        reason="INTERNAL", domain=DOMAIN, metadata={ERROR_ID_KEY: error_id}
    )
    return status_pb2.Status(
        code=grpc.StatusCode.INTERNAL.value[0],
        message=f"internal error; the log of the service has details under the id {error_id}",
        details=[_packed(info)],
    )


def trailing_metadata(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a call that failed with `status`."""
    details = (STATUS_DETAILS_KEY, status.SerializeToString())
    if code_of_status(status) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return (details,)
    retry = error_details_pb2.RetryInfo()
    # Without this, gRPC's retry policy would retry although waiting cannot help.
    unpacked = any(detail.Unpack(retry) for detail in status.details)
    pushback = str(retry.retry_delay.ToMilliseconds()) if unpacked else NEVER_RETRY
    return (details, (PUSHBACK_KEY, pushback))


def code_of_status(status: status_pb2.Status) -> grpc.StatusCode:
    """Return the gRPC code with the number in `status`."""
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


def from_rpc_error(error: grpc.RpcError) -> NeapError:
    """Convert a failed call to the NeapError that the service raised, with its class, message, reason and metadata.

    A failure that gRPC itself reports (no connection, message too large) has a reason that starts with "GRPC_". CANCELLED that
    comes neither from the service nor from this process means that the connection was lost, so it becomes Unavailable. gRPC ends
    calls in this way if they reach a server while it stops, before any handler has seen them.
    """
    call: Any = error  # a synchronous RpcError is also its Call; the type stubs do not say so
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
        return errors.Exhausted(
            message, reason=reason, metadata=metadata, retry_after_s=retry_after_s
        )
    return kind(message, reason=reason, metadata=metadata)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
