"""Batches that the user's own code makes, drawn in the background while the device works on those before.

The order of events is that of keras/src/trainers/epoch_iterator.py (3.15); that ranks agree on each batch is ours.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np

from dptrain.backend.base import Backend, Buffer, HostArray
from dptrain.backend.transfers import Staging
from dptrain.batches.adapters import END, BatchSource, Draw
from dptrain.batches.base import Batches, warn_of_the_end
from dptrain.batches.feed import Rows
from dptrain.batches.sampling import Shard
from dptrain.batches.structure import Batch
from dptrain.batches.workers import Workers
from dptrain.comm.base import Communicator
from dptrain.data.parts import cut
from dptrain.errors import AgreedError, DataError, DptrainError, ExitCode
from dptrain.runtime.failure import describe

What = Literal["training", "evaluation", "prediction"]
# Returns a batch's arrays as a feed takes them, and what they are.
Read = Callable[[tuple[Any, ...]], tuple[Sequence[HostArray], Batch]]

# Of each array of a batch that ranks compare.
_COMPARED_BYTES = 1 << 16
_GOOD, _OVER, _FAILED = 1, 2, 3


@dataclass(frozen=True)
class _Drawn:
    """A batch on the host.

    Attributes:
        arrays: this rank's part.
        kind: what they are.
        rows: of what was drawn: of the whole batch, or of the part where the source gives parts.
        checksum: what must be the same on all ranks.
        about: the same in words.
    """

    arrays: Sequence[HostArray]
    kind: Batch
    rows: int
    checksum: int
    about: str


class StreamBatches(Batches):
    """Batches of a source. Every rank draws, and they compare what they have drawn: sizes, dtypes, first bytes.

    An error, an end or a batch that one rank alone has met ends all ranks.

    Args:
        source: of the batches.
        read: makes arrays of a batch's parts, (rows, ...) each; called in the background.
        comm: the ranks.
        steps_per_epoch: as Keras: epochs end after that many, the next goes on where the last has ended.
        rows: of the first batch, if anybody knows.
        what: "training", "evaluation" or "prediction"; every evaluation is a new beginning.
    """

    def __init__(
        self,
        source: BatchSource,
        read: Read,
        comm: Communicator,
        steps_per_epoch: int | None = None,
        *,
        rows: int = 0,
        what: What = "training",
    ) -> None:
        self._source, self._read, self._comm = source, read, comm
        self._steps_per_epoch, self._what = steps_per_epoch, what
        self._num_batches = source.num_batches
        self.steps = steps_per_epoch or self._num_batches
        self._workers: Workers | None = None
        self._backend: Backend | None = None
        # The pass that the next epoch goes on with, the batches asked of it, the passes begun.
        self._pass: Iterator[Draw] | None = None
        self._asked, self._passes = 0, 0
        self._drawn: _Drawn | None = None
        self._forget_memory()
        self._turn = 0

    def reset(self) -> None:
        """Begin anew with the next epoch."""
        self._pass, self._asked = None, 0
        self._num_batches = self._source.num_batches
        self._source.on_epoch_end()

    def open(self, backend: Backend, most_bytes: int | None) -> Self:
        """Start the threads; memory for two shards is taken when they come."""
        self._backend = backend
        self._workers = Workers(self._source.workers, "dptrain-batches")
        return self

    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield the steps until the pass ends, or `steps_per_epoch` of them. Collective."""
        if self._what == "evaluation":
            self.reset()
        self._source.on_epoch_begin()
        if self._pass is None or self._steps_per_epoch is None:
            self._pass = self._source.start(number if self._steps_per_epoch is None else self._passes)
            self._asked, self._passes = 0, self._passes + 1
        limit = self._steps_per_epoch or self._num_batches
        left = limit if limit is None or self._num_batches is None else min(limit, self._num_batches - self._asked)
        seen = 0
        for step, future in enumerate(self._ahead(itertools.islice(self._pass, left), number), start=1):
            self._asked += 1
            where = self._where(step, number)
            rows = self._agree(future, where)
            if rows is None:
                if self._num_batches is None:
                    self._num_batches = self._asked
                self._pass = None
                warn_of_the_end()
                self._source.on_epoch_end()
                return
            begin, stop, total = rows
            yield [Shard(seen + begin, seen + stop, begin, total)]
            seen += total
        if self._num_batches is not None and self._asked >= self._num_batches:
            self._pass = None
            if self._steps_per_epoch is not None and left is not None and left < self._steps_per_epoch:
                warn_of_the_end()
        self._source.on_epoch_end()

    def rows(self, steps: Sequence[Sequence[Shard]]) -> Rows:
        """Send this rank's part of the step's batch to the device, which may still work on the one before."""
        assert self._drawn is not None
        ((shard,),) = steps
        for staging in self._slots[self._turn]:
            staging.release()
        self._turn = 1 - self._turn
        slot = self._slot(shard.rows)
        for staging, array in zip(slot, self._drawn.arrays, strict=True):
            staging.reuse()
            staging.host[: shard.rows] = array
            staging.send(shard.rows)
            staging.arrive()
        shapes = tuple(tuple(staging.device.shape) for staging in slot)
        self.about = replace(self._drawn.kind, shapes=shapes)
        return Rows(tuple(staging.device for staging in slot), self._identity, [0])

    def close(self) -> None:
        """End the threads."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._forget_memory()
        self._drawn = None

    def _forget_memory(self) -> None:
        # Two turns: the memory of one batch each, with its rows, and the shape and dtype of each array.
        self._slots: list[list[Staging]] = [[], []]
        self._kinds: list[tuple[int, list[tuple[tuple[int, ...], np.dtype[Any]]]]] = [(0, []), (0, [])]
        self._identity: Buffer = None

    def _ahead(self, draws: Iterable[Draw], epoch: int) -> Iterator["Future[_Drawn | None]"]:
        """Yield what is drawn in order, as many batches ahead as the source allows."""
        assert self._workers is not None
        pending: deque[Future[_Drawn | None]] = deque()
        numbered = enumerate(draws, start=1)
        try:
            while True:
                while len(pending) < self._source.ahead and (following := next(numbered, None)) is not None:
                    step, draw = following
                    job = partial(self._draw, draw, self._where(step, epoch))
                    pending.append(self._workers.submit(job))
                if not pending:
                    return
                yield pending.popleft()
        finally:
            for future in pending:
                future.cancel()

    def _draw(self, draw: Draw, where: str) -> _Drawn | None:
        """Draw a batch and make arrays of this rank's part of it, in the background."""
        batch = draw()
        if batch is END:
            return None
        try:
            arrays, kind = self._read(self._source.parts(batch))
        except DptrainError as error:
            raise type(error)(f"{where}: {error}") from error
        rows = len(arrays[0])
        if rows == 0 and not self._source.sharded:
            raise DataError(f"{where}: it has no samples")
        about = f"{rows} samples, " + ", ".join(f"{array.dtype} {array.shape[1:]}" for array in arrays)
        checksum = 0
        if self._comm.size > 1:
            if self._source.sharded:
                about = about.partition(", ")[2]
            checksum = zlib.crc32(about.encode())
            if not self._source.sharded:
                checksum = _checksum(arrays, checksum)
                begin, stop = cut(0, rows, self._comm.size)[self._comm.rank]
                arrays = [array[begin:stop] for array in arrays]
        # Copies: the user's code may fill the same memory again when it is asked for the next batch.
        return _Drawn([array.copy() for array in arrays], kind, rows, checksum, about)

    def _agree(self, future: "Future[_Drawn | None]", where: str) -> tuple[int, int, int] | None:
        """Return this rank's first row of the batch, one past its last, and the batch's rows; None at the end.

        Raises:
            AgreedError: one rank has met an error, or another batch than the others.
        """
        error = future.exception()
        self._drawn = None if error is not None else future.result()
        if self._comm.size == 1:
            if error is not None:
                raise error
            return None if self._drawn is None else (0, self._drawn.rows, self._drawn.rows)
        state = _FAILED if error is not None else _OVER if self._drawn is None else _GOOD
        drawn = self._drawn or _Drawn([], Batch((), (), (), ""), 0, 0, "no further batch")
        facts = np.zeros((self._comm.size, 3), np.int64)
        facts[self._comm.rank] = state, drawn.rows, drawn.checksum
        self._comm.allreduce_sum(facts)  # each rank fills its own row: a gathering in one message
        if (facts[:, 0] == _FAILED).any():
            self._comm.agree("data", partial(_raise, error, where))
        compared = facts[:, [0, 2]] if self._source.sharded else facts
        if (compared != compared[0]).any():
            self._refuse(drawn.about, where)
        if state == _OVER:
            return None
        if self._source.sharded:
            ends = np.cumsum(facts[:, 1]).tolist()
            if ends[-1] == 0:
                raise AgreedError("data", ExitCode.DATA, f"{where}: it has no samples on any rank", [])
            return ends[self._comm.rank] - drawn.rows, ends[self._comm.rank], ends[-1]
        return *cut(0, drawn.rows, self._comm.size)[self._comm.rank], drawn.rows

    def _where(self, step: int, epoch: int) -> str:
        return f"batch {step} of {f'epoch {epoch + 1}' if self._what == 'training' else f'the {self._what}'}"

    def _refuse(self, about: str, where: str) -> None:
        """Say on all ranks what each has drawn."""
        found = self._comm.allgather(about)
        each = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(found))
        if len(set(found)) == 1:
            each = f"each {found[0]}, with other values: every rank must draw the same, so seed what is random"
        raise AgreedError("data", ExitCode.DATA, f"{where}: the ranks have drawn different batches: {each}", [])

    def _slot(self, rows: int) -> list[Staging]:
        """Return the memory of this turn, made anew where the shard is larger or of another kind than any before."""
        assert self._backend is not None
        assert self._drawn is not None
        arrays, slot = self._drawn.arrays, self._slots[self._turn]
        wanted = [(array.shape[1:], array.dtype) for array in arrays]
        made_rows, made = self._kinds[self._turn]
        if made != wanted or made_rows < rows:
            slot.clear()
            slot.extend(self._backend.staging((rows, *shape), dtype) for shape, dtype in wanted)
            for staging in slot:
                staging.release()
            self._kinds[self._turn] = (rows, wanted)
        if self._identity is None or self._identity.shape[0] < rows:
            self._identity = self._backend.upload(np.arange(rows, dtype=np.int64))
        return slot


def _checksum(arrays: Sequence[HostArray], checksum: int) -> int:
    """Continue a checksum with the first bytes of arrays."""
    for array in arrays:
        rows = max(1, _COMPARED_BYTES // max(1, array[:1].nbytes))
        checksum = zlib.crc32(np.ascontiguousarray(array[:rows]).tobytes(), checksum)
    return checksum


def _raise(error: BaseException | None, where: str) -> None:
    """Raise an error with the number of the batch, which those of the user's own code do not name."""
    if isinstance(error, DptrainError):
        raise error
    if error is not None:
        found = DptrainError(f"{where}: {describe(error)}")
        found.exit_code = ExitCode.DEVICE if isinstance(error, MemoryError) else ExitCode.INTERNAL
        raise found from error
