"""Records which plain attributes of layers and the like a traced step has read: a change needs a new trace."""

import functools
import math
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np

from dptrain.runtime.undisturbed import undisturbed

# Types that a step treats as constants; arrays up to so many bytes count by value, larger ones by identity.
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_FUNCTIONS: Final = frozenset({FunctionType, BuiltinFunctionType})
_CONTAINERS: Final = (list, tuple, Mapping, Set, deque)
_ARRAYS: Final = (np.ndarray, np.generic)
# Of Python's own classes: a logger, say, leads to all others.
_SETTINGS: Final = (SimpleNamespace, Namespace, functools.partial, Enum)
_MOST_LEAVES, _MOST_BYTES = 256, 4096
_UNREAD: Final = object()
_SEEN: Final = object()

_changing = threading.Lock()
_readers = 0  # number of threads that record reads


class Readable:
    """Base of objects whose plain attributes are recorded while a step is traced."""


@dataclass(frozen=True)
class _Read:
    owner: Any  # kept so that its id stays unique
    attributes: dict[str, Any]  # `__dict__` of the owner
    name: str
    snapshot: Any  # identifies the value

    @property
    def now(self) -> Any:
        return self.attributes[self.name] if self.name in self.attributes else getattr(self.owner, self.name, _UNREAD)

    @property
    def holds(self) -> bool:
        now = self.now
        return now is self.snapshot or _same(self.snapshot, _snapshot(now))


class Reads:
    """Attributes that a step has read, with their values; safe to read while a thread adds more."""

    def __init__(self) -> None:
        self._noted: Mapping[tuple[int, str], _Read] = {}  # replaced when it grows

    def changed(self) -> tuple[Any, str, Any, Any] | None:
        """Return owner, name, old and new value of a changed attribute; None if there is none."""
        for note in self._noted.values():
            if note.attributes.get(note.name, _UNREAD) is not note.snapshot and not note.holds:
                return note.owner, note.name, note.snapshot, note.now
        return None

    @property
    def hold(self) -> bool:
        """Whether all attributes are unchanged."""
        return self.changed() is None

    def add(self, notes: Mapping[tuple[int, str], _Read]) -> None:
        """Add reads, except of what the step's own Python has changed, such as a count of calls."""
        with _changing:
            self._noted = {key: note for key, note in notes.items() if note.holds} | dict(self._noted)


_current: ContextVar[dict[tuple[int, str], _Read] | None] = ContextVar("reads", default=None)


@contextmanager
def noting(reads: Reads) -> Iterator[None]:
    """Record which attributes of `Readable` objects are read in this context.

    Python then asks a class method about every attribute, which takes several times as long: so only here.
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
        with undisturbed(_changing):
            _readers -= 1
            if _readers == 0:
                del Readable.__getattribute__
        reads.add(notes)


def _noting(self: Any, name: str) -> Any:
    value = object.__getattribute__(self, name)
    notes = _current.get()
    if notes is not None and (id(self), name) not in notes and _is_recordable(value) and _is_data(self, name):
        content = _snapshot(value)
        if content is not _UNREAD:
            notes[id(self), name] = _Read(self, object.__getattribute__(self, "__dict__"), name, content)
    return value


def _is_recordable(value: Any) -> bool:
    """Return whether `_snapshot` may identify a value; an empty container may be filled later."""
    kind: Any = type(value)
    if _is_container_type(kind):
        return bool(value)
    return kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, _ARRAYS) or _is_settings(value)


@functools.lru_cache(maxsize=4096)
def _is_container_type(kind: Any) -> bool:
    return issubclass(kind, _CONTAINERS)


def _is_settings(value: Any) -> bool:
    """Return whether it is an object of a user's that may hold plain values: a dataclass, a namespace, the like."""
    kind: Any = type(value)
    return _is_settings_type(kind)


@functools.lru_cache(maxsize=4096)
def _is_settings_type(kind: Any) -> bool:
    if issubclass(kind, Readable | type | ModuleType) or not (kind.__dictoffset__ or is_dataclass(kind)):
        return False
    room = kind.__module__.partition(".")[0]
    return issubclass(kind, _SETTINGS) or (room != "dptrain" and room not in sys.stdlib_module_names)


def _settings(value: Any) -> dict[str, Any]:
    """Return the attributes of settings."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return values | getattr(value, "__dict__", {})
    return dict(vars(value))


def _is_data(owner: Any, name: str) -> bool:
    """Return whether an attribute is data of an object or its class, and is not computed."""
    if name.startswith("__"):
        return False
    if name in object.__getattribute__(owner, "__dict__"):
        return True
    of_class = next((vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)), _UNREAD)
    return type(of_class) in _PLAIN


def _snapshot(value: Any) -> Any:
    """Return what identifies a value, even if a container or array changes later; `_UNREAD` for others."""
    kind: Any = type(value)
    if kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _Array(value)
    if not _is_container_type(kind) and not _is_settings(value):
        return _UNREAD
    leaves: list[Any] = []
    return tuple(leaves) if _flatten(value, leaves, set()) else _UNREAD


def _flatten(value: Any, leaves: list[Any], seen: set[int]) -> bool:
    """Append structure and leaves of a container or settings; return whether it has only few plain values.

    Of settings, other values are left out: a path or a logger among them is no constant of a program.
    """
    kind: Any = type(value)
    if kind in _PLAIN or kind in _FUNCTIONS or isinstance(value, _ARRAYS):
        leaves.append(_Array(value) if isinstance(value, np.ndarray) else value)
        return len(leaves) <= _MOST_LEAVES
    if id(value) in seen:  # a container may contain itself
        leaves.append(_SEEN)
        return True
    seen.add(id(value))
    if len(seen) > _MOST_LEAVES:
        return False
    if _is_container_type(kind):
        leaves.append((kind, len(value)))
        items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        if not all(_flatten(item, leaves, seen) for item in items):
            return False
    if not _is_settings(value):
        return _is_container_type(kind)
    leaves.append(kind)
    for name, item in _settings(value).items():
        count_before = len(leaves)
        leaves.append(name)
        if not _is_recordable(item) or not _flatten(item, leaves, seen):
            del leaves[count_before:]
    return len(leaves) <= _MOST_LEAVES and len(seen) <= _MOST_LEAVES


class _Array:
    """An array with a copy of its bytes, if these are few."""

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
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, float) and (before != before or not before):
        return now != now if before != before else not now and math.copysign(1, before) == math.copysign(1, now)
    return bool(before == now)
