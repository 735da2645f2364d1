"""The way of summed gradients to new parameters: mean, accumulation, clipping, weight decay, the optimizer's rule.

The order is Keras 3's (`BaseOptimizer._backend_apply_gradients`). Nothing is read back to the host: norms stay on the
device, as divisors of the gradients, and what the host decides on it knows itself.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dptrain.backend.base import Backend, Buffer
from dptrain.optimizers.base import Optimizer, Update
from dptrain.params import ParamEntry


class Updater:
    """One optimizer at work on the flat buffers of one model.

    Args:
        ops: the backend.
        optimizer: starts afresh.
        entries: the parameters in the flat buffers.
        slots: the buffers named by `optimizer.all_slots`, of zeros.
        scratch: `optimizer.scratch` buffers of the same size.
    """

    def __init__(
        self,
        ops: Backend,
        optimizer: Optimizer,
        entries: Sequence[ParamEntry],
        slots: Mapping[str, Buffer],
        scratch: Sequence[Buffer],
    ) -> None:
        self._ops, self._optimizer, self._slots, self._scratch = ops, optimizer, slots, tuple(scratch)
        optimizer.steps = 0
        self._clip = self._clipping()
        self._decayed = _ranges([entry for entry in entries if optimizer.decays(entry.name)])
        self._clipped = [(entry.offset, entry.offset + entry.size) for entry in entries]
        self._one = ops.empty((1,))
        ops.fill(self._one, 1)
        norms = len(self._clipped) if self._clip == self._clip_each else 1
        self._squares, self._divisors = ops.zeros((norms,), np.float64), ops.empty((norms,))

    def apply(self, params_P: Buffer, grads_P: Buffer, weight: Buffer) -> None:
        """Take the gradients of one batch; where they complete an update, change the parameters.

        Args:
            params_P: flat parameters.
            grads_P: flat sum of the gradients over the global batch; destroyed.
            weight: one element, the sum of the sample weights over the global batch, to divide the gradients by.
        """
        if not self._clipped:  # no parameter is trained: as in Keras that is no update
            return
        ops, optimizer = self._ops, self._optimizer
        step, every = optimizer.steps, optimizer.gradient_accumulation_steps
        rate, iteration = optimizer.learning_rate, optimizer.iterations + 1
        optimizer.steps += 1
        divisor = weight
        if every is not None:
            divisor = self._divide(grads_P, divisor)
            accumulator_P = self._slots["gradient_accumulator"]
            ops.add(grads_P, accumulator_P)
            if (step + 1) % every:
                return
            ops.affine(accumulator_P, 1 / every, 0.0, grads_P)
            ops.fill(accumulator_P, 0)
        if self._clip is not None:
            divisor = self._clip(grads_P, divisor)
        if optimizer.weight_decay is not None:
            for begin, end in self._decayed:
                part_P = params_P[begin:end]
                ops.affine(part_P, 1 - optimizer.weight_decay * rate, 0.0, part_P)
        if not optimizer.divides:
            divisor = self._divide(grads_P, divisor)
        optimizer.update_step(Update(ops, params_P, grads_P, divisor, self._slots, self._scratch, rate, iteration))

    def _divide(self, grads_P: Buffer, divisor: Buffer) -> Buffer:
        """Divide the gradients; return what is left to divide by: one."""
        if divisor is not self._one:
            self._ops.divide(grads_P, divisor, grads_P)
        return self._one

    def _clipping(self) -> Callable[[Buffer, Buffer], Buffer] | None:
        """Return what clips gradients, given what they are to be divided by, and says what they still are to be.

        As in Keras a limit of 0 or below clips nothing.
        """
        for limit, clip in (
            (self._optimizer.clipnorm, self._clip_each),
            (self._optimizer.global_clipnorm, self._clip_all),
            (self._optimizer.clipvalue, self._clip_values),
        ):
            if limit is not None and limit > 0:
                return clip
        return None

    def _clip_each(self, grads_P: Buffer, divisor: Buffer) -> Buffer:
        """Each parameter's norm is `clipnorm` at most."""
        assert self._optimizer.clipnorm is not None
        ops, parts = self._ops, [grads_P[begin:end] for begin, end in self._clipped]
        ops.fill(self._squares, 0)
        for number, part in enumerate(parts):
            ops.squared_norm(part, self._squares[number : number + 1])
        ops.clip_divisors(self._squares, divisor, self._optimizer.clipnorm, self._divisors)
        for number, part in enumerate(parts):
            ops.divide(part, self._divisors[number : number + 1], part)
        return self._one

    def _clip_all(self, grads_P: Buffer, divisor: Buffer) -> Buffer:
        """The norm of all is `global_clipnorm` at most; nothing but the divisor changes."""
        assert self._optimizer.global_clipnorm is not None
        self._ops.fill(self._squares, 0)
        self._ops.squared_norm(grads_P, self._squares)
        self._ops.clip_divisors(self._squares, divisor, self._optimizer.global_clipnorm, self._divisors)
        return self._divisors

    def _clip_values(self, grads_P: Buffer, divisor: Buffer) -> Buffer:
        """No element is above `clipvalue`, or below minus it."""
        assert self._optimizer.clipvalue is not None
        divisor = self._divide(grads_P, divisor)
        self._ops.clip(grads_P, -self._optimizer.clipvalue, self._optimizer.clipvalue, grads_P)
        return divisor


def _ranges(entries: Sequence[ParamEntry]) -> list[tuple[int, int]]:
    """Return the elements (begin, end) of the entries, those that lie together as one."""
    ranges: list[tuple[int, int]] = []
    for entry in entries:
        begin, end = entry.offset, entry.offset + entry.padded
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return ranges
