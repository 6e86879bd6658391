"""Maps operating system errors on neap's own files to NeapError, in one place for every part that writes."""

import errno

from shared.errors import Exhausted, NeapError, Unavailable

# EFBIG: a file size limit of the process or the file system.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}


def storage_error(error: OSError, what: str, *, place: str) -> NeapError:
    """Return `Exhausted` (DISK_FULL) or `Unavailable` (STORAGE_UNAVAILABLE).
    The text of `error` is only in the chained exception.

    For the message: `what` was to be stored or read, `place` is its folder.
    """
    name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
    if error.errno in _FULL:
        return Exhausted(
            f"no space left in {place} for {what}; nothing was published", reason="DISK_FULL", metadata={"errno": name}
        )
    if error.errno in _REFUSED:
        return Unavailable(
            f"{place} cannot be used for {what} ({name}): it is read-only or belongs to another user",
            reason="STORAGE_UNAVAILABLE",
            metadata={"errno": name},
        )
    return Unavailable(
        f"{place} cannot be used for {what} ({name})", reason="STORAGE_UNAVAILABLE", metadata={"errno": name}
    )
