"""A stand-in for `nccl.core` of nccl4py 0.6 between processes of one machine, on any driver of CUDA.

A call queues copies to the host, a function of the host that meets the other ranks through files, and copies back: so
it happens when the stream reaches it, at every launch of a graph again. It is stricter than the library: buffers must
be arrays on the device, lie within one allocation and apart or in place, a stream must be given, and all ranks must be
in the same call of a communicator, with the same number of elements, type and operation, in memory that is registered
on all ranks at the same offset or on none, or the communicator fails on all of them. A failed call leaves its buffers
as they are, and hangs like the library's until the communicator is aborted. A call on registered memory waits on the
host for those of the other ranks, as the library may: a rank that records a graph alone hangs, unless the emulated
GPU's work runs late.

An emulated GPU cannot be in two collectives at once, as a GPU can: communicators on streams of their own need work in
order, EMULATOR_STREAMS=inorder, in which all ranks reach their calls alike.

Sums are added one rank after the other, which is not the order of `TreeSum`, in the type of the elements; the greatest
of a number and NaN is the number, as NCCL's.
"""

import contextlib
import ctypes
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

# Seconds until a rank gives up.
PATIENCE = 60.0
# "RANK:N": on this rank the N-th call that the device reaches fails as where another node is gone.
FAULT = "NCCL_STANDIN_FAULT"
# The MPI rank whose library cannot allocate; a file that each rank's registered all-reduces are written to.
WITHOUT_MEMORY, REGISTERED_CALLS = "NCCL_STANDIN_WITHOUT_MEMORY", "NCCL_STANDIN_REGISTERED"


class NcclInvalid(Exception):  # noqa: N818 - the library's name
    pass


class NCCLError(Exception):
    pass


class Result(IntEnum):
    Success = 0
    InvalidUsage = 5
    RemoteError = 6
    InProgress = 7


class NcclRedOp(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_driver = ctypes.CDLL("libcuda.so.1")
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _check(code: int, name: str) -> None:
    if code:
        raise NCCLError(f"NCCL_ERROR_UNHANDLED_CUDA_ERROR: {name} answers {code}")


def get_version() -> str:
    return "stand-in"


class UniqueId:
    def __init__(self, content: bytes) -> None:
        assert len(content) == 128
        self._content = content

    @staticmethod
    def from_bytes(b: bytes) -> "UniqueId":
        return UniqueId(bytes(b))

    @property
    def as_bytes(self) -> bytes:
        return self._content

    def __bytes__(self) -> bytes:
        return self._content

    @property
    def folder(self) -> Path:
        return Path(self._content.rstrip(b"\0").decode())


def get_unique_id(empty: bool = False) -> UniqueId:
    return UniqueId(tempfile.mkdtemp(prefix="dptrain-nccl-").encode().ljust(128, b"\0"))


class Buffer:
    """Memory of `mem_alloc`, as cuda.core's."""

    def __init__(self, size: int) -> None:
        self.size, pointer = size, ctypes.c_uint64()
        _check(_driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), "cuMemAlloc")
        self.handle = pointer.value
        _allocated[self.handle] = size

    def close(self) -> None:
        if self.handle:
            assert _allocated.pop(self.handle)
            assert not any(self.handle in memory for memory in _registered.values()), "still registered"
            _check(_driver.cuMemFree_v2(ctypes.c_uint64(self.handle)), "cuMemFree")
            self.handle = 0


# Sizes by address, and addresses of registered memory by communicator.
_allocated: dict[int, int] = {}
_registered: dict["Communicator", set[int]] = {}


def mem_alloc(size: int, device: Any = None) -> Buffer:
    if os.environ.get(WITHOUT_MEMORY) == os.environ.get("PMI_RANK", "0"):
        raise NCCLError("NCCL_ERROR_INVALID_USAGE: this library has no ncclMemAlloc")
    return Buffer(size)


def mem_free(buf: Buffer) -> None:
    buf.close()


class RegisteredBufferHandle:
    """A registration, which ends with its communicator at the latest."""

    def __init__(self, comm: "Communicator", pointer: int) -> None:
        self._comm, self._pointer = comm, pointer
        _registered.setdefault(comm, set()).add(pointer)

    def close(self) -> None:
        _registered.get(self._comm, set()).discard(self._pointer)


class _AbortedError(Exception):
    pass


class _Buffer:
    """What a buffer says of itself, after checking that it is one."""

    def __init__(self, buffer: Any) -> None:
        interface = getattr(buffer, "__cuda_array_interface__", None)
        if interface is None:
            raise NcclInvalid(f"no buffer on a device: {buffer!r}")
        self.pointer, self.count = interface["data"][0], math.prod(interface["shape"])
        try:
            self.dtype = np.dtype(interface["typestr"])
        except TypeError:
            self.dtype = np.dtype("V")
        if self.dtype.name not in _TYPES:
            raise NcclInvalid(f"Unsupported data type: {interface['typestr']}")
        self.nbytes = self.count * self.dtype.itemsize
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(self.pointer)
        if _driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer):
            raise NcclInvalid(f"no memory of a device: {self.pointer:#x}")
        if self.pointer + self.nbytes > base.value + size.value:
            raise NcclInvalid(f"out of bounds: {self.nbytes} bytes at {self.pointer:#x}")


def _check_place(source: _Buffer, out: _Buffer, offset: int) -> None:
    """Refuse a buffer that overlaps the output but does not lie in its place there."""
    begin = source.pointer - out.pointer
    if source.nbytes and -source.nbytes < begin < out.nbytes and begin != offset:
        raise NcclInvalid(f"the source lies {begin} bytes behind the beginning of the output, not {offset}")


@dataclass
class _Call:
    """A call that the device reaches.

    Attributes:
        comm: of the call.
        stream: that it is queued on.
        post: gives what this rank gives.
        take: takes what the others give.
        reads: pointers, and arrays on the host that their content is copied to.
        writes: the other way.
    """

    comm: "Communicator"
    stream: int
    post: Callable[[], None]
    take: Callable[[], None]
    reads: list[tuple[int, Any]] = field(default_factory=list)
    writes: list[tuple[int, Any]] = field(default_factory=list)


_group: list[_Call] | None = None


def group_start() -> None:
    global _group
    assert _group is None, "the stand-in knows no group in a group"
    _group = []


def group_end(*, simulate: bool = False) -> None:
    global _group
    calls, _group = _group or [], None
    if calls:
        _queue(calls)


@contextlib.contextmanager
def group() -> Iterator[None]:
    group_start()
    try:
        yield
    finally:
        group_end()


def _queue(calls: list[_Call]) -> None:
    """Queue calls that the device reaches together."""
    stream, comm = ctypes.c_void_p(calls[0].stream), calls[0].comm
    assert all(call.stream == calls[0].stream for call in calls), "the stand-in knows groups on one stream"
    for pointer, host in (pair for call in calls for pair in call.reads):
        to, nbytes = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes)
        _check(_driver.cuMemcpyDtoHAsync_v2(to, ctypes.c_uint64(pointer), nbytes, stream), "cuMemcpyDtoHAsync")

    def reached(_: object) -> None:
        try:
            comm._reached()
            for call in calls:
                call.post()
            for call in calls:
                call.take()
            comm._taken()
        except _AbortedError:
            pass
        except Exception as error:  # one could reach nobody from here
            comm._fail(Result.InvalidUsage, f"{type(error).__name__}: {error}")

    function = _Function(reached)
    comm._kept.append((function, calls))
    _check(_driver.cuLaunchHostFunc(stream, function, None), "cuLaunchHostFunc")
    for pointer, host in (pair for call in calls for pair in call.writes):
        source, nbytes = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes)
        _check(_driver.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(pointer), source, nbytes, stream), "cuMemcpyHtoDAsync")


class Communicator:
    def __init__(self, folder: Path, name: str, nranks: int, rank: int) -> None:
        self._folder, self._name, self.nranks, self.rank = folder, name, nranks, rank
        self._calls, self._taken_calls, self._splits, self._reached_calls, self._registered_calls = 0, 0, 0, 0, 0
        self._old = range(0)
        self._sent: dict[tuple[Any, ...], int] = {}
        self._error, self._text, self.is_valid = Result.Success, "", True
        self._kept: list[Any] = []
        self._pinned: list[Any] = []
        self._meet("joined", b"")

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId, config: Any = None) -> "Communicator":
        return cls(unique_id.folder, "world", nranks, rank)

    def split(self, color: int | None = None, key: int = 0, config: Any = None) -> "Communicator":
        self._check_valid("split")
        self._splits += 1
        messages = self._meet(f"split{self._splits}", json.dumps([color, key]).encode())
        members = [(*json.loads(message), rank) for rank, message in enumerate(messages)]
        ranks = [rank for other, _, rank in sorted(members, key=lambda member: member[1:]) if other == color]
        assert color in range(1 << 31), "the stand-in knows no rank without a group"
        return Communicator(self._folder, f"{self._name}-{self._splits}-{color}", len(ranks), ranks.index(self.rank))

    # Meeting the others

    def _post(self, name: str, content: bytes) -> None:
        path = self._folder / f"{self._name}.{name}"
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(content)
        os.replace(part, path)

    def _wait(self, name: str) -> bytes:
        path, start = self._folder / f"{self._name}.{name}", time.monotonic()
        while True:
            if not self.is_valid:
                raise _AbortedError
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes()
            if time.monotonic() - start > PATIENCE:
                raise TimeoutError(f"{path.name} has not come")
            time.sleep(0.0005)

    def _meet(self, name: str, content: bytes) -> list[bytes]:
        self._post(f"{name}.{self.rank}", content)
        return [self._wait(f"{name}.{rank}") for rank in range(self.nranks)]

    def _remove(self, name: str) -> None:
        (self._folder / f"{self._name}.{name}").unlink(missing_ok=True)

    def _reached(self) -> None:
        self._reached_calls += 1
        rank, _, call = os.environ.get(FAULT, "").partition(":")
        if rank == str(self.rank) and call == str(self._reached_calls):
            self._fail(Result.RemoteError, "remote process exited or there was a network error")
            raise _AbortedError

    def _taken(self) -> None:
        """Remove what this rank has given before: who was in this call has read that."""
        if self._calls > self._taken_calls:
            for number in self._old:
                self._remove(f"{number}.{self.rank}")
            self._old, self._taken_calls = range(self._taken_calls + 1, self._calls + 1), self._calls

    def _fail(self, error: Result, text: str) -> None:
        """Hang, as the library does, until somebody aborts."""
        self._error, self._text = error, text
        start = time.monotonic()
        while self.is_valid and time.monotonic() - start < PATIENCE:
            time.sleep(0.01)

    # Calls

    def _host(self, nbytes: int) -> Any:
        """Return page-locked bytes, which live as long as the communicator."""
        address = ctypes.c_void_p()
        status = _driver.cuMemAllocHost_v2(ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        _check(status, "cuMemAllocHost")
        self._pinned.append(address)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (max(nbytes, 1),))[:nbytes]

    def _add(self, call: _Call) -> None:
        if _group is None:
            _queue([call])
        else:
            _group.append(call)

    def _collective(
        self,
        description: list[Any],
        stream: int | None,
        source: _Buffer | None,
        out: _Buffer,
        join: Callable[[list[Any]], Any],
    ) -> None:
        """Queue a collective, in which `join` makes of all ranks' bytes what goes into `out`."""
        self._check_valid(description[0])
        self._check_stream(stream)
        dtype = out.dtype
        sends = self._host(0 if source is None else source.nbytes)
        received = self._host(out.nbytes)

        def post() -> None:
            self._calls += 1
            call.number = self._calls
            self._post(f"{self._calls}.{self.rank}", json.dumps(description).encode() + b"\n" + sends.tobytes())

        def take() -> None:
            number = call.number
            messages = [self._wait(f"{number}.{rank}").partition(b"\n") for rank in range(self.nranks)]
            for rank, (other, _, _) in enumerate(messages):
                if json.loads(other) != description:
                    text = (
                        f"call {number}: rank {rank} is in {other.decode()}, "
                        f"rank {self.rank} in {json.dumps(description)}"
                    )
                    self._fail(Result.InvalidUsage, text)
                    raise _AbortedError
            with np.errstate(all="ignore"):
                joined = join([np.frombuffer(content, dtype) for _, _, content in messages])
            received[:] = np.ascontiguousarray(joined).view(np.uint8)

        call = _Call(self, stream or 0, post, take)
        if source is not None:
            call.reads.append((source.pointer, sends))
        call.writes.append((out.pointer, received))
        self._add(call)

    def allreduce(
        self, sendbuf: Any, recvbuf: Any, op: NcclRedOp, *, stream: int | None = None, config: Any = None
    ) -> None:
        source, out = self._pair(sendbuf, recvbuf)
        if source.count != out.count:
            raise NcclInvalid("Buffer count mismatch")
        description = ["allreduce", source.count, source.dtype.name, NcclRedOp(op).name]
        if (offset := self._registered_offset(source)) is not None:
            description += ["registered", offset]
            self._meet_registered()
        self._collective(description, stream, source, out, lambda parts: _reduced(parts, op))

    def reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, op: NcclRedOp, *, stream: int | None = None, config: Any = None
    ) -> None:
        source, out = self._pair(sendbuf, recvbuf)
        if source.count != out.count * self.nranks:
            raise NcclInvalid("Buffer count mismatch")
        rank_part = slice(out.count * self.rank, out.count * (self.rank + 1))
        description = ["reduce_scatter", source.count, source.dtype.name, NcclRedOp(op).name]
        self._collective(
            description, stream, source, out, lambda parts: _reduced([part[rank_part] for part in parts], op)
        )

    def allgather(self, sendbuf: Any, recvbuf: Any, *, stream: int | None = None, config: Any = None) -> None:
        source, out = self._pair(sendbuf, recvbuf)
        if source.count * self.nranks != out.count:
            raise NcclInvalid("Buffer count mismatch")
        _check_place(source, out, self.rank * source.nbytes)
        self._collective(["allgather", source.count, source.dtype.name], stream, source, out, np.concatenate)

    def broadcast(
        self, sendbuf: Any, recvbuf: Any, root: int, *, stream: int | None = None, config: Any = None
    ) -> None:
        out = _Buffer(recvbuf)
        source = _Buffer(sendbuf) if root == self.rank else None
        if source is not None:
            _check_place(source, out, 0)
        description = ["broadcast", out.count, out.dtype.name, root]
        self._collective(description, stream, source, out, lambda parts: parts[root])

    def send(self, sendbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._check_valid("send")
        self._check_stream(stream)
        source = _Buffer(sendbuf)
        content, way = self._host(source.nbytes), (self.rank, peer)

        def post() -> None:
            number = self._sent[way] = self._sent.get(way, 0) + 1
            description = json.dumps([source.count, source.dtype.name]).encode()
            self._post(f"{self.rank}-{peer}.{number}", description + b"\n" + content.tobytes())

        self._add(_Call(self, stream or 0, post, lambda: None, [(source.pointer, content)]))

    def recv(self, recvbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._check_valid("recv")
        self._check_stream(stream)
        out = _Buffer(recvbuf)
        content, way = self._host(out.nbytes), (peer, self.rank, "received")

        def take() -> None:
            number = self._sent[way] = self._sent.get(way, 0) + 1
            description, _, payload = self._wait(f"{peer}-{self.rank}.{number}").partition(b"\n")
            if json.loads(description) != [out.count, out.dtype.name]:
                expected = [out.count, out.dtype.name]
                self._fail(Result.InvalidUsage, f"rank {peer} sends {description.decode()}, expected {expected}")
                raise _AbortedError
            content[:] = np.frombuffer(payload, np.uint8)
            self._remove(f"{peer}-{self.rank}.{number}")

        self._add(_Call(self, stream or 0, lambda: None, take, [], [(out.pointer, content)]))

    def register_buffer(self, buffer: Any) -> RegisteredBufferHandle:
        self._check_valid("register")
        memory = _Buffer(buffer)
        if _allocated.get(memory.pointer) != memory.nbytes:
            raise NcclInvalid("the stand-in wants all of an allocation of mem_alloc")
        return RegisteredBufferHandle(self, memory.pointer)

    def _registered_offset(self, buffer: _Buffer) -> int | None:
        """Return where a buffer begins in registered memory, which must be the same on all ranks; None outside."""
        for pointer in _registered.get(self, ()):
            if 0 <= buffer.pointer - pointer < _allocated[pointer]:
                return buffer.pointer - pointer
        return None

    def _meet_registered(self) -> None:
        """Wait on the host for the other ranks' calls, as the library may for registered buffers."""
        self._registered_calls += 1
        # Where work runs late, the emulated GPU of a rank that waits here stands still, and others may wait for it.
        if os.environ.get("EMULATOR_STREAMS") != "random":
            self._meet(f"registered{self._registered_calls}", b"")
        if path := os.environ.get(REGISTERED_CALLS):
            with open(f"{path}.{self.rank}", "a") as log:
                log.write(f"{self._name}\n")

    @staticmethod
    def _pair(sendbuf: Any, recvbuf: Any) -> tuple[_Buffer, _Buffer]:
        source, out = _Buffer(sendbuf), _Buffer(recvbuf)
        if source.dtype != out.dtype:
            raise NcclInvalid(f"Dtype mismatch: sendbuf has dtype {source.dtype}, recvbuf has dtype {out.dtype}")
        return source, out

    @staticmethod
    def _check_stream(stream: int | None) -> None:
        if not isinstance(stream, int) or not stream:
            raise NcclInvalid(f"the stand-in wants a stream that is not the default one: {stream!r}")

    def _check_valid(self, operation: str) -> None:
        if not self.is_valid:
            raise NcclInvalid(f"Cannot {operation}: Communicator not initialized")

    # Its end

    def get_async_error(self) -> Result:
        self._check_valid("get async error")
        return self._error

    def get_last_error(self) -> str:
        self._check_valid("get last error")
        return self._text

    def abort(self) -> None:
        _registered.pop(self, None)
        self.is_valid = False

    def destroy(self) -> None:
        if not self.is_valid:
            return
        _registered.pop(self, None)
        self._meet("left", b"")
        self.is_valid = False
        if self.rank or self._name != "world":
            self._post(f"gone.{self.rank}", b"")
        else:
            gone_files = [self._folder / f"world.gone.{rank}" for rank in range(1, self.nranks)]
            while not all(path.exists() for path in gone_files):
                time.sleep(0.001)
            shutil.rmtree(self._folder)
        while self._pinned:
            _driver.cuMemFreeHost(self._pinned.pop())


def _reduced(parts: list[Any], op: NcclRedOp) -> Any:
    total = parts[-1].copy()
    for part in parts[:-1]:
        if op == NcclRedOp.SUM:
            total += part
        else:
            assert op == NcclRedOp.MAX
            total = np.fmax(total, part) if part.dtype.kind == "f" else np.maximum(total, part)
    return total
