"""Batches of a source, drawn in the background while the device works on earlier ones.

The order of events follows keras/src/trainers/epoch_iterator.py (3.15); that ranks agree on each batch is ours.
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
from dptrain.batches.base import Batches, warn_ran_out
from dptrain.batches.feed import BatchRows
from dptrain.batches.fingerprint import DRAW_THE_SAME, fingerprint
from dptrain.batches.sampling import Shard, check_shards, shards_of
from dptrain.batches.structure import BatchSpec
from dptrain.batches.workers import Workers
from dptrain.comm.base import Communicator
from dptrain.errors import AgreedError, DataError, DptrainError, ExitCode
from dptrain.runtime.failure import describe

Mode = Literal["training", "evaluation", "prediction"]
# Returns a batch's arrays for a feed, and their spec.
BatchReader = Callable[[tuple[Any, ...]], tuple[Sequence[HostArray], BatchSpec]]

_GOOD, _OVER, _FAILED = 1, 2, 3


@dataclass(frozen=True)
class _Drawn:
    arrays: Sequence[HostArray]  # this rank's part
    kind: BatchSpec  # structure and dtypes
    rows: int  # rows drawn: of the whole batch, or of this rank's part where the source is sharded
    checksum: int  # must agree on all ranks
    description: str  # what the checksum covers, in words

    @property
    def row_bytes(self) -> int:
        return sum(array.itemsize * prod(array.shape[1:]) for array in self.arrays)


class StreamBatches(Batches):
    """Batches of a source. Every rank draws; an error, an end or any differing byte on one rank ends all."""

    numbered_by_batch = True

    def __init__(
        self,
        source: BatchSource,
        read: BatchReader,
        comm: Communicator,
        steps_per_epoch: int | None = None,
        *,
        rows: int = 0,
        mode: Mode = "training",
        shards: int | None = None,
    ) -> None:
        if shards is not None:
            check_shards(shards, comm.replicas)
            source.draw_whole()
        self._shards = shards
        self._source, self._read, self._comm = source, read, comm
        self._steps_per_epoch, self._mode = steps_per_epoch, mode
        self._num_batches = source.num_batches
        self.steps = steps_per_epoch or self._num_batches
        self._workers: Workers | None = None
        self._backend: Backend | None = None
        # The pass that the next epoch continues, its batches drawn so far, and the number of passes begun.
        self._pass: Iterator[Draw] | None = None
        self._position, self._passes = 0, 0
        # Batches of the next epoch that were trained on before an interruption.
        self._skipped = 0
        self._drawn: _Drawn | None = None
        # Batches since `keep` was called.
        self._replay: dict[Shard, _Drawn] | None = None
        self._reset_slots()
        self._slot_index, self._most_rows = 0, 0

    def reset(self) -> None:
        """Start from the beginning with the next epoch."""
        self._pass, self._position = None, 0
        self._num_batches = self._source.num_batches
        self._source.on_epoch_end()

    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Start the threads; memory for two shards is taken when they arrive."""
        guard_what_is_mapped()
        self._backend = backend
        self._workers = Workers(self._source.workers, "dptrain-batches")
        return self

    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield the steps until the pass ends, or `steps_per_epoch` of them. Collective."""
        if self._mode == "evaluation":
            self.reset()
        self._source.on_epoch_begin()
        left = self._begin(number)
        assert self._pass is not None
        trained, self._skipped = self._skipped, 0
        last = self._skip(trained)
        if last is not None and trained == left:  # no further batch shows what the arrays are
            self.spec = self._read(self._source.parts(last()))[1]
        first_row = 0
        rest = itertools.islice(self._pass, None if left is None else left - trained)
        for step, future in enumerate(self._ahead(rest, number, trained + 1), start=trained + 1):
            self._position += 1
            where = self._where(step, number)
            rows = self._agree(future, where)
            if rows is None:
                if self._num_batches is None:
                    self._num_batches = self._position
                self._pass = None
                warn_ran_out()
                self._source.on_epoch_end()
                return
            begin, stop, total = rows
            shards = [Shard(first_row + begin, first_row + stop, begin, total)]
            if self._shards is not None:
                shards = shards_of(first_row, first_row + total, self._comm.replica, self._comm.replicas, self._shards)
            if self._replay is not None and self._drawn is not None:
                self._replay[shards[0]] = self._drawn
                self.replay_bytes += total * self._drawn.row_bytes
            yield shards
            first_row += total
        if self._num_batches is not None and self._position >= self._num_batches:
            self._pass = None
            if self._steps_per_epoch is not None and left is not None and left < self._steps_per_epoch:
                warn_ran_out()
        self._source.on_epoch_end()

    def resume(self, epochs: int, step: int) -> None:
        """Skip the batches of an interrupted training: those of a generator or a loader are drawn again."""
        for number in range(epochs):
            self._source.on_epoch_begin()
            if self._steps_per_epoch is not None:
                self._skip(self._begin(number) or 0)
                if self._num_batches is not None and self._position >= self._num_batches:
                    self._pass = None
            self._source.on_epoch_end()
        self._skipped = step

    def _begin(self, number: int) -> int | None:
        """Begin a pass where an epoch needs one; return the steps of the epoch, None where only the end tells."""
        if self._pass is None or self._steps_per_epoch is None:
            self._pass = self._source.start(number if self._steps_per_epoch is None else self._passes)
            self._position, self._passes = 0, self._passes + 1
        limit = self._steps_per_epoch or self._num_batches
        return limit if limit is None or self._num_batches is None else min(limit, self._num_batches - self._position)

    def _skip(self, batches: int) -> Draw | None:
        last: Draw | None = None
        for draw in itertools.islice(self._pass or (), batches):
            self._position += 1
            last = draw if self._source.by_number else partial(_constant, draw())
        return last

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Send this rank's part of the batch to the device, which may still work on the one before."""
        (shards,) = steps
        drawn = (self._replay or {}).get(shards[0], self._drawn)
        assert drawn is not None
        for staging in self._slots[self._slot_index]:
            staging.release()
        self._slot_index = 1 - self._slot_index
        rows = sum(shard.rows for shard in shards)
        slot = self._slot(rows, drawn.arrays)
        for staging, array in zip(slot, drawn.arrays, strict=True):
            staging.reuse()
            staging.host[:rows] = array
            staging.send(rows)
            staging.arrive()
        starts = [shard.first_row - shards[0].first_row for shard in shards]
        # Of all ranks, so that they trace at the same time: of two slots only one may have room for a rank's rows.
        self._most_rows = max(self._most_rows, shards[0].batch_rows)
        shapes = tuple((self._most_rows, *staging.device.shape[1:]) for staging in slot)
        self.spec = replace(drawn.kind, shapes=shapes)
        samples = range(shards[0].first_row, shards[0].first_row + rows)
        return BatchRows(tuple(staging.device for staging in slot), self._identity, starts, samples)

    def keep(self) -> bool:
        """Retain the batches on the host."""
        self._replay, self.replay_bytes = {}, 0
        return True

    def close(self) -> None:
        """End the threads."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._reset_slots()
        self._drawn = self._replay = None

    def _reset_slots(self) -> None:
        # Two turns: the memory of one batch each, with its rows, and the shape and dtype of each array.
        self._slots: list[list[Staging]] = [[], []]
        self._kinds: list[tuple[int, list[tuple[tuple[int, ...], np.dtype[Any]]]]] = [(0, []), (0, [])]
        self._identity: Buffer = None

    def _ahead(self, draws: Iterable[Draw], epoch: int, first: int) -> Iterator["Future[_Drawn | None]"]:
        """Yield batches in order, drawn as far ahead as the source allows."""
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
        """Draw a batch and convert this rank's part of it, in the background."""
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
        description = f"{rows} samples, " + ", ".join(f"{array.dtype} {array.shape[1:]}" for array in arrays)
        checksum = 0
        if self._comm.size > 1:
            if self._source.sharded:
                description = description.partition(", ")[2]
            text = description if self._source.sharded else f"{description} {fingerprint(*arrays)}"
            checksum = zlib.crc32(text.encode())
            if not self._source.sharded:
                arrays = [array[slice(*self._part(rows))] for array in arrays]
        # Copies: the user's code may fill the same memory again when it is asked for the next batch.
        return _Drawn([np.array(array) for array in arrays], kind, rows, checksum, description)

    def _agree(self, future: "Future[_Drawn | None]", where: str) -> tuple[int, int, int] | None:
        """Return this rank's first row of the batch, one past its last, and the batch's rows; None at the end."""
        error = future.exception()
        self._drawn = None if error is not None else future.result()
        if self._comm.size == 1:
            if error is not None:
                raise error
            return None if self._drawn is None else (0, self._drawn.rows, self._drawn.rows)
        state = _FAILED if error is not None else _OVER if self._drawn is None else _GOOD
        drawn = self._drawn or _Drawn([], BatchSpec((), (), (), ""), 0, 0, "no further batch")
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
        """Return this rank's first row of a batch of `rows`, and one past its last."""
        mine = shards_of(0, rows, self._comm.replica, self._comm.replicas, self._shards)
        return mine[0].start, mine[-1].stop

    def _where(self, step: int, epoch: int) -> str:
        return f"batch {step} of {f'epoch {epoch + 1}' if self._mode == 'training' else f'the {self._mode}'}"

    def _refuse(self, drawn: _Drawn, where: str) -> None:
        """Report on all ranks which ranks drew a batch that differs from the majority's."""
        reports = self._comm.allgather([self._comm.process, drawn.description, drawn.checksum])
        processes, drawings = [report[0] for report in reports], [tuple(report[1:]) for report in reports]
        (common, count), *_ = Counter(drawings).most_common()
        others = [rank for rank, drawing in enumerate(drawings) if drawing != common or 2 * count <= len(drawings)]
        each = ", ".join(f"rank {rank} ({processes[rank]}) has {drawings[rank][0]}" for rank in others)
        if len(others) < len(drawings):
            each += f", the others {common[0]}"
        if len({description for description, _ in drawings}) == 1:
            each += f", with other values; {DRAW_THE_SAME}"
        failures = [(rank, str(drawings[rank][0])) for rank in others]
        raise AgreedError("data", ExitCode.DATA, f"{where}: the ranks have drawn different batches: {each}", failures)

    def _slot(self, rows: int, arrays: Sequence[HostArray]) -> list[Staging]:
        """Return the memory of the next slot, allocated anew where the shard is larger or its arrays differ."""
        assert self._backend is not None
        slot = self._slots[self._slot_index]
        kinds = [(array.shape[1:], array.dtype) for array in arrays]
        made_rows, slot_kinds = self._kinds[self._slot_index]
        if slot_kinds != kinds or made_rows < rows:
            slot.clear()
            slot.extend(self._backend.staging((rows, *shape), dtype) for shape, dtype in kinds)
            for staging in slot:
                staging.release()
            self._kinds[self._slot_index] = (rows, kinds)
        if self._identity is None or self._identity.shape[0] < rows:
            self._identity = self._backend.upload(np.arange(rows, dtype=np.int64))
        return slot


def _constant(batch: Any) -> Any:
    return batch


def _raise(error: BaseException | None, where: str) -> None:
    if isinstance(error, DptrainError):
        raise error
    if error is not None:
        wrapped = DptrainError(f"{where}: {describe(error)}")
        wrapped.exit_code = ExitCode.DEVICE if isinstance(error, MemoryError) else ExitCode.INTERNAL
        raise wrapped from error
