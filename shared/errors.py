"""Every error neap raises on purpose.

    NeapError
    ├── InvalidInput            the caller's request can never work
    │   ├── PromptTooLong
    │   └── UnsupportedModel    the model lacks a part that depth execution needs
    ├── NotFound                a model, router, job or dataset that does not exist
    ├── AlreadyExists           the same id with other contents
    ├── PreconditionFailed      the system is not in the state the call needs
    │   └── RouterMismatch      a router of another model or of another revision of it
    ├── Conflict                a compare-and-swap that lost
    ├── Unauthenticated         nobody vouches for who calls
    ├── PermissionDenied        the caller is known and may not do this
    ├── Corrupt                 stored bytes that do not match their digest or schema
    ├── Exhausted               a queue, a disk or a budget is full; trying later may help
    ├── Unavailable             a part of the system does not answer
    ├── Cancelled               the work was stopped on request
    └── DeadlineExceeded        the caller's deadline passed

`shared.rpc.status` holds the one table that maps them to gRPC codes. `reason` is machine-readable and stable; `metadata`
holds what a program may want to know; the message is for people and never holds secrets or foreign exception texts.
"""

from collections.abc import Mapping


class NeapError(Exception):
    """Base of the tree. `reason` is UPPER_SNAKE_CASE."""

    default_reason = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
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


class Exhausted(NeapError):
    """`retry_after_s` is a hint; None means that waiting does not help by itself (a full disk)."""

    default_reason = "EXHAUSTED"

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


class Cancelled(NeapError):
    default_reason = "CANCELLED"


class DeadlineExceeded(NeapError):
    default_reason = "DEADLINE_EXCEEDED"
