"""What an operating system error on files of ours means to a caller: one reading for every part that writes."""

import errno

from shared.errors import Exhausted, NeapError, Unavailable

# EFBIG: a file size limit of the process or the file system.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}


def storage_error(error: OSError, what: str, *, place: str) -> NeapError:
    """`Exhausted` (DISK_FULL) or `Unavailable` (STORAGE_UNAVAILABLE); its text stays in the chained exception.

    `what` was to be stored or read, `place` is the folder it belongs in; both are for people.
    """
    name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
    if error.errno in _FULL:
        return Exhausted(
            f"no space left in {place} for {what}; nothing was published",
            reason="DISK_FULL",
            metadata={"errno": name},
        )
    if error.errno in _REFUSED:
        return Unavailable(
            f"{place} may not be used for {what} ({name}): it is read-only, or another user's",
            reason="STORAGE_UNAVAILABLE",
            metadata={"errno": name},
        )
    return Unavailable(
        f"{place} cannot be used for {what} ({name})",
        reason="STORAGE_UNAVAILABLE",
        metadata={"errno": name},
    )
