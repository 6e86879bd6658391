"""The exceptions that neap raises.

    NeapError
    ├── InvalidInput            the request is invalid and repeating it cannot help
    │   ├── PromptTooLong
    │   └── UnsupportedModel    the model lacks a part that depth execution needs
    ├── NotFound                the model, router, job or dataset does not exist
    ├── AlreadyExists           the id is already in use with other contents
    ├── PreconditionFailed      the system is not in the state the call needs
    │   └── RouterMismatch      the router belongs to another model or another revision of the model
    ├── Conflict                a compare-and-swap failed because the value has changed
    ├── Unauthenticated         the caller's identity is not proven
    ├── PermissionDenied        the caller is known and may not do this
    ├── Corrupt                 stored bytes do not match their digest or schema
    ├── Exhausted               a queue, a disk or a budget is full; trying later may help
    ├── Unavailable             a part of the system does not answer
    ├── Cancelled               the work was stopped on request
    └── DeadlineExceeded        the caller's deadline passed

`neap_client.status` has the one table that maps them to gRPC codes. `reason` is machine-readable and stable. `metadata`
holds details for programs. The message is for people and never contains secrets or the texts of foreign exceptions.
"""

from collections.abc import Mapping


class NeapError(Exception):
    """Base of the tree. `reason` is UPPER_SNAKE_CASE.
    `may_pass`: what is in the way may go away, so the same call may succeed later."""

    default_reason = "INTERNAL"
    may_pass = False

    def __init__(self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})


class InvalidInput(NeapError):
    default_reason = "INVALID_INPUT"


class PromptTooLong(InvalidInput):
    default_reason = "PROMPT_TOO_LONG"


class UnsupportedModel(InvalidInput):
    default_reason = "UNSUPPORTED_MODEL"


class NotFound(NeapError):
    default_reason = "NOT_FOUND"


class AlreadyExists(NeapError):
    default_reason = "ALREADY_EXISTS"


class PreconditionFailed(NeapError):
    default_reason = "PRECONDITION_FAILED"


class RouterMismatch(PreconditionFailed):
    default_reason = "ROUTER_MISMATCH"


class Conflict(NeapError):
    default_reason = "CONFLICT"


class Unauthenticated(NeapError):
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(NeapError):
    default_reason = "PERMISSION_DENIED"


class Corrupt(NeapError):
    default_reason = "CORRUPT"
    may_pass = True  # bytes may be damaged on their way, too


class Exhausted(NeapError):
    """`retry_after_s` is a hint in seconds. None means that waiting alone does not help, as with a full disk."""

    default_reason = "EXHAUSTED"
    may_pass = True

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class Unavailable(NeapError):
    default_reason = "UNAVAILABLE"
    may_pass = True


class Cancelled(NeapError):
    default_reason = "CANCELLED"


class DeadlineExceeded(NeapError):
    default_reason = "DEADLINE_EXCEEDED"
    may_pass = True
