"""Sums over the ranks of a node by compiled code in shared memory (`kernels/native_ranks.h`)."""

import ctypes
from typing import Any

import numpy as np

from dptrain.backend.cpu.compile import shared
from dptrain.backend.cpu.interruption import Callback
from dptrain.comm.node import NodeMessage, NodeMessages
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import type_of

# Spins before yielding to other threads: about 50 us.
_TURNS = 1000


class _Message(ctypes.Structure):
    """`dp_Message`."""

    _fields_ = (
        ("ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("given", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("beside", ctypes.c_void_p * 2),
        ("call", ctypes.c_int64 * 5),
        ("turns", ctypes.c_int64),
        ("summed", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
    )


def is_native(reduced: Tensor) -> bool:
    """Whether an all-reduce is a sum of a supported type."""
    return reduced.attributes["over"] == "sum" and type_of(reduced.dtype).node_sums


class NodeSums:
    """Sums over the ranks of a node; `addresses` of each and that of `function` are for generated code."""

    def __init__(self, messages: NodeMessages) -> None:
        self.messages = messages
        self._attend = Callback(messages.attend)
        self._given: list[Any] = []  # keeps the structures' targets alive
        self._made = [self._message(message) for message in messages.messages]
        self.addresses = [ctypes.addressof(structure) for structure in self._made]
        self.function = shared("dp_sum")
        self._sum = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self.function)

    def memory(self, number: int) -> tuple[Array, Array]:
        """Return this rank's contribution to a sum, and the sum's memory."""
        message = self.messages.messages[number]
        return message.summands[self.messages.rank], message.total

    def sum(self, number: int) -> None:
        """Compute a sum. Collective."""
        self._sum(self.addresses[number])
        self.check()

    def check(self) -> None:
        """Raise the error that stopped compiled code in a sum."""
        if self._attend.error is not None:
            raise self._attend.error

    def _message(self, message: NodeMessage) -> _Message:
        memory = self.messages
        pointers = np.array([summand.ctypes.data for summand in message.summands], np.uint64)
        self._given.append(pointers)
        beside = [_address(neighbor) for neighbor in memory.neighbors]
        return _Message(
            ranks=len(message.summands),
            rank=memory.rank,
            count=message.total.size,
            given=pointers.ctypes.data,
            found=message.total.ctypes.data,
            arrived=memory.arrived.ctypes.data,
            own=_address(memory.progress),
            beside=(ctypes.c_void_p * 2)(*beside),
            call=(ctypes.c_int64 * 5)(*message.call),
            turns=_TURNS if memory.spins else 0,
            summed=shared(f"dp_add_{message.total.dtype.name}"),
            attend=ctypes.cast(self._attend.pointer, ctypes.c_void_p),
        )


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.int64).ctypes.data)
