"""Keeps exit codes that the system truncates to 0 from looking like success.

The system keeps eight bits: `sys.exit(os.system(...))` exits with 0 where a command failed with 1, because `os.system`
returns 256. And `comm.Abort()` means MPI_Abort(0), which ends a job with 0.
"""

import builtins
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

# The last exit code requested by `sys.exit` or an uncaught exception.
requested = 0


def as_status(code: int) -> int:
    """Return a code's low byte (for `os.system` the command's exit code), but not 0 unless the code is."""
    return code & 0xFF or (code >> 8 & 0xFF or 1 if code else 0)


def replace_exits(say: Callable[[str], None]) -> None:
    """Make `sys.exit`, `exit` and `quit` (not `raise SystemExit`) use `as_status`; `say` is told if that differs."""
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        usual = getattr(place, name, None)
        if usual is not None:
            setattr(place, name, _Exit(usual, say))


class _Exit:
    def __init__(self, usual: Callable[..., NoReturn], say: Callable[[str], None]) -> None:
        self._usual, self._say = usual, say

    def __repr__(self) -> str:
        return repr(self._usual)

    def __call__(self, code: Any = None, /) -> NoReturn:
        global requested
        requested = as_status(code) if isinstance(code, int) else int(code is not None)
        if isinstance(code, int) and code and not code & 0xFF:
            self._say(f"exit code {code} would be read as 0; exiting with {as_status(code)} instead")
            code = as_status(code)
        self._usual(code)


def replace_abort(communicator: type, end: Callable[[], NoReturn]) -> None:
    """Make `Abort(0)` of mpi4py's communicators call `end` instead.

    Python forbids assigning an extension type's methods, but their dict can be changed. Nothing changes if the
    interpreter has no such dict.
    """
    methods = [
        referent
        for referent in gc.get_referents(communicator.__dict__)
        if isinstance(referent, dict) and "Abort" in referent
    ]
    if not methods or isinstance(methods[0]["Abort"], type(replace_abort)):
        return
    usual = methods[0]["Abort"]

    def Abort(self: Any, errorcode: int = 0) -> NoReturn:  # noqa: N802  # mpi4py's name
        """Terminate the MPI execution environment."""
        if not errorcode & 0xFF:
            end()
        usual(self, errorcode)
        os.abort()  # it does not return

    methods[0]["Abort"] = Abort
    with suppress(AttributeError):
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(communicator))
