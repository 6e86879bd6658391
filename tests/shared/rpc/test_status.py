import grpc
import pytest
from google.rpc import error_details_pb2
from neap_client.status import LOCALLY_CANCELLED, from_rpc_error

from shared import errors
from shared.rpc.status import MAX_MESSAGE_BYTES, PUSHBACK_KEY, code_of, to_status, trailing_metadata

TABLE = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedModel: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RouterMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Corrupt: grpc.StatusCode.DATA_LOSS,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.NeapError: grpc.StatusCode.INTERNAL,
}


def _classes(base: type) -> set[type]:
    return {base}.union(*(_classes(child) for child in base.__subclasses__()))


def test_every_error_of_the_tree_has_its_code():
    ours = {kind for kind in _classes(errors.NeapError) if kind.__module__ == "neap_client.errors"}
    assert ours == set(TABLE)
    for kind, code in TABLE.items():
        assert code_of(kind("text")) is code


def test_error_info_carries_reason_domain_and_metadata():
    status = to_status(errors.RouterMismatch("no", metadata={"router_fingerprint": "a", "model_fingerprint": "b"}))
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.reason, info.domain) == ("ROUTER_MISMATCH", "neap")
    assert dict(info.metadata) == {"router_fingerprint": "a", "model_fingerprint": "b"}
    assert (status.code, status.message) == (9, "no")


def test_an_invalid_field_is_reported_as_a_violation():
    error = errors.InvalidInput("too long", reason="BAD_SPEC", metadata={"field": "spec.x"})
    info, violations = to_status(error).details
    assert info.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    bad_request = error_details_pb2.BadRequest()
    assert violations.Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert (violation.field, violation.description) == ("spec.x", "too long")


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.5])
def test_retry_info_only_where_waiting_helps(retry_after_s):
    status = to_status(errors.Exhausted("full", retry_after_s=retry_after_s))
    retries = [d for d in status.details if d.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
    if retry_after_s is None:
        assert retries == []
    else:
        retry = error_details_pb2.RetryInfo()
        retries[0].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() == round(retry_after_s * 1e9)


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (errors.Exhausted("full", retry_after_s=1.5), "1500"),
        (errors.Exhausted("full", retry_after_s=0.0), "0"),
        (errors.Exhausted("too small"), "-1"),
        (errors.Unavailable("gone"), None),
    ],
)
def test_pushback_says_the_same_as_retry_info(error, pushback):
    assert dict(trailing_metadata(to_status(error))).get(PUSHBACK_KEY) == pushback


@pytest.mark.parametrize("character", ["x", "é", "語", "😀"])
def test_long_texts_are_cut_between_characters(character):
    status = to_status(errors.NotFound(character * 50_000, metadata={"a": character * 50_000}))
    assert MAX_MESSAGE_BYTES - 4 < len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert set(status.message) == {character, "…"}
    assert status.ByteSize() < 4096


def test_a_text_that_just_fits_and_one_that_is_not_unicode():
    assert to_status(errors.NotFound("é" * 500)).message == "é" * 500
    assert to_status(errors.NotFound("file \udcff")).message == "file ?"


class _FailedCall(grpc.RpcError):
    """An error like those that a synchronous stub raises."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple = ()) -> None:
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple:
        return self._parts[2]


def test_a_cancellation_without_an_author_is_a_lost_connection():
    cancelled = grpc.StatusCode.CANCELLED
    cut = from_rpc_error(_FailedCall(cancelled, "CANCELLED"))
    assert (type(cut), cut.reason) == (errors.Unavailable, "GRPC_CANCELLED")
    assert type(from_rpc_error(_FailedCall(cancelled, LOCALLY_CANCELLED))) is errors.Cancelled
    status = to_status(errors.Cancelled("the request was cancelled"))
    signed = _FailedCall(cancelled, status.message, trailing_metadata(status))
    assert type(from_rpc_error(signed)) is errors.Cancelled
