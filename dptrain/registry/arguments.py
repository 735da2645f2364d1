"""Checks arguments of public functions, so that a wrong one is an error in one line that names it.

Types are those of the annotations. What an annotation leaves open, as arrays, NumPy judges: its error is told with the
function's name and arguments.
"""

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from dptrain.errors import ArgumentTypeError, DptrainError
from dptrain.runtime.text import one_line, short

P = ParamSpec("P")
R = TypeVar("R")
_LARGEST = 1 << 63
# Characters of another library's error.
_LONGEST = 200


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and -_LARGEST <= int(value) < _LARGEST


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and (not isinstance(value, Integral) or _is_integer(value))


# What an annotation accepts, and its name; any other annotation accepts everything.
_CHECKS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_integer, "an integer of 64 bits"),
    float: (_is_real, "a number"),
    bool: (lambda value: not getattr(value, "shape", ()), "true or false"),
    str: (lambda value: isinstance(value, str), "a string"),
    types.NoneType: (lambda value: value is None, "None"),
    collections.abc.Sequence: (lambda value: hasattr(value, "__len__") and hasattr(value, "__iter__"), "a list"),
    os.PathLike: (lambda value: hasattr(value, "__fspath__"), "a path"),
}


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of plain arguments so that wrong ones raise `ArgumentTypeError`."""

    @functools.wraps(function)
    def checks(*args: P.args, **kwargs: P.kwargs) -> R:
        signature, expected = _expectations(function)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentTypeError(f"{function.__name__}: {error}") from None
        for name, value in arguments.items():
            kinds = expected.get(name)
            if kinds and not any(_CHECKS[kind][0](value) for kind in kinds):
                words = ", or ".join(_CHECKS[kind][1] for kind in kinds)
                raise ArgumentTypeError(f"{function.__name__}: {name} = {short(value)}: expected {words}")
        try:
            return function(*args, **kwargs)
        except DptrainError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            received = ", ".join(f"{name}={short(value)}" for name, value in arguments.items())
            reason = f"{one_line(error)[:_LONGEST]}; received {received}"
            raise ArgumentTypeError(f"{function.__name__}: {reason}") from error

    return checks


@functools.lru_cache(maxsize=256)
def _expectations(function: Any) -> tuple[inspect.Signature, dict[str, list[Any]]]:
    """Return a function's signature, and the checks of each parameter that has any."""
    signature, expected = inspect.signature(function), {}
    hints = typing.get_type_hints(function)
    for name in signature.parameters:
        hint = hints.get(name, Any)
        members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kinds = [_kind(member) for member in members]
        if all(kind in _CHECKS for kind in kinds):
            expected[name] = kinds
    return signature, expected


def _kind(hint: Any) -> Any:
    origin = typing.get_origin(hint) or hint
    return os.PathLike if isinstance(origin, type) and issubclass(origin, os.PathLike) else origin
