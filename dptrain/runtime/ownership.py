"""Files that nobody but this user can have written: what they hold may be believed, or loaded."""

import errno
import os
import stat


def is_own(found: os.stat_result) -> bool:
    """Whether this is a regular file of this user's."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a regular file that only this user can have written; return a descriptor for reading.

    Raises:
        OSError: the system's, or it is a link, a named pipe or anything else.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not is_own(found) or found.st_mode & 0o022:
        os.close(handle)
        raise PermissionError(errno.EPERM, "no regular file that only this user can have written")
    return handle
