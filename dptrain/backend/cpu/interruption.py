"""Functions of Python that compiled code calls, and signals that come while it runs."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

_Function = ctypes.CFUNCTYPE(ctypes.c_int64)


class Callback:
    """A function for compiled code to call; `pointer` returns 1 once there is an `error`, else 0.

    The error is what the function raised, or a signal's handler as it was called: compiled code cannot raise them, and
    Python would print and drop them.
    """

    def __init__(self, function: Callable[[], object] | None = None) -> None:
        self.error: BaseException | None = None
        calls = self._calls(function)
        next(calls)
        # Not a function of Python's: handlers run before its first line, where nothing can catch what they raise.
        self.pointer = _Function(partial(next, calls))

    def _calls(self, function: Callable[[], object] | None) -> Iterator[int]:
        while True:
            try:
                while True:
                    yield int(self.error is not None)  # handlers run when it resumes here
                    if function is not None:
                        function()
            except GeneratorExit:
                return
            except BaseException as error:
                self.error = error


class Interruption:
    """Lets handlers of signals end a loop of unknown length in compiled code, which may never end.

    `addresses` are those of what stops compiled code and of the function that it calls.
    """

    def __init__(self) -> None:
        self._stopped = np.zeros(1, np.int64)
        self._callback = Callback()
        self.addresses = self._stopped.ctypes.data, ctypes.cast(self._callback.pointer, ctypes.c_void_p).value

    def check(self) -> None:
        """Raise what stopped compiled code."""
        if self._stopped[0]:
            error, self._callback.error, self._stopped[0] = self._callback.error, None, 0
            assert error is not None
            raise error
