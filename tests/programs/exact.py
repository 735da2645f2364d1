"""What a program computes in float64, and how far from that rounding may take it.

Every tensor of float32 is computed in float64, from what float32 holds at the beginning; half precision is rounded. How
much the results may differ is found as in Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic: exploiting
randomness in floating-point arithmetic", 1997): the program is executed again, with each result of an op that rounds
moved by a few units in the last place of its own type, sums by some of the magnitude of their terms: at random, and all
up, and all down; and once with each rounded. What then moves by more than it is worth, such as a comparison of two
nearly equal numbers, cannot be judged.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dptrain.program.lowering import Convolution, lowering_of
from dptrain.program.program import Program
from dptrain.program.tensor import Array, Tensor, Variable, is_half
from tests.tolerances import TOLERANCES

_GREATEST, _LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_SUMS = ("reduce_sum", "batch_matmul", "conv2d", "conv2d_input", "conv2d_kernel", "add_rows")
# What ops may be off by, in units of the type's epsilon: functions of C++ and CUDA by a few.
_UNITS = 4
# Executions with noise; results may be off by so many times as much as they were.
RUNS, TIMES = 8, 8
# What an element may move by under noise, for each 1 of its magnitude, before it can no longer be judged.
_JUDGED = 0.01
# Of what is random, such as after some steps of a training that diverges, a few elements move little by chance: where
# fewer than this share of a tensor's can be judged, none is.
_LEAST_JUDGED = 0.1
# Returns for a shape how far each element is moved, of what is most: numbers from -1 to 1.
Noise = Callable[[tuple[int, ...]], Array]


class Exact:
    """Values of tensors.

    Args:
        values: of inputs, by their tensor's `id`.
        noise: that results are moved by, None for none.
        rounds: results are rounded to their type.
        on_ranks: what ranks may compute of summands is not known.

    Attributes:
        found: what is known, by `id`.
    """

    def __init__(
        self, values: Mapping[int, Array], noise: Noise | None = None, rounds: bool = False, on_ranks: bool = False
    ) -> None:
        self._noise, self._rounds, self._on_ranks = noise, rounds, on_ranks
        self._sizes: dict[int, Array] = {}
        self.found = {one: _wide(value) for one, value in values.items()}

    def __call__(self, tensor: Tensor) -> Array:
        """Return the value of a tensor, computed with all that it is made of."""
        rest = [tensor]
        while rest:
            one = rest[-1]
            missing = [read for read in one.inputs if id(read) not in self.found]
            if id(one) not in self.found and missing:
                rest += missing
                continue
            rest.pop()
            if id(one) not in self.found:
                self.found[id(one)] = self._computed(one)
        return self.found[id(tensor)]

    def _computed(self, tensor: Tensor) -> Array:
        if tensor.op is None:
            return _wide(tensor.numpy())
        inputs = [self.found[id(one)] for one in tensor.inputs]
        attributes = tensor.op.local_attributes(tensor, None, 0)
        of_sums = any(id(one) in self._sizes for one in tensor.inputs)
        if (size := self._size(tensor, inputs, attributes)) is not None:
            self._sizes[id(tensor)] = size
        if tensor.op.is_view:
            return np.asarray(tensor.op.compute(*inputs, **attributes))
        rounds = tensor.dtype.kind in "fV"
        out = np.empty(tensor.shape, np.float64 if rounds else tensor.dtype)
        with np.errstate(all="ignore"):
            tensor.op.compute(*inputs, **attributes, out=out)
            if is_half(tensor.dtype):  # which only rounding makes, and what moves elements: what is rounded has noise
                out[...] = out.astype(tensor.dtype)
            elif rounds and self._noise is not None:
                self._move(tensor, inputs, attributes, out)
            if tensor.dtype == np.float32:
                out[np.abs(out) > _GREATEST] *= np.inf
                if self._rounds:  # with denormal numbers, which a device may keep or not
                    out[...] = out.astype(np.float32)
                else:
                    out[np.abs(out) < _LEAST] *= 0
            if self._rounds and tensor.op.name in _SUMS and size is not None and rounds:  # terms may cancel to nothing
                out[np.abs(out) <= np.finfo(tensor.dtype).eps * size] = 0
            if self._rounds and self._on_ranks and of_sums and size is not None and rounds:
                out[np.isinf(out)] = np.nan  # as infinity times summands of both signs, where it was times their sum
            if self._rounds and tensor.op.name == "power":
                out[np.isnan(inputs[0] + 0 * inputs[1])] = 1  # as NaN ** 0, where a sum is 0 that nearly is
            if self._rounds and tensor.op.name.startswith("conv") and not np.isfinite(inputs[1]).all():
                out[...] = np.nan  # a device may multiply the zeros of the padding, or leave them out
            if self._rounds and _is_tiled(tensor) and not np.isfinite(inputs[0]).all():
                out[...] = np.nan  # of a tile, all of which an infinite pixel reaches, or of windows that see it
        return out

    def _size(self, tensor: Tensor, inputs: list[Array], attributes: Mapping[str, Any]) -> Array | None:
        """Return the magnitude of all terms of a sum, and of what is linear in it, which ranks compute of each part.

        Where a sum is 0, or a few digits, its parts need not be. None of other tensors.
        """
        assert tensor.op is not None
        name, sizes = tensor.op.name, [self._sizes.get(id(one)) for one in tensor.inputs]
        if name in _SUMS:
            numbers = [np.abs(_finite(one)) if one.dtype.kind in "fV" else one for one in inputs]
            if _is_tiled(tensor):
                numbers[0] = _around(numbers[0])
            made = np.empty(tensor.shape, np.float64 if tensor.dtype.kind in "fV" else tensor.dtype)
            with np.errstate(all="ignore"):
                tensor.op.compute(*numbers, **attributes, out=made)
            return made
        if all(one is None for one in sizes) or tensor.dtype.kind not in "fV":
            return None
        numbers = [np.abs(_finite(one)) if size is None else size for one, size in zip(inputs, sizes, strict=True)]
        with np.errstate(all="ignore"):
            if tensor.op.is_view:
                return np.asarray(tensor.op.compute(*numbers, **attributes))
            if name in ("add", "subtract"):
                return np.asarray(numbers[0] + numbers[1])
            if name in ("multiply", "negative"):
                return np.asarray(functools.reduce(np.multiply, numbers))
        return None

    def _move(self, tensor: Tensor, inputs: list[Array], attributes: Mapping[str, Any], out: Array) -> None:
        """Move what has been computed, but what the type holds exactly: of sums, those of numbers of few digits."""
        assert tensor.op is not None
        assert self._noise is not None
        scale, units = np.abs(out), float(_UNITS)
        size = self._sizes.get(id(tensor))
        if size is not None:
            scale = np.broadcast_to(size, out.shape)
        if tensor.op.name in _SUMS:
            units *= max(1.0, np.sqrt(max(1, sum(one.size for one in inputs) / max(1, out.size))) / 4)
        epsilon = float(np.finfo(tensor.dtype).eps)
        moves = np.isfinite(scale) & np.isfinite(out)
        if tensor.dtype == np.float32:
            rounds = tensor.op.name in _SUMS and not all(map(_is_short, inputs))
            rounds |= any(isinstance(one, float) and one != float(np.float32(one)) for one in attributes.values())
            rounds |= (size is not None and tensor.op.name not in _SUMS) or _is_tiled(tensor)
            moves &= (out != out.astype(np.float32)) | rounds
            out[np.isfinite(scale) & (scale > _GREATEST / 4) & (tensor.op.name in _SUMS)] = np.nan  # parts overflow
        noise = self._noise(out.shape) * epsilon * units
        out[moves] += (noise * scale)[moves]


def _noise(run: int, seed: int) -> Noise | None:
    """Return what an execution's results are moved by: nothing, all up, all down, then at random."""
    if run in (1, 2):
        return functools.partial(np.full, fill_value=1.0 if run == 1 else -1.0)
    return functools.partial(np.random.default_rng((seed, run)).uniform, -1, 1) if run else None


def _is_short(value: Array) -> bool:
    return np.array_equal(value, value.astype(np.float16), equal_nan=value.dtype.kind in "fV")


def _is_tiled(tensor: Tensor) -> bool:
    """Whether a CPU computes a convolution in tiles, in which pixels take part whose sum is 0."""
    lowering = lowering_of(tensor)
    return isinstance(lowering, Convolution) and lowering.implementation(tensor) == "winograd"


def _around(images: Array) -> Array:
    """Return the greatest of the pixels that can be in one tile with each, for each channel."""
    for axis in (1, 2):
        around = [(3, 3) if one == axis else (0, 0) for one in range(4)]
        images = np.lib.stride_tricks.sliding_window_view(np.pad(images, around), 7, axis).max(-1)
    return images


def _finite(value: Array) -> Array:
    return np.where(np.isfinite(value), value, 0)


def _wide(value: Array) -> Array:
    return value.astype(np.float64, copy=False) if value.dtype.kind in "fV" else value


def states_of(
    program: Program,
    values: Mapping[str, Array],
    starts: list[int],
    order: str,
    noise: Noise | None = None,
    rounds: bool = False,
    on_ranks: bool = False,
) -> dict[str, Array]:
    """Return what comes out of the last step, and the state after it, by name.

    Args:
        program: executed once for each start.
        values: of its inputs; of the one called `order`, those of all steps.
        starts: where the rows of each step begin there.
        order: name of that input.
        noise: see `Exact`, as what follows.
        rounds: each result.
        on_ranks: as above.
    """
    state: dict[Variable, Array] = {variable: _wide(variable.numpy()) for variable in program.state}
    outputs: dict[str, Array] = {}
    for start in starts:
        known = {id(one): state[variable] for variable, one in program.state.items()}
        for name, one in program.inputs.items():
            value = values[name]
            known[id(one)] = value[start : start + one.shape[0]] if name == order else value
        exact = Exact(known, noise, rounds, on_ranks)
        outputs = {name: exact(one) for name, one in program.outputs.items()}
        state |= {variable: exact(one) for variable, one in program.updates.items()}
    return outputs | {f"state {variable.name}": value for variable, value in state.items()}


class Expected:
    """Values, and how far from them is right.

    Args:
        program: what is executed.
        values: as `states_of`, as those that follow.
        starts: of the steps.
        order: name of the input with all rows.
        seed: of the noise.
        on_ranks: whether ranks compute it as well.

    Attributes:
        values: in float64, by name.
        tolerances: of each element; NaN where it cannot be judged.
        dtypes: of what is compared.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Array],
        starts: list[int],
        order: str,
        seed: int,
        on_ranks: bool = False,
    ) -> None:
        self.values = states_of(program, values, starts, order)
        self.dtypes = {name: one.dtype for name, one in program.outputs.items() if starts}
        self.dtypes |= {f"state {variable.name}": variable.dtype for variable in program.state}
        runs = 3 if len(starts) > 100 else RUNS
        moved = {name: np.zeros(value.shape) for name, value in self.values.items()}
        for run in range(runs):
            noisy = states_of(program, values, starts, order, _noise(run, seed), not run, on_ranks)
            for name, value in self.values.items():
                moved[name] = np.fmax(moved[name], _distance(noisy[name], value))
        self.tolerances = {}
        for name, value in self.values.items():
            rtol, atol = TOLERANCES.get(self.dtypes[name].name, (0.0, 0.0))
            size = np.where(np.isfinite(value), np.abs(value.astype(np.float64)), 0)
            allowed = np.asarray(TIMES * moved[name] + rtol * size + atol)
            judged = moved[name] <= _JUDGED * (1 + size)
            allowed[~judged | (judged.sum() < _LEAST_JUDGED * judged.size)] = np.nan
            self.tolerances[name] = allowed
        state = [f"state {variable.name}" for variable in program.state]
        if len(starts) > 1 and any(np.isnan(self.tolerances[name]).any() for name in state):
            for name, dtype in self.dtypes.items():  # flags made of numbers at random may be the same in all runs
                if dtype.kind not in "fV":
                    self.tolerances[name] = np.full_like(self.tolerances[name], np.nan)

    @property
    def judged(self) -> tuple[int, int]:
        """How many elements can be judged, of how many."""
        return (
            sum(int(np.isfinite(one).sum()) for one in self.tolerances.values()),
            sum(one.size for one in self.tolerances.values()),
        )

    def wrong(self, found: Mapping[str, Array]) -> str:
        """Return what is wrong with results, or an empty string."""
        for name, value in self.values.items():
            own = found[name]
            if own.shape != value.shape or own.dtype != self.dtypes[name]:
                return f"{name} is {own.dtype} of shape {own.shape}: expected {self.dtypes[name]} of {value.shape}"
            allowed = self.tolerances[name]
            off = _distance(own, value)
            bad = np.isfinite(allowed) & ~(off <= allowed)
            if bad.any():
                place = tuple(int(n) for n in np.argwhere(bad)[0])
                where = f"{name}{list(place)}" if place else name
                return f"{where} is {own[place]}: expected {value[place]} ({bad.sum()} of {bad.size} elements)"
        return ""


def _distance(found: Array, value: Array) -> Array:
    """Return how far numbers are from others: infinitely where one of both is no number, or another infinity."""
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), value.astype(np.float64)
        off = np.asarray(np.abs(a - b))
        off[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        off[np.isnan(off)] = np.inf
    return off
