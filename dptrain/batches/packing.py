"""Several sequences in a row, so that little of a batch is padding."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError


class PackedSequences(NamedTuple):
    """Rows of sequences, one after the other: int32 arrays (rows, length)."""

    tokens: npt.NDArray[np.int32]  # behind the last sequence of a row `pad_id`
    segment_ids: npt.NDArray[np.int32]  # 1, 2, ... by sequence of a row; 0 of padding
    positions: npt.NDArray[np.int32]  # within the sequence, from 0; 0 of padding

    def next_tokens(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return a language model's targets and sample weights, both (rows, length).

        A target is the next token of the sequence; where it has none, the weight is 0 and the target the token itself.
        """
        targets, weights = self.tokens.copy(), np.zeros(self.tokens.shape, np.float32)
        goes_on = (self.segment_ids[:, 1:] == self.segment_ids[:, :-1]) & (self.segment_ids[:, 1:] > 0)
        targets[:, :-1][goes_on] = self.tokens[:, 1:][goes_on]
        weights[:, :-1][goes_on] = 1
        return targets, weights


def pack_sequences(sequences: Sequence[Any], length: int, *, pad_id: int = 0) -> PackedSequences:
    """Return token sequences packed into rows of `length` tokens; none is cut, and empty ones are left out.

    Attention of one sequence to another is prevented by a mask of equal segments,
    `ops.equal(ops.expand_dims(segment_ids, 2), ops.expand_dims(segment_ids, 1))`, and positions are those within the
    sequence. A model computes then what it computes of each sequence alone.

    Longer sequences come first, each into the row with the least room for it (best fit decreasing); those of one length
    in the order in which they are given. The result is the same on all ranks.

    Args:
        sequences: of token ids, each a list or an array (tokens).
        length: of a row.
        pad_id: the token of padding.

    Raises:
        ConfigError: `length` is less than 1, a sequence is longer, or is not one of integers of 32 bits.

    Source: M. M. Krell et al., "Efficient sequence packing without cross-contamination", arXiv:2107.02027.
    """
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise ConfigError(f"pack_sequences: length = {length!r}: expected an integer >= 1")
    arrays = [_tokens(number, sequence, length) for number, sequence in enumerate(sequences)]
    rows = _best_fit([len(array) for array in arrays], int(length))
    packed = PackedSequences(
        np.full((len(rows), length), pad_id, np.int32), *(np.zeros((len(rows), length), np.int32) for _ in range(2))
    )
    for row, members in enumerate(rows):
        end = 0
        for segment, member in enumerate(members, 1):
            begin, end = end, end + len(arrays[member])
            packed.tokens[row, begin:end] = arrays[member]
            packed.segment_ids[row, begin:end] = segment
            packed.positions[row, begin:end] = np.arange(end - begin)
    return packed


def _tokens(number: int, sequence: Any, length: int) -> npt.NDArray[Any]:
    array = np.asarray(sequence)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        found = f"{array.dtype.name} of shape {array.shape}"
        raise ConfigError(
            f"pack_sequences: sequence {number} is {found}: expected token ids, integers of shape (tokens,)"
        )
    if len(array) > length:
        raise ConfigError(
            f"pack_sequences: sequence {number} has {len(array):,} tokens, a row {length:,}: cut it, or choose a "
            "greater length"
        )
    limits = np.iinfo(np.int32)
    if len(array) and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
        raise ConfigError(f"pack_sequences: sequence {number} has token ids beyond 32 bits")
    return array


def _best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the members of each row."""
    rows = list[list[int]]()
    with_room = defaultdict[int, list[int]](list)  # rows by what is left in them
    left = list[int]()  # what is left in any of them, in order
    for member in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        needed = lengths[member]
        if not needed:
            break  # no sequence behind is longer
        index = bisect_left(left, needed)
        if index == len(left):
            row, rest = len(rows), room
            rows.append([])
        else:
            rest = left[index]
            row = with_room[rest].pop()
            if not with_room[rest]:
                del left[index]
        rows[row].append(member)
        if rest > needed:
            if not with_room[rest - needed]:
                insort(left, rest - needed)
            with_room[rest - needed].append(row)
    return rows
