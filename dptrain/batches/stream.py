"""Batches that the user's own code makes, drawn in the background while the device works on those before.

The order of events is that of keras/src/trainers/epoch_iterator.py (3.15); that ranks agree on each batch is ours.
"""

import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, Self

import numpy as np

from dptrain.backend.base import Backend, Buffer, HostArray
from dptrain.backend.cpu.mapped_files import guard_what_is_mapped
from dptrain.backend.transfers import Staging
from dptrain.batches.adapters import END, BatchSource, Draw
from dptrain.batches.base import Batches, warn_of_the_end
from dptrain.batches.feed import BatchRows
from dptrain.batches.fingerprint import DRAW_THE_SAME, fingerprint
from dptrain.batches.sampling import Shard, check_shards, shards_of
from dptrain.batches.structure import Batch
from dptrain.batches.workers import Workers
from dptrain.comm.base import Communicator
from dptrain.errors import AgreedError, DataError, DptrainError, ExitCode
from dptrain.runtime.failure import describe

What = Literal["training", "evaluation", "prediction"]
# Returns a batch's arrays as a feed takes them, and what they are.
Read = Callable[[tuple[Any, ...]], tuple[Sequence[HostArray], Batch]]

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

    @property
    def row_bytes(self) -> int:
        """What a sample takes."""
        return sum(one.itemsize * prod(one.shape[1:]) for one in self.arrays)


class StreamBatches(Batches):
    """Batches of a source. Every rank draws, and they compare what they have drawn: sizes, dtypes, every byte.

    An error, an end or a batch that one rank alone has met ends all ranks.

    Args:
        source: of the batches.
        read: makes arrays of a batch's parts, (rows, ...) each; called in the background.
        comm: the ranks.
        steps_per_epoch: as Keras: epochs end after that many, the next goes on where the last has ended.
        rows: of the first batch, if anybody knows.
        what: "training", "evaluation" or "prediction"; every evaluation is a new beginning.
        shards: of every batch, whatever the number of ranks; None for one a rank.

    Raises:
        ConfigError: fewer shards than ranks.
    """

    numbered_by_batch = True

    def __init__(
        self,
        source: BatchSource,
        read: Read,
        comm: Communicator,
        steps_per_epoch: int | None = None,
        *,
        rows: int = 0,
        what: What = "training",
        shards: int | None = None,
    ) -> None:
        if shards is not None:
            check_shards(shards, comm.replicas)
            source.draw_whole()
        self._shards = shards
        self._source, self._read, self._comm = source, read, comm
        self._steps_per_epoch, self._what = steps_per_epoch, what
        self._num_batches = source.num_batches
        self.steps = steps_per_epoch or self._num_batches
        self._workers: Workers | None = None
        self._backend: Backend | None = None
        # The pass that the next epoch goes on with, the batches asked of it, the passes begun.
        self._pass: Iterator[Draw] | None = None
        self._asked, self._passes = 0, 0
        # Of the next epoch, that were trained on before an interruption.
        self._skipped = 0
        self._drawn: _Drawn | None = None
        # Of the steps since `keep`, where anybody has asked for them.
        self._kept: dict[Shard, _Drawn] | None = None
        self._forget_memory()
        self._turn = 0

    def reset(self) -> None:
        """Begin anew with the next epoch."""
        self._pass, self._asked = None, 0
        self._num_batches = self._source.num_batches
        self._source.on_epoch_end()

    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Start the threads; memory for two shards is taken when they come."""
        guard_what_is_mapped()
        self._backend = backend
        self._workers = Workers(self._source.workers, "dptrain-batches")
        return self

    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield the steps until the pass ends, or `steps_per_epoch` of them. Collective."""
        if self._what == "evaluation":
            self.reset()
        self._source.on_epoch_begin()
        left = self._begin(number)
        assert self._pass is not None
        done, self._skipped = self._skipped, 0
        last = self._skip(done)
        if last is not None and done == left:  # there is no further batch to see what the arrays are
            self.about = self._read(self._source.parts(last()))[1]
        seen = 0
        rest = itertools.islice(self._pass, None if left is None else left - done)
        for step, future in enumerate(self._ahead(rest, number, done + 1), start=done + 1):
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
            shards = [Shard(seen + begin, seen + stop, begin, total)]
            if self._shards is not None:
                shards = shards_of(seen, seen + total, self._comm.replica, self._comm.replicas, self._shards)
            if self._kept is not None and self._drawn is not None:
                self._kept[shards[0]] = self._drawn
                self.kept_bytes += total * self._drawn.row_bytes
            yield shards
            seen += total
        if self._num_batches is not None and self._asked >= self._num_batches:
            self._pass = None
            if self._steps_per_epoch is not None and left is not None and left < self._steps_per_epoch:
                warn_of_the_end()
        self._source.on_epoch_end()

    def resume(self, epochs: int, step: int) -> None:
        """Go on behind the batches of an interrupted training: those of a generator or a loader are drawn again."""
        for number in range(epochs):
            self._source.on_epoch_begin()
            if self._steps_per_epoch is not None:
                self._skip(self._begin(number) or 0)
                if self._num_batches is not None and self._asked >= self._num_batches:
                    self._pass = None
            self._source.on_epoch_end()
        self._skipped = step

    def _begin(self, number: int) -> int | None:
        """Begin a pass, if an epoch begins with one; return the steps of the epoch, None where only the end tells."""
        if self._pass is None or self._steps_per_epoch is None:
            self._pass = self._source.start(number if self._steps_per_epoch is None else self._passes)
            self._asked, self._passes = 0, self._passes + 1
        limit = self._steps_per_epoch or self._num_batches
        return limit if limit is None or self._num_batches is None else min(limit, self._num_batches - self._asked)

    def _skip(self, batches: int) -> Draw | None:
        """Leave out the next batches of the pass; return what gives the last of them."""
        last: Draw | None = None
        for draw in itertools.islice(self._pass or (), batches):
            self._asked += 1
            last = draw if self._source.by_number else partial(_given, draw())
        return last

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Send this rank's part of the step's batch to the device, which may still work on the one before."""
        (shards,) = steps
        drawn = (self._kept or {}).get(shards[0], self._drawn)
        assert drawn is not None
        for staging in self._slots[self._turn]:
            staging.release()
        self._turn = 1 - self._turn
        rows = sum(shard.rows for shard in shards)
        slot = self._slot(rows, drawn.arrays)
        for staging, array in zip(slot, drawn.arrays, strict=True):
            staging.reuse()
            staging.host[:rows] = array
            staging.send(rows)
            staging.arrive()
        starts = [shard.first_row - shards[0].first_row for shard in shards]
        shapes = tuple(tuple(staging.device.shape) for staging in slot)
        self.about = replace(drawn.kind, shapes=shapes)
        return BatchRows(tuple(staging.device for staging in slot), self._identity, starts)

    def keep(self) -> bool:
        """Keep the batches on the host."""
        self._kept, self.kept_bytes = {}, 0
        return True

    def close(self) -> None:
        """End the threads."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._forget_memory()
        self._drawn = self._kept = None

    def _forget_memory(self) -> None:
        # Two turns: the memory of one batch each, with its rows, and the shape and dtype of each array.
        self._slots: list[list[Staging]] = [[], []]
        self._kinds: list[tuple[int, list[tuple[tuple[int, ...], np.dtype[Any]]]]] = [(0, []), (0, [])]
        self._identity: Buffer = None

    def _ahead(self, draws: Iterable[Draw], epoch: int, first: int) -> Iterator["Future[_Drawn | None]"]:
        """Yield what is drawn in order, as many batches ahead as the source allows."""
        assert self._workers is not None
        pending: deque[Future[_Drawn | None]] = deque()
        numbered = enumerate(draws, start=first)
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
            text = about if self._source.sharded else f"{about} {fingerprint(*arrays)}"
            checksum = zlib.crc32(text.encode())
            if not self._source.sharded:
                arrays = [array[slice(*self._part(rows))] for array in arrays]
        # Copies: the user's code may fill the same memory again when it is asked for the next batch.
        return _Drawn([np.array(array) for array in arrays], kind, rows, checksum, about)

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
            self._refuse(drawn, where)
        if state == _OVER:
            return None
        if self._source.sharded:
            ends = np.cumsum(facts[self._comm.peers, 1]).tolist()
            if ends[-1] == 0:
                raise AgreedError("data", ExitCode.DATA, f"{where}: it has no samples on any rank", [])
            end = ends[self._comm.replica]
            return end - drawn.rows, end, ends[-1]
        return *self._part(drawn.rows), drawn.rows

    def _part(self, rows: int) -> tuple[int, int]:
        """Return this rank's first row of a batch of so many, and one past its last."""
        mine = shards_of(0, rows, self._comm.replica, self._comm.replicas, self._shards)
        return mine[0].start, mine[-1].stop

    def _where(self, step: int, epoch: int) -> str:
        return f"batch {step} of {f'epoch {epoch + 1}' if self._what == 'training' else f'the {self._what}'}"

    def _refuse(self, drawn: _Drawn, where: str) -> None:
        """Say on all ranks who has drawn another batch than most, or what each has where there is no majority.

        Raises:
            AgreedError: always.
        """
        told = self._comm.allgather([self._comm.process, drawn.about, drawn.checksum])
        processes, found = [one[0] for one in told], [tuple(one[1:]) for one in told]
        (common, count), *_ = Counter(found).most_common()
        others = [rank for rank, one in enumerate(found) if one != common or 2 * count <= len(found)]
        each = ", ".join(f"rank {rank} ({processes[rank]}) has {found[rank][0]}" for rank in others)
        if len(others) < len(found):
            each += f", the others {common[0]}"
        if len({about for about, _ in found}) == 1:
            each += f", with other values; {DRAW_THE_SAME}"
        failures = [(rank, str(found[rank][0])) for rank in others]
        raise AgreedError("data", ExitCode.DATA, f"{where}: the ranks have drawn different batches: {each}", failures)

    def _slot(self, rows: int, arrays: Sequence[HostArray]) -> list[Staging]:
        """Return the memory of this turn, made anew where the shard is larger or of another kind than any before."""
        assert self._backend is not None
        slot = self._slots[self._turn]
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


def _given(batch: Any) -> Any:
    return batch


def _raise(error: BaseException | None, where: str) -> None:
    """Raise an error with the number of the batch, which those of the user's own code do not name."""
    if isinstance(error, DptrainError):
        raise error
    if error is not None:
        found = DptrainError(f"{where}: {describe(error)}")
        found.exit_code = ExitCode.DEVICE if isinstance(error, MemoryError) else ExitCode.INTERNAL
        raise found from error
