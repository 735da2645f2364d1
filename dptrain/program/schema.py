"""Checks attributes of a program from a file before generated code, which contains them as text, would run them."""

import typing
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from dptrain.errors import DataError
from dptrain.program.dims import Dim, number_of
from dptrain.program.op import Op
from dptrain.runtime.text import short
from dptrain.runtime.types import TYPES

# A seed, or another number of 64 bits.
Word = Annotated[int, Interval(ge=0, lt=2**64)]
# The name of an element's type, as NumPy has it.
if TYPE_CHECKING:
    TypeName = str
else:
    TypeName = Literal[*TYPES]
# Bounds of all integers.
_LEAST, _MOST = -(2**63), 2**64 - 1
# Keywords that are no attributes.
_NOT_ATTRIBUTES = frozenset({"out", "first_row", "return"})


def check_attributes(op: Op, attributes: Mapping[str, Any], where: str) -> None:
    """Raise a DataError that begins with `where` for an unknown, missing or ill-typed attribute of a built-in op."""
    types, required = _schema(op)
    if unknown := sorted(attributes.keys() - types.keys()):
        raise DataError(f"{where}: op {op.name!r} has no attribute {short(unknown[0])}")
    if missing := sorted(required - attributes.keys()):
        raise DataError(f"{where}: op {op.name!r} lacks the attribute {missing[0]!r}")
    for name, value in attributes.items():
        if not _is(value, types[name]):
            raise DataError(f"{where}: {name} = {short(value)} of op {op.name!r}: expected {_words(types[name])}")


def is_type_name(name: Any) -> bool:
    """Whether this is the name of a type that tensors have."""
    return _is(name, TypeName)


def is_length(n: Any) -> bool:
    """Whether this can be a length."""
    return _is(n, int) and n >= 0


@cache
def _schema(op: Op) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of an op's attributes by name, and the names of those that have no default."""
    hints = typing.get_type_hints(op.compute, include_extras=True)
    code = op.compute.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    defaults = op.compute.__kwdefaults__ or {}
    types = {name: hints[name] for name in names if name not in _NOT_ATTRIBUTES}
    return types, frozenset(types.keys() - defaults.keys())


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type: neither text nor a truth value is a number."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bounds = [argument for argument in arguments[1:] if isinstance(argument, Interval)]
        return _is(value, arguments[0]) and all(_within(value, interval) for interval in bounds)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[1:] == (Ellipsis,) else arguments
        return len(kinds) == len(value) and all(map(_is, value, kinds))
    if origin is not None:  # a union
        return any(_is(value, argument) for argument in arguments)
    if kind is bool or isinstance(value, bool | np.bool_):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        value = number_of(value) if isinstance(value, Dim) else value
        return isinstance(value, int) and _LEAST <= value <= _MOST
    return kind is float and (isinstance(value, float) or _is(value, int))


def _within(value: Any, bounds: Interval) -> bool:
    return bool((bounds.ge is None or value >= bounds.ge) and (bounds.lt is None or value < bounds.lt))


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "the name of a type"
    return "an integer from 0 to 2**64 - 1" if kind == Word else str(getattr(kind, "__name__", kind))
