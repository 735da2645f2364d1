"""Signals that come while compiled code executes a loop of unknown length, which may never end."""

import ctypes
from collections.abc import Iterator
from functools import partial

import numpy as np

_Asks = ctypes.CFUNCTYPE(ctypes.c_int64)


class Interruption:
    """What a handler raised; `addresses` are those of what stops compiled code and of the function that it calls."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._stopped = np.zeros(1, np.int64)
        handling = self._handle()
        next(handling)
        # Not a function of Python's: handlers run before its first line, where nothing can catch what they raise.
        self._function = _Asks(partial(next, handling))
        self.addresses = self._stopped.ctypes.data, ctypes.cast(self._function, ctypes.c_void_p).value

    def _handle(self) -> Iterator[int]:
        while True:
            try:
                yield int(self._error is not None)  # handlers run when it resumes here
            except GeneratorExit:
                return
            except BaseException as error:  # compiled code cannot raise it
                self._error = error

    def check(self) -> None:
        """Raise what stopped compiled code."""
        if self._stopped[0]:
            error, self._error, self._stopped[0] = self._error, None, 0
            assert error is not None
            raise error
