"""What a program computes in float64, and how far from that rounding may take it.

Every tensor of float32 is computed in float64, from what float32 holds at the beginning; half precision is rounded. How
much the results may differ is found as in Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic: exploiting
randomness in floating-point arithmetic", 1997): the program is executed again, with each result of an op that rounds
moved by a few units in the last place of its own type, sums by some of the magnitude of their terms: at random, and all
up, and all down; and once with each rounded. What then moves by more than it is worth, such as a comparison of two
nearly equal numbers, cannot be judged. Nor can what follows from it, though that may be the same in all these
executions by chance: so the program is executed again with such elements of all its tensors at random.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.program.body import body_of, has_body
from dptrain.program.gradient import topological
from dptrain.program.lowering import ConvolutionLowering, LoopLowering, lowering_of
from dptrain.program.program import Program
from dptrain.program.steps import with_attention_on_gpu, with_steps_changed
from dptrain.program.tensor import Array, Node, Tensor, Variable, tracing
from dptrain.runtime.types import is_narrow
from tests.tolerances import TOLERANCES

_GREATEST, _LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_CONVOLUTIONS = ("conv2d", "conv2d_input", "conv2d_kernel", "depthwise2d", "depthwise2d_input")
_SUMS = ("reduce_sum", "batch_matmul", "add_rows", *_CONVOLUTIONS)
# What ops may be off by, in units of the type's epsilon: functions of C++ and CUDA by a few.
_UNITS = 4
# Executions with noise; results may be off by so many times as much as they were.
RUNS, TIMES = 8, 8
# What an element may move by under noise, for each 1 of its magnitude, before it can no longer be judged.
_JUDGED = 0.01
# Executions with what cannot be judged at random.
_AT_RANDOM = 4
# Returns for a shape how far each element is moved, of what is most: numbers from -1 to 1.
Noise = Callable[[tuple[int, ...]], Array]
# See `Exact`.
# More than drawn loops of unknown length have.
_MOST_STEPS = 4
_Unstable = tuple[Array, Array, Array]


class Exact:
    """Values of tensors.

    Args:
        values: of inputs, by their tensor's `id`.
        noise: that results are moved by, None for none.
        rounds: results are rounded to their type.
        on_ranks: what ranks may compute of summands is not known.
        unstable: which elements cannot be judged, and the least and the greatest that they were in other executions, by
            their tensor's `id`: each becomes one of both.

    Attributes:
        by_id: the values computed so far, by `id`.
        steps: tensors that loops' steps have made, whose ids are among these.
    """

    def __init__(
        self,
        values: Mapping[int, Array],
        noise: Noise | None = None,
        rounds: bool = False,
        on_ranks: bool = False,
        unstable: Mapping[int, _Unstable] | None = None,
    ) -> None:
        self._noise, self._rounds, self._on_ranks = noise, rounds, on_ranks
        self._unstable = unstable or {}
        self.steps: list[Tensor] = []
        self._sizes: dict[int, Array] = {}
        self._of_huge: set[int] = set()
        self.by_id = {tensor_id: _wide(value) for tensor_id, value in values.items()}

    def __call__(self, tensor: Tensor) -> Array:
        """Return the value of a tensor, computed with all that it is made of."""
        rest = [tensor]
        while rest:
            current = rest[-1]
            of_steps = _by_steps(current)
            missing = [
                read for read in (current.inputs if of_steps is None else [of_steps]) if id(read) not in self.by_id
            ]
            if id(current) not in self.by_id and missing:
                rest += missing
                continue
            rest.pop()
            if id(current) in self.by_id:
                continue
            if of_steps is None:
                self.by_id[id(current)] = self._computed(current)
                continue
            self.steps.append(of_steps)
            self.by_id[id(current)] = self.by_id[id(of_steps)]
            if id(of_steps) in self._sizes:
                self._sizes[id(current)] = self._sizes[id(of_steps)]
            if id(of_steps) in self._of_huge:
                self._of_huge.add(id(current))
        return self.by_id[id(tensor)]

    def _computed(self, tensor: Tensor) -> Array:
        if tensor.op is None:
            return _wide(tensor.numpy())
        inputs = [self.by_id[id(operand)] for operand in tensor.inputs]
        attributes = tensor.op.local_attributes(tensor, None, 0)
        of_sums = any(id(operand) in self._sizes for operand in tensor.inputs)
        if (size := self._size(tensor, inputs, attributes)) is not None:
            self._sizes[id(tensor)] = size
        if any(id(operand) in self._of_huge for operand in tensor.inputs):
            self._of_huge.add(id(tensor))
        if tensor.op.is_view:
            return np.asarray(tensor.op.compute(*inputs, **attributes))
        rounds = tensor.dtype.kind in "fV"
        out = np.empty(tensor.shape, np.float64 if rounds else tensor.dtype)
        with np.errstate(all="ignore"):
            tensor.op.compute(*inputs, **attributes, out=place_of(tensor, out))
            if is_narrow(tensor.dtype):  # which only rounding makes, and what moves elements
                if self._noise is not None and _is_computed(tensor.inputs[0]):
                    # Elsewhere results may be off by `TIMES` the noise. Of a rounded one nobody sees by how much.
                    size = self._sizes.get(id(tensor.inputs[0]), np.abs(out))
                    by = TIMES * _UNITS * float(np.finfo(tensor.inputs[0].dtype).eps)
                    out += self._noise(out.shape) * by * _finite(size)
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
            if self._rounds and self._on_ranks and self._is_of_huge(tensor, inputs, out):
                out[~np.isfinite(out)] = 1  # which is divided last on ranks, and need not overflow there
            if self._rounds and tensor.op.name == "power":
                out[np.isnan(inputs[0] + 0 * inputs[1])] = 1  # as NaN ** 0, where a sum is 0 that nearly is
            differs = self._rounds or self._noise is not None
            if differs and tensor.op.name in _CONVOLUTIONS and not np.isfinite(inputs[1]).all():
                out[...] = np.nan  # a device may multiply the zeros of the padding, or leave them out
            if differs and _is_tiled(tensor) and not np.isfinite(inputs[0]).all():
                out[...] = np.nan  # of a tile, all of which an infinite pixel reaches, or of windows that see it
            if id(tensor) in self._unstable and self._noise is not None:
                at, greatest, least = self._unstable[id(tensor)]
                out[at] = np.where(self._noise(out.shape) > 0, greatest, least)[at]
                if out.dtype.kind in "iu":  # of what is no number any more, and may be an index
                    np.clip(out, least.min(), greatest.max(), out=out)
        return out

    def _is_of_huge(self, tensor: Tensor, inputs: list[Array], out: Array) -> bool:
        """Whether a tensor follows from a quotient by a sum that is so large that its square overflows."""
        if tensor.op is not None and tensor.op.name.startswith("divide") and id(tensor.inputs[1]) in self._sizes:
            greatest = _GREATEST if tensor.dtype == np.float32 else float(np.finfo(np.float64).max)
            if (np.abs(out[np.broadcast_to(inputs[1] != 0, out.shape)]) > np.sqrt(greatest)).any():
                self._of_huge.add(id(tensor))
        return id(tensor) in self._of_huge and tensor.dtype.kind in "fV"

    def _size(self, tensor: Tensor, inputs: list[Array], attributes: Mapping[str, Any]) -> Array | None:
        """Return the magnitude of all terms of a sum, and of what is linear in it, which ranks compute of each part.

        Where a sum is 0, or a few digits, its parts need not be. None of other tensors.
        """
        assert tensor.op is not None
        name, sizes = tensor.op.name, [self._sizes.get(id(operand)) for operand in tensor.inputs]
        if name in _SUMS:
            numbers = [np.abs(_finite(array)) if array.dtype.kind in "fV" else array for array in inputs]
            if _is_tiled(tensor):
                numbers[0] = _around(numbers[0])
            magnitude = np.empty(tensor.shape, np.float64 if tensor.dtype.kind in "fV" else tensor.dtype)
            with np.errstate(all="ignore"):
                tensor.op.compute(*numbers, **attributes, out=magnitude)
            return magnitude
        if all(size is None for size in sizes) or tensor.dtype.kind not in "fV":
            return None
        numbers = [np.abs(_finite(array)) if size is None else size for array, size in zip(inputs, sizes, strict=True)]
        with np.errstate(all="ignore"):
            if tensor.op.is_view:
                return np.asarray(tensor.op.compute(*numbers, **attributes))
            if name in ("add", "subtract"):
                return np.asarray(numbers[0] + numbers[1])
            if name in ("multiply", "negative"):
                return np.asarray(functools.reduce(np.multiply, numbers))
            if name == "divide" and sizes[1] is None:
                return np.asarray(numbers[0] / numbers[1])
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
            units *= max(1.0, np.sqrt(max(1, sum(array.size for array in inputs) / max(1, out.size))) / 4)
        epsilon = float(np.finfo(tensor.dtype).eps)
        moves = np.isfinite(scale) & np.isfinite(out)
        if tensor.dtype == np.float32:
            rounds = tensor.op.name in _SUMS and not all(map(_is_short, inputs))
            rounds |= any(
                isinstance(attribute, float) and attribute != float(np.float32(attribute))
                for attribute in attributes.values()
            )
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


def _is_computed(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are rounded results of float32 or float64."""
    while tensor.op is not None and tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor.op is not None and tensor.dtype.kind == "f" and not is_narrow(tensor.dtype)


def _is_tiled(tensor: Tensor) -> bool:
    """Whether a CPU computes a convolution in tiles, in which pixels take part whose sum is 0."""
    lowering = lowering_of(tensor)
    return isinstance(lowering, ConvolutionLowering) and implementation_of(tensor) == "winograd"


def _around(images: Array) -> Array:
    """Return the greatest of the pixels that can be in one tile with each, for each channel."""
    for axis in (1, 2):
        around = [(3, 3) if dim == axis else (0, 0) for dim in range(4)]
        images = np.lib.stride_tricks.sliding_window_view(np.pad(images, around), 7, axis).max(-1)
    return images


def _finite(value: Array) -> Array:
    return np.where(np.isfinite(value), value, 0)


def _wide(value: Array) -> Array:
    return value.astype(np.float64, copy=False) if value.dtype.kind in "fV" else value


class _Execution:
    """A program executed once for each step.

    Args:
        program: what is executed.
        values: of its inputs; of the one called `order`, those of all steps.
        starts: where the rows of each step begin there.
        order: name of that input.
        noise: see `Exact`, as what follows.
        rounds: each result.
        on_ranks: as above.
        unstable: of each step.

    Attributes:
        values: what comes out of the last step, and the state after it, by name.
        by_id: what each step computes, by `id`.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Array],
        starts: list[int],
        order: str,
        noise: Noise | None = None,
        rounds: bool = False,
        on_ranks: bool = False,
        unstable: Sequence[Mapping[int, _Unstable]] = (),
    ) -> None:
        self.by_id: list[Mapping[int, Array]] = []
        state: dict[Variable, Array] = {variable: _wide(variable.numpy()) for variable in program.state}
        outputs: dict[str, Array] = {}
        for step, start in enumerate(starts):
            by_id = {id(tensor): state[variable] for variable, tensor in program.state.items()}
            for name, placeholder in program.inputs.items():
                value = values[name]
                by_id[id(placeholder)] = value[start : start + placeholder.shape[0]] if name == order else value
            exact = Exact(by_id, noise, rounds, on_ranks, unstable[step] if unstable else None)
            outputs = {name: exact(output) for name, output in program.outputs.items()}
            state |= {variable: exact(update) for variable, update in program.updates.items()}
            self.by_id.append(exact.by_id)
        self.values = outputs | {f"state {variable.name}": value for variable, value in state.items()}


def exactly(program: Program, values: Mapping[str, Array], starts: list[int], order: str) -> dict[str, Array]:
    """Return what comes out of the last step in float64, and the state after it, by name; arguments as `Expected`'s."""
    return _Execution(program, values, starts, order).values


def _without_attention(program: Program) -> Program:
    return with_attention_on_gpu(program, lambda operands: None)


class Expected:
    """Values, and how far from them is right.

    Args:
        program: what is executed.
        values: of its inputs; of the one called `order`, those of all steps.
        starts: where the rows of each step begin there.
        order: name of that input.
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
        program = with_steps_changed(program, _without_attention)  # what cancels in it moves as well

        def executed(run: int, unstable: Sequence[Mapping[int, _Unstable]] = ()) -> _Execution:
            noise = _noise(run, seed)
            return _Execution(program, values, starts, order, noise, not run, on_ranks, unstable)

        right = _Execution(program, values, starts, order)
        self.values = right.values
        self.dtypes = {name: output.dtype for name, output in program.outputs.items() if starts}
        self.dtypes |= {f"state {variable.name}": variable.dtype for variable in program.state}
        moved = {name: np.zeros(value.shape) for name, value in self.values.items()}
        runs = 3 if len(starts) > 100 else RUNS
        ranges = [{key: (value, value) for key, value in computed.items()} for computed in right.by_id]
        for run in range(runs):
            noisy = executed(run)
            _widen(moved, noisy.values, self.values)
            for step_ranges, noisy_values in zip(ranges, noisy.by_id, strict=True):
                for tensor_id, (least, greatest) in step_ranges.items():
                    step_ranges[tensor_id] = (
                        np.fmin(least, noisy_values[tensor_id]),
                        np.fmax(greatest, noisy_values[tensor_id]),
                    )
        sums = {id(tensor) for tensor in program.tensors if tensor.op is not None and tensor.op.name in _SUMS}
        unstable = [_unstable(extremes, computed, sums) for extremes, computed in zip(ranges, right.by_id, strict=True)]
        for run in range(runs, runs + _AT_RANDOM) if any(unstable) else ():
            _widen(moved, executed(run, unstable).values, self.values)
        self.tolerances = {}
        for name, value in self.values.items():
            rtol, atol = TOLERANCES.get(self.dtypes[name].name, (0.0, 0.0))
            tolerance = np.asarray(TIMES * moved[name] + rtol * _size(value) + atol)
            tolerance[~_is_judged(moved[name], value)] = np.nan
            self.tolerances[name] = tolerance
        for name in _of_random_state(program, unstable):
            self.tolerances[name] = np.full_like(self.tolerances[name], np.nan)

    @property
    def judged(self) -> tuple[int, int]:
        """How many elements can be judged, of how many."""
        return (
            sum(int(np.isfinite(tolerance).sum()) for tolerance in self.tolerances.values()),
            sum(tolerance.size for tolerance in self.tolerances.values()),
        )

    def wrong(self, results: Mapping[str, Array]) -> str:
        """Return what is wrong with results, or an empty string."""
        for name, value in self.values.items():
            result = results[name]
            if result.shape != value.shape or result.dtype != self.dtypes[name]:
                return (
                    f"{name} is {result.dtype} of shape {result.shape}: expected {self.dtypes[name]} of {value.shape}"
                )
            tolerance = self.tolerances[name]
            off = _distance(result, value)
            bad = np.isfinite(tolerance) & ~(off <= tolerance)
            if bad.any():
                place = tuple(int(n) for n in np.argwhere(bad)[0])
                where = f"{name}{list(place)}" if place else name
                return f"{where} is {result[place]}: expected {value[place]} ({bad.sum()} of {bad.size} elements)"
        return ""


def _of_random_state(program: Program, unstable: Sequence[Mapping[int, _Unstable]]) -> Iterator[str]:
    """Yield what follows from state that the steps before the last leave at random, as a training that diverges does.

    Whether it moved in a few executions is chance: a function that saturates makes the same of most numbers.
    """
    at_random: set[Tensor] = set()
    for step in range(len(unstable)):
        before = {tensor_id for tensor_id, (at, *_) in unstable[step - 1].items() if at.any()} if step else set()
        at_random = {
            state
            for variable, state in program.state.items()
            if (update := program.updates.get(variable)) is not None and (id(update) in before or update in at_random)
        }
        for tensor in program.tensors:
            if any(read in at_random for read in tensor.inputs):
                at_random.add(tensor)
    yield from (name for name, output in program.outputs.items() if output in at_random)
    yield from (f"state {variable.name}" for variable, new_value in program.updates.items() if new_value in at_random)


def _widen(moved: dict[str, Array], results: Mapping[str, Array], right: Mapping[str, Array]) -> None:
    """Take note of how far results lie from what is right, where that is farther than before."""
    for name, value in right.items():
        moved[name] = np.fmax(moved[name], _distance(results[name], value))


def _unstable(
    ranges: Mapping[int, tuple[Array, Array]], right: Mapping[int, Array], sums: Collection[int]
) -> dict[int, _Unstable]:
    """Return of each tensor, the values of which cannot all be judged, which those are, and the ends of their ranges.

    A sum of many such values can be farther off than in a few executions, unless it is a whole number.
    """
    unstable: dict[int, _Unstable] = {}
    for tensor_id, (least, greatest) in ranges.items():
        at = ~_is_judged(
            np.fmax(_distance(least, right[tensor_id]), _distance(greatest, right[tensor_id])), right[tensor_id]
        )
        if at.any() or (least.dtype.kind in "iu" and least.size):
            if tensor_id in sums and least.dtype.kind == "f":
                with np.errstate(all="ignore"):  # infinities of both signs
                    wider = TIMES * _finite(greatest - least)
                    least, greatest = least - wider, greatest + wider
            unstable[tensor_id] = at, greatest, least
    return unstable if any(at.any() for at, *_ in unstable.values()) else {}


def _is_judged(moved: Array, value: Array) -> Array:
    """Say of each element whether it moved by so little that it can be judged."""
    return np.asarray(moved <= _JUDGED * (1 + _size(value)))


def _size(value: Array) -> Array:
    return np.abs(_finite(value).astype(np.float64))


def _distance(result: Array, value: Array) -> Array:
    """Return how far numbers are from others: infinitely where one of both is no number, or another infinity."""
    with np.errstate(all="ignore"):
        a, b = result.astype(np.float64), value.astype(np.float64)
        off = np.asarray(np.abs(a - b))
        off[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        off[np.isnan(off)] = np.inf
    return off


def place_of(tensor: Tensor, out: Array) -> Any:
    """Return what an op writes a value to: of one of several, beside none for the others."""
    if not tensor.op.has_values:
        return out
    places: list[Array | None] = [None] * len(tensor.node.values)
    places[tensor.index] = out
    return places


def _until_its_end(loop: Node) -> tuple[Tensor, ...]:
    """Return the values of a loop of unknown length, after which further steps change nothing."""
    body = body_of(loop)
    count = len(body.carries)
    carries, captures = list(loop.inputs[:count]), loop.inputs[count:]
    for _ in range(_MOST_STEPS):
        new = dict(zip(body.placeholders, (*carries, *captures), strict=True))
        for tensor in topological(body.results):
            if tensor not in new:
                new[tensor] = tensor.with_inputs([new[read] for read in tensor.inputs])
        following = [new[tensor] for tensor in body.following]
        carries = [ops.where(carries[0], after, before) for after, before in zip(following, carries, strict=True)]
    return tuple(carries)


def _by_steps(tensor: Tensor) -> Tensor | None:
    """Return what a value of a loop is, made by its steps one after the other; None of other tensors."""
    if not has_body(tensor):
        return None
    node, step_values = tensor.node, body_of(tensor).made
    if node not in step_values:
        lowering = lowering_of(tensor)
        assert isinstance(lowering, LoopLowering)
        with tracing():
            if lowering.steps is None:
                step_values[node] = _until_its_end(node)
            else:
                step_values[node] = lowering.steps(node, tensor.inputs, range(len(node.values)))
    value: Tensor = step_values[node][tensor.index]
    return value
