"""The exceptions that neap raises: those of the client's distribution (`neap_client.errors`), so that a client raises
what a service raised.
"""

from neap_client.errors import (
    AlreadyExists,
    Cancelled,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    NeapError,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    PromptTooLong,
    RouterMismatch,
    Unauthenticated,
    Unavailable,
    UnsupportedModel,
)

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "Exhausted",
    "InvalidInput",
    "NeapError",
    "NotFound",
    "PermissionDenied",
    "PreconditionFailed",
    "PromptTooLong",
    "RouterMismatch",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedModel",
]

# A client that is refused for want of room should wait this long before it tries again.
RETRY_AFTER_S = 1.0
