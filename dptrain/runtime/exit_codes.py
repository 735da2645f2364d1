"""Exit codes that the system cuts to 0: what fails must not look like success to the launcher.

The system keeps eight bits of an exit code, so `sys.exit(os.system(...))` leaves with 0 if the command failed with 1:
`os.system` returns 256. And `comm.Abort()` means MPI_Abort(0), which ends a job with 0.
"""

import builtins
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

# What this process was last asked to leave with, where that was done by `sys.exit` or an uncaught exception.
asked = 0


def as_status(code: int) -> int:
    """Return the exit status that stands for a code: its low byte, but not 0 unless the code is.

    Of a status that `os.system` returns it is the exit code of the command.
    """
    return code & 0xFF or (code >> 8 & 0xFF or 1 if code else 0)


def replace_exits(say: Callable[[str], None]) -> None:
    """Let `sys.exit`, `exit` and `quit` leave with `as_status`; `raise SystemExit(256)` stays what it is.

    Args:
        say: is told where that makes a difference.
    """
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
        global asked
        asked = as_status(code) if isinstance(code, int) else int(code is not None)
        if isinstance(code, int) and code and not code & 0xFF:
            self._say(f"exit code {code} would be taken for 0; it leaves with {as_status(code)}")
            code = as_status(code)
        self._usual(code)


def replace_abort(communicator: type, end: Callable[[], NoReturn]) -> None:
    """Let `Abort(0)` of mpi4py's communicators do something else.

    Python does not let us assign to an extension type's methods; their dict does. Where the interpreter keeps them
    elsewhere, all stays as it is.

    Args:
        communicator: mpi4py's `Comm`.
        end: ends the job.
    """
    methods = [one for one in gc.get_referents(communicator.__dict__) if isinstance(one, dict) and "Abort" in one]
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
