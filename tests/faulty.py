"""A disk of which one call fails."""

import errno
import functools
import os
from collections.abc import Callable, Iterator

import pytest

# Every call that changes something.
CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")


def each_fault(work: Callable[[int], object]) -> Iterator[tuple[int, Exception | None]]:
    """Do something again and again, of which first the first call fails, then the second and so on, until none does.

    Args:
        work: gets the number of the call that fails, from 1.

    Yields:
        That number, and what was raised; None where nothing was.
    """
    number = 0
    while True:
        number += 1
        disk, raised = _Disk(number), None
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, functools.partial(disk.call, name, getattr(os, name)))
            try:
                work(number)
            except Exception as error:
                raised = error
        yield number, raised
        if disk.count < number:
            return


class _Disk:
    """Counts calls, and fails one of them."""

    def __init__(self, fails: int) -> None:
        self.count, self._fails = 0, fails

    def call(self, name, real, *arguments, **options):
        if name != "open" or arguments[1] & (os.O_CREAT | os.O_WRONLY):
            self.count += 1
            if self.count == self._fails:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return None if name == "fsync" else real(*arguments, **options)  # nobody cuts the power
