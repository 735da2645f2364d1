"""Connectionist temporal classification on the host.

Source: A. Graves et al., "Connectionist temporal classification: labelling unsegmented sequence data with recurrent
neural networks", ICML 2006.
"""

from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast, equal, floating, where
from dptrain.ops.manipulation import concatenate, expand_dims, transpose, zeros_like
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import argmax, log_softmax, max, sum
from dptrain.ops.sorting.sort import along_last, argsort
from dptrain.program.lowering import HostCall
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.types import type_of

# Keras' stand-in for the logarithm of 0.
_LOG_ZERO = -1e5


class _Lattice:
    """The states of a batch's paths (label, blank, label, ...) and the transitions allowed."""

    def __init__(self, logs: Array, target: Array, target_length: Array, blank: int) -> None:
        rows, N = target.shape
        # Classes (B, S) of the S = 2 N + 1 states, blanks at even indices, and their log-probabilities (T, B, S).
        self.labels = np.full((rows, 2 * N + 1), blank, np.int64)
        self.labels[:, 1::2] = np.clip(target, 0, logs.shape[-1] - 1)
        self.scores = np.take_along_axis(logs, self.labels[:, None, :], 2).transpose(1, 0, 2)
        # Whether a state may follow the state two before it.
        self.skips = np.zeros(self.labels.shape, bool)
        self.skips[:, 2:] = (self.labels[:, 2:] != self.labels[:, :-2]) & (np.arange(2, 2 * N + 1) % 2 == 1)
        self.last = 2 * np.clip(target_length, 0, N)  # index of the final state

    def forward(self, lengths: Array) -> Array:
        """Return (T, B, S): log-probabilities of all prefixes that end in a state at a time."""
        T, rows, S = self.scores.shape
        alphas = np.empty((T, rows, S))
        alpha = np.full((rows, S), -np.inf)
        alpha[:, 0] = 0
        reached = alpha.copy()
        reached[:, 1:2] = 0
        for time in range(T):
            if time:
                reached = self._transitions(alpha)
            alpha = np.where((time < lengths)[:, None], reached + self.scores[time], alpha)
            alphas[time] = alpha
        return alphas

    def _transitions(self, alpha: Array) -> Array:
        from_previous = np.pad(alpha, ((0, 0), (1, 0)), constant_values=-np.inf)[:, :-1]
        from_skip = np.pad(alpha, ((0, 0), (2, 0)), constant_values=-np.inf)[:, :-2]
        return np.asarray(np.logaddexp(np.logaddexp(alpha, from_previous), np.where(self.skips, from_skip, -np.inf)))

    def backward(self, lengths: Array) -> Array:
        """Return (T, B, S): log-probabilities of all suffixes after a state at a time."""
        T, rows, S = self.scores.shape
        betas = np.full((T, rows, S), -np.inf)
        ends = np.full((rows, S), -np.inf)
        at = np.arange(rows)
        ends[at, self.last] = 0
        ends[at, np.maximum(self.last - 1, 0)] = 0
        beta = ends
        for time in reversed(range(T)):
            if time < T - 1:
                ahead = beta + self.scores[time + 1]
                from_next = np.pad(ahead, ((0, 0), (0, 1)), constant_values=-np.inf)[:, 1:]
                skipped = np.where(self.skips, ahead, -np.inf)
                from_skip = np.pad(skipped, ((0, 0), (0, 2)), constant_values=-np.inf)[:, 2:]
                inner = np.logaddexp(np.logaddexp(ahead, from_next), from_skip)
                beta = np.where((time < lengths - 1)[:, None], inner, ends)
            betas[time] = beta
        return betas

    def total(self, alphas: Array) -> Array:
        """Return (B,): log-probabilities of all paths."""
        at = np.arange(alphas.shape[1])
        last = alphas[-1] if len(alphas) else np.full(self.labels.shape, -np.inf)
        before = np.where(self.last > 0, last[at, np.maximum(self.last - 1, 0)], -np.inf)
        return np.asarray(np.logaddexp(last[at, self.last], before))


@op(
    shape=lambda logs, target, target_length, length, *, blank: logs[:1],
    letters="aXX,aX,a,a->a",
    dtype=lambda logs, *targets, blank: logs,
    lowering=HostCall(),
)
def ctc_losses(logs: Array, target: Array, target_length: Array, length: Array, *, blank: int, out: Array) -> None:
    """The negative log-probability of each target."""
    lattice = _Lattice(logs.astype(np.float64), target, target_length, blank)
    out[...] = np.minimum(-lattice.total(lattice.forward(length)), -_LOG_ZERO)


@op(
    shape=lambda logs, target, target_length, length, *, blank: logs,
    letters="aXX,aX,a,a->aXX",
    dtype=lambda logs, *targets, blank: logs,
    lowering=HostCall(),
)
def ctc_slopes(logs: Array, target: Array, target_length: Array, length: Array, *, blank: int, out: Array) -> None:
    """The gradients of `ctc_losses` in the log-probabilities: minus each class's posterior at each time."""
    lattice = _Lattice(logs.astype(np.float64), target, target_length, blank)
    alphas = lattice.forward(length)
    total = lattice.total(alphas)
    share = np.exp(alphas + lattice.backward(length) - total[None, :, None])
    share[~np.isfinite(share)] = 0
    share[np.arange(len(share))[:, None] >= length[None, :]] = 0
    share[:, ~(total > _LOG_ZERO)] = 0
    slopes = np.zeros(logs.shape)
    rows = np.arange(len(logs))
    for state in range(lattice.labels.shape[1]):
        slopes[rows, :, lattice.labels[:, state]] -= share[:, :, state].T
    out[...] = slopes


@ctc_losses.gradient
def _ctc_losses(
    y: Tensor, dy: Tensor, logs: Tensor, target: Tensor, target_length: Tensor, length: Tensor
) -> tuple[Tensor | None, ...]:
    slopes = ctc_slopes(logs, target, target_length, length, blank=y.attributes["blank"])
    return expand_dims(dy, (1, 2)) * slopes, None, None, None


def _at_least_float32(scores: Tensor) -> Tensor:
    """Return scores as float32 or float64: half precision cannot sum logarithms."""
    scores = floating(scores)
    return cast(scores, type_of(scores.dtype).compute)


@operation
def ctc_loss(target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0) -> Tensor:
    """Return the negative log-probability of each target, summed over all its alignments with the outputs.

    The result is (B,), float32 or float64; 100,000 where no alignment exists.

    Args:
        target: (B, N) integer labels.
        output: (B, T, C) scores before a softmax.
        target_length, output_length: (B,) integers: how many labels and times count.
        mask_index: the blank class.
    """
    labels, scores, label_length, length = as_tensors([target, output, target_length, output_length])
    if scores.ndim != 3 or labels.ndim != 2:
        raise ConfigError(
            f"ctc_loss: target and output of shapes {labels.shape}, {scores.shape}; expected (B, N), (B, T, C)"
        )
    if not 0 <= mask_index < int(scores.shape[-1]):
        raise ConfigError(f"ctc_loss: mask_index={mask_index} is out of range for {int(scores.shape[-1])} classes")
    logs = log_softmax(_at_least_float32(scores), -1)
    integers = [cast(tensor, "int32") for tensor in (labels, label_length, length)]
    return ctc_losses(logs, *integers, blank=int(mask_index))


# Decoding


@operation
@for_open_shapes
def ctc_decode(
    inputs: Any,
    sequence_lengths: Any,
    strategy: str = "greedy",
    beam_width: int = 100,
    top_paths: int = 1,
    merge_repeated: bool = True,
    mask_index: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """Return the most probable labels, int32 (top_paths, B, T) padded with -1, and their scores.

    Args:
        inputs: (B, T, C) scores before a softmax.
        sequence_lengths: (B,) integers: how many times count.
        strategy: "greedy" takes the best class at each time, with scores (B, 1), minus the sum of the best scores;
            "beam_search" has scores (B, top_paths), log-probabilities.
        beam_width, top_paths: how many paths "beam_search" follows and returns.
        merge_repeated: "greedy" merges equal neighbours.
        mask_index: the blank class; None for the last.
    """
    scores, lengths = as_tensors([inputs, sequence_lengths])
    scores, lengths = _at_least_float32(scores), cast(lengths, "int32")
    blank = int(scores.shape[-1]) - 1 if mask_index is None else int(mask_index)
    if strategy == "greedy":
        return _greedy(scores, lengths, merge_repeated, blank)
    if strategy != "beam_search":
        raise ConfigError(f"Invalid strategy {strategy}. Supported values are 'greedy' and 'beam_search'.")
    packed = beam_paths(log_softmax(scores, -1), lengths, width=int(beam_width), paths=int(top_paths), blank=blank)
    return transpose(cast(packed[..., 1:], "int32"), (1, 0, 2)), packed[..., 0]


def _greedy(scores: Tensor, lengths: Tensor, merge_repeated: bool, blank: int) -> tuple[Tensor, Tensor]:
    times = int(scores.shape[1])
    outside = np.arange(times)[None, :] >= expand_dims(lengths, -1)
    labels = where(outside, blank, argmax(scores, -1))
    best = where(outside, 0.0, max(scores, -1))
    if merge_repeated:
        repeated = equal(labels[:, 1:], labels[:, :-1])
        labels = where(concatenate([zeros_like(repeated[:, :1]), repeated], 1), blank, labels) if times > 1 else labels
    absent = equal(labels, blank)
    order = argsort(where(absent, times, np.arange(times)[None, :]), -1)
    packed = along_last(where(absent, -1, labels), order)
    return expand_dims(cast(packed, "int32"), 0), expand_dims(-sum(best, 1), -1)


@op(
    shape=lambda logs, lengths, *, width, paths, blank: (logs[0], paths, int(logs[1]) + 1),
    letters="aXX,a->aXX",
    dtype=lambda logs, lengths, *, width, paths, blank: logs,
    lowering=HostCall(),
)
def beam_paths(logs: Array, lengths: Array, *, width: int, paths: int, blank: int, out: Array) -> None:
    """For each row its best paths: log-probability, then the labels, padded with -1.

    A. Graves and N. Jaitly, "Towards end-to-end speech recognition with recurrent neural networks", ICML 2014.
    """
    for row, (row_logs, length) in enumerate(zip(logs.astype(np.float64), lengths, strict=True)):
        out[row] = -1
        out[row, :, 0] = -np.inf
        for number, (labels, score) in enumerate(_beam_search(row_logs[:length], width, blank)[:paths]):
            out[row, number, 0] = score
            out[row, number, 1 : 1 + len(labels)] = labels


def _beam_search(logs: Array, width: int, blank: int) -> list[tuple[tuple[int, ...], float]]:
    """Return paths and scores, best first."""
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for scores in logs:
        ahead: dict[tuple[int, ...], list[float]] = {}
        for labels, (with_blank, without) in beams.items():
            total = float(np.logaddexp(with_blank, without))
            entry = ahead.setdefault(labels, [-np.inf, -np.inf])
            entry[0] = float(np.logaddexp(entry[0], total + scores[blank]))
            for label, score in enumerate(scores):
                if label == blank:
                    continue
                if labels and labels[-1] == label:
                    entry[1] = float(np.logaddexp(entry[1], without + score))
                    gain = with_blank + score
                else:
                    gain = total + score
                longer = ahead.setdefault((*labels, label), [-np.inf, -np.inf])
                longer[1] = float(np.logaddexp(longer[1], gain))
        ranked = sorted(ahead.items(), key=lambda item: -float(np.logaddexp(item[1][0], item[1][1])))
        beams = {labels: (pair[0], pair[1]) for labels, pair in ranked[:width]}
    return [(labels, float(np.logaddexp(*pair))) for labels, pair in beams.items()]
