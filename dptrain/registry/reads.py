"""Which plain attributes of layers, optimizers, losses and the like a traced step has read: they are its constants.

Whoever changes one of them afterwards would not be heard: programs are traced anew then.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import numpy as np

# What a step can only have taken as a constant; of arrays up to so many bytes their values count, of others the object.
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_FUNCTIONS: Final = frozenset({FunctionType, BuiltinFunctionType})
_CONTAINERS: Final = frozenset({list, tuple, dict, set})
_ARRAYS: Final = (np.ndarray, np.generic)
_MOST_LEAVES, _MOST_BYTES = 256, 4096
_UNREAD: Final = object()

_changing = threading.Lock()
_readers = 0  # threads that note what is read


class Readable:
    """Whose plain attributes are noted where a step that reads them is traced."""


@dataclass(frozen=True)
class _Read:
    """An attribute that was read.

    Attributes:
        owner: the object, so that no other can have its id.
        attributes: its `__dict__`.
        name: of the attribute.
        kept: what tells its value.
    """

    owner: Any
    attributes: dict[str, Any]
    name: str
    kept: Any

    @property
    def now(self) -> Any:
        """The attribute's value as it is now."""
        return self.attributes[self.name] if self.name in self.attributes else getattr(self.owner, self.name, _UNREAD)

    @property
    def holds(self) -> bool:
        """Whether the attribute is what it was."""
        now = self.now
        return now is self.kept or _same(self.kept, _kept(now))


class Reads:
    """Attributes that a step has read, and what they were. Several threads may ask while one notes more."""

    def __init__(self) -> None:
        self._noted: Mapping[tuple[int, str], _Read] = {}  # another one when there is more

    def changed(self) -> tuple[Any, str, Any, Any] | None:
        """Return an attribute that is not what it was: whose, its name, what it was and is; None for none."""
        for one in self._noted.values():
            if one.attributes.get(one.name, _UNREAD) is not one.kept and not one.holds:
                return one.owner, one.name, one.kept, one.now
        return None

    @property
    def hold(self) -> bool:
        """Whether all attributes are what they were."""
        return self.changed() is None

    def add(self, notes: Mapping[tuple[int, str], _Read]) -> None:
        """Add what was read, but for what the step's own Python has changed meanwhile, such as a count of calls."""
        with _changing:
            self._noted = {key: one for key, one in notes.items() if one.holds} | dict(self._noted)


_current: ContextVar[dict[tuple[int, str], _Read] | None] = ContextVar("reads", default=None)


@contextmanager
def noting(reads: Reads) -> Iterator[None]:
    """Note which attributes are read in this context, of all that is `Readable`.

    Python asks a class of its own about every attribute then, which takes several times as long: so only there.
    """
    global _readers
    with _changing:
        _readers += 1
        if _readers == 1:
            Readable.__getattribute__ = _noting  # type: ignore[method-assign]
    notes: dict[tuple[int, str], _Read] = {}
    token = _current.set(notes)
    try:
        yield
    finally:
        _current.reset(token)
        with _changing:
            _readers -= 1
            if _readers == 0:
                del Readable.__getattribute__
        reads.add(notes)


def _noting(self: Any, name: str) -> Any:
    value = object.__getattribute__(self, name)
    notes = _current.get()
    if notes is not None and (id(self), name) not in notes and _may_be_kept(value) and _is_data(self, name):
        kept = _kept(value)
        if kept is not _UNREAD:
            notes[id(self), name] = _Read(self, object.__getattribute__(self, "__dict__"), name, kept)
    return value


def _may_be_kept(value: Any) -> bool:
    """Whether `_kept` may know a value; nothing in a container may be about to come."""
    kind = type(value)
    if kind in _CONTAINERS:
        return bool(value)
    return kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, _ARRAYS)


def _is_data(owner: Any, name: str) -> bool:
    """Whether an attribute is data of an object or its class, and is not computed."""
    if name.startswith("__"):
        return False
    if name in object.__getattribute__(owner, "__dict__"):
        return True
    of_class = next((vars(one)[name] for one in type(owner).__mro__ if name in vars(one)), _UNREAD)
    return type(of_class) in _PLAIN


def _kept(value: Any) -> Any:
    """Return what tells a value from another, whatever becomes of a container or an array; `_UNREAD` for others."""
    kind = type(value)
    if kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _Array(value)
    if kind not in _CONTAINERS:
        return _UNREAD
    leaves: list[Any] = []
    return tuple(leaves) if _flatten(value, leaves) else _UNREAD


def _flatten(value: Any, leaves: list[Any]) -> bool:
    """Add a container's structure and leaves to a list; return whether it holds plain values alone, and not many."""
    kind = type(value)
    if kind in _CONTAINERS:
        leaves.append((kind, len(value)))
        items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        return all(_flatten(one, leaves) for one in items)
    leaves.append(value)
    return len(leaves) <= _MOST_LEAVES and (kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, np.generic))


class _Array:
    """An array as it was, with a copy of its bytes if these are few."""

    def __init__(self, array: Any) -> None:
        self._array = array
        few = array.nbytes <= _MOST_BYTES and not array.dtype.hasobject
        self._content = (array.shape, array.dtype, array.tobytes()) if few else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Array):
            return False
        return self._array is other._array if self._content is None else self._content == other._content

    __hash__ = None  # type: ignore[assignment]


def _same(before: Any, now: Any) -> bool:
    """Whether two values are the same to a program: 1 and 1.0 are not, nor 0.0 and -0.0; NaN is NaN."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, float) and (before != before or not before):
        return now != now if before != before else not now and math.copysign(1, before) == math.copysign(1, now)
    return bool(before == now)
