"""Files that only this user can have written, and that may be trusted or loaded."""

import errno
import os
import stat


def is_own(status: os.stat_result) -> bool:
    """Whether this is a regular file owned by this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a regular file that only this user can have written; return a descriptor for reading."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if not is_own(status) or status.st_mode & 0o022:
        os.close(handle)
        raise PermissionError(errno.EPERM, "not a regular file that only this user can write")
    return handle
