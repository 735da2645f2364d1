"""Errors that users can meet, each with the process's exit code.

A message is one line: what, where, expected and found, what to do; several faults of one file are a list below it. The
codes follow sysexits.h where it has a suitable one.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

LIST = "\n  - "
"""What begins each line of a message's list."""


class ExitCode(IntEnum):
    """Exit codes of the command line, the same on every rank."""

    OK = 0
    CONFIG = 2
    DATA = 65
    DEVICE = 69
    INTERNAL = 70
    IO = 74
    PREEMPTED = 75
    DIVERGED = 76
    STUCK = 77
    INTERRUPTED = 130


def printable(text: str, keep: str = "") -> str:
    """Return a text with everything escaped that a terminal could take for more than letters, except `keep`.

    The text may come from a file that anybody has written; `keep` may have line breaks.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape", "replace").decode()
        for character in text
    )


class DptrainError(Exception):
    """Base of every error that ends in one clear line instead of a traceback.

    Its texts are `printable`: they may quote names and values of files that anybody has written.

    Attributes:
        exit_code: of the process if nobody catches the error.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(argument, "\n") if isinstance(argument, str) else argument for argument in args))


class ConfigError(DptrainError, ValueError):
    """A setting or an argument is wrong; `ValueError` as in Keras."""

    exit_code = ExitCode.CONFIG


class ArgumentTypeError(ConfigError, TypeError):
    """A `ConfigError` where Keras raises a `TypeError`."""


class NoAttributeError(ConfigError, AttributeError):
    """A `ConfigError` where Keras raises an `AttributeError`."""


class DataError(DptrainError, ValueError):
    """A data set, model file or checkpoint is missing or malformed."""

    exit_code = ExitCode.DATA


class DeviceError(DptrainError, RuntimeError):
    """The requested device cannot be used."""

    exit_code = ExitCode.DEVICE


class CompilerError(DeviceError):
    """The C++ compiler fails, or makes what does not load: the lowest of the ranks that meet it reports it."""


class DeviceMemoryError(DeviceError):
    """The device has too little memory left.

    Attributes:
        name: what the memory was for.
        asked, free: bytes, needed and still free on the device.
        buffers: bytes that this process holds, by name.
    """

    def __init__(self, message: str, name: str, asked: int, free: int, buffers: Mapping[str, int]) -> None:
        super().__init__(message)
        self.name, self.asked, self.free, self.buffers = name, asked, free, dict(buffers)


class OutputError(DptrainError, OSError):
    """Results cannot be written."""

    exit_code = ExitCode.IO


class DivergenceError(DptrainError, ArithmeticError, RuntimeError):
    """The loss or a weight is no longer finite; a `RuntimeError`, as Keras' TerminateOnNaN raises."""

    exit_code = ExitCode.DIVERGED


class MismatchError(DptrainError):
    """Ranks are in different calls, and would wait forever or exchange garbage."""

    exit_code = ExitCode.STUCK


class ThreadOrderError(ConfigError):
    """Two threads of a rank meet the other ranks at the same time."""


class AgreedError(DptrainError):
    """An error known to every rank: rank 0 prints it, all ranks end together with its exit code.

    Attributes:
        exit_code: that of the lowest failed rank.
        where: what was being done.
        failures: the failed ranks, each with its message.
    """

    def __init__(self, where: str, exit_code: ExitCode, message: str, failures: Sequence[tuple[int, str]]) -> None:
        super().__init__(message)
        self.where = where
        self.exit_code = exit_code
        self.failures = tuple(failures)


class PreemptedError(AgreedError):
    """A signal on any rank ended the training; its state was saved, and all ranks leave together."""
