"""Turns neap's errors into what a failed call sends. The table of errors and gRPC codes is in `neap_client.status`.

An error is sent as `google.rpc.Status` in the trailing metadata, with an `ErrorInfo` (reason, domain "neap", metadata).
It has a `RetryInfo` if waiting helps, and a `BadRequest` if one field of the request is invalid:
https://google.aip.dev/193. `grpc-retry-pushback-ms` is sent, too, because gRPC's own retry policy follows it:
https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from neap_client.status import CODES, DOMAIN

from shared import errors
from shared.errors import NeapError

STATUS_DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
NEVER_RETRY = "-1"
ERROR_ID_KEY = "error_id"
# Common proxies drop trailing metadata above 8 KiB. The message is sent twice: percent-encoded, where a byte may take
# three, and in the details, which base64 makes a third longer. All limits are for UTF-8; the last one is for all values
# of the metadata together.
MAX_MESSAGE_BYTES = 1000
MAX_VALUE_BYTES = 400
MAX_METADATA_BYTES = 1200
_CUT = "…".encode()


def code_of(error: NeapError) -> grpc.StatusCode:
    """Return the gRPC code of the nearest base class in the table. INTERNAL for a plain NeapError."""
    for base in type(error).__mro__:
        if base in CODES:
            return CODES[base]
    return grpc.StatusCode.INTERNAL


def to_status(error: NeapError) -> status_pb2.Status:
    """Build a `google.rpc.Status` with ErrorInfo.

    Long texts are cut. It has a RetryInfo if `retry_after_s` is set, and a BadRequest if an InvalidInput has a "field"
    in its metadata.
    """
    limit = min(MAX_VALUE_BYTES, MAX_METADATA_BYTES // max(1, len(error.metadata)))
    metadata = {key: _shortened(value, limit) for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details = [_packed(info)]
    if isinstance(error, errors.InvalidInput) and "field" in metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=metadata["field"], description=_shortened(error.message, MAX_VALUE_BYTES)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, errors.Exhausted) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=code_of(error).value[0], message=_shortened(error.message, MAX_MESSAGE_BYTES), details=details
    )


def unexpected_status(error_id: str) -> status_pb2.Status:
    """Build the status of an unexpected exception. It shows only an id, under which the exception is in the log."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={ERROR_ID_KEY: error_id})
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


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shortened(text: str, limit_bytes: int) -> str:
    data = text.encode("utf-8", "replace")  # protobuf refuses unpaired surrogates, as in names of files
    if len(data) > limit_bytes:
        data = data[: limit_bytes - len(_CUT)].decode("utf-8", "ignore").encode() + _CUT
    return data.decode()
