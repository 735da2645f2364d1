"""Checks of what users bring along: a layer's gradients, an op's kernel and its gradient.

The reference is NumPy in float64; derivatives are central differences of it. Where a CUDA driver answers, the GPU's
results are compared as well. A check raises `CheckError` with the first element that differs, and returns what it has
compared. Under `mpirun` every rank calls it, and looks at its own GPU.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain import ops
from dptrain.backend.base import Backend
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.errors import ConfigError, DptrainError
from dptrain.layers import Layer
from dptrain.ops.custom import Op
from dptrain.program import tree
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor, differentiable
from dptrain.registry.names import not_there, snake_case
from dptrain.train.devices import open_backend

__all__ = ["CheckError", "check_layer", "check_op"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("testing", __all__)

Array = npt.NDArray[Any]

# Of central differences in float64: the error of the second derivative and of rounding, for values of about 1.
_STEP, _SLOPE_RTOL, _SLOPE_ATOL = 1e-6, 1e-5, 1e-7
# Of the same ops in float64, where sums are made in another order.
_SAME = 1e-9
# Elements of each array whose derivative is taken.
_PROBES = 64
# Elements around an output that an op must leave alone: 256 bytes of float32, which keeps the alignment.
_MARGIN = 64
_UNTOUCHED = -12345.0


class CheckError(DptrainError, AssertionError):
    """A layer or an op computes something else than it should."""


def check_op(
    op: Op,
    *inputs: Shape | Array,
    device: str = "auto",
    seed: int = 0,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **numbers: Any,
) -> tuple[str, ...]:
    """Compare an op with its NumPy function in float64, and its gradient with central differences.

    Outputs hold NaN before a call, so that an element that is not written is found, and the memory around them is
    looked at afterwards. Sizes that no block size divides find most mistakes: try several, (1,) and primes among them.

    Args:
        op: made by `dptrain.ops.op`.
        inputs: the shape of each input, which is then filled with standard normal numbers, or the input itself.
        device: "auto" compares with the GPU where one answers, "cuda" insists on it, "cpu" leaves it out.
        seed: of the numbers.
        rtol: of float32 results, relative to the reference.
        atol: of float32 results.
        numbers: the op's, by name.

    Returns:
        What was compared, such as ("numpy float32", "gradient", "cuda float32", "cuda float32 gradient").

    Raises:
        CheckError: a result differs; the message names the first such element.
        ConfigError: the inputs are not the op's.
        DeviceError: no GPU answers and `device` is "cuda", or nvcc refuses the source.
    """
    if len(inputs) != len(op.inputs):
        raise ConfigError(
            f"check_op: op {op.name!r} has {len(op.inputs)} input(s), {list(op.inputs)}; found {len(inputs)}"
        )
    rng = np.random.default_rng(seed)
    arrays = [one if isinstance(one, np.ndarray) else rng.standard_normal(one) for one in inputs]
    arrays = [np.array(one, np.float64 if one.dtype.kind == "f" else one.dtype, order="C") for one in arrays]
    shapes = op.output_shapes([one.shape for one in arrays])
    gpu = _gpu(device)
    expected = _run(op, arrays, shapes, numbers, np.float64)
    _require_numbers(op, expected)
    done = []

    def compare(one: Op, given: Sequence[Array], sizes: Sequence[Shape], wanted: Sequence[Array], what: str) -> None:
        for name, where in (("numpy", None), ("cuda", gpu)):
            if name == "numpy" or where is not None:
                found = _run(one, given, sizes, numbers, np.float32, where)
                _compare_all(f"op {one.name!r} on {name}", list(one.outputs), found, wanted, rtol, atol)
                done.append(f"{name} float32{what}")

    compare(op, arrays, shapes, expected, "")
    gradient = op.gradient_op
    if gradient is None:
        return tuple(done)
    weights = [rng.standard_normal(shape) for shape in shapes]
    sizes = [one.shape for one in arrays]
    slopes = _run(gradient, [*arrays, *weights], sizes, numbers, np.float64)
    _require_numbers(gradient, slopes)

    def objective() -> float:
        outputs = _run(op, arrays, shapes, numbers, np.float64)
        return sum(float(np.sum(weight * y)) for weight, y in zip(weights, outputs, strict=True))

    for name, array, slope in zip(op.inputs, arrays, slopes, strict=True):
        if array.dtype.kind == "f":
            _compare_slopes(f"op {gradient.name!r}: the gradient in {name!r}", objective, array, slope, rng)
    done.insert(1, "gradient")
    compare(gradient, [*arrays, *weights], sizes, slopes, " gradient")
    return tuple(done)


def check_layer(
    layer: Layer,
    input_shape: Any,
    *,
    rows: int = 5,
    device: str = "auto",
    seed: int = 0,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> tuple[str, ...]:
    """Compare a layer's gradients in its weights and its input with central differences of its `call`.

    Trainable weights and inputs are random, `training` is true. The layer is then traced, as a model does it, and the
    program that this makes must compute the same.

    Args:
        layer: the layer, which is left as it is.
        input_shape: shape of one sample; of a layer with several inputs a list or a dictionary of shapes.
        rows: of the batch.
        device: as `check_op`.
        seed: of the numbers.
        rtol: of float32 results on a GPU, relative to NumPy's in float64.
        atol: of float32 results on a GPU.

    Returns:
        What was compared, such as ("gradients", "program", "cuda float32").

    Raises:
        CheckError: a result differs; the message names the first such element.
        ConfigError: the layer cannot take that input, decides by a value, or uses an op without a gradient.
        DeviceError: no GPU answers and `device` is "cuda".
    """
    checked = _CheckedLayer(layer, input_shape, rows, seed)
    expected = checked.check_gradients()
    done = ["gradients"]

    def compare(backend: Backend, what: str, rtol: float, atol: float) -> None:
        found = checked.on(backend)
        wanted = [expected[name] for name in found]
        _compare_all(f"{checked.name} {what}", list(found), list(found.values()), wanted, rtol, atol)

    compare(CpuBackend(np.float64), "as a program", _SAME, _SAME)
    done.append("program")
    gpu = _gpu(device)
    if gpu is not None:
        compare(gpu, "on cuda", rtol, atol)
        done.append("cuda float32")
    return tuple(done)


# Ops


def _run(
    op: Op,
    arrays: Sequence[Array],
    shapes: Sequence[Shape],
    numbers: dict[str, Any],
    dtype: npt.DTypeLike,
    gpu: Any = None,
) -> list[Array]:
    """Return an op's outputs, by NumPy or on a GPU, after looking at what it must not touch."""
    where = "numpy" if gpu is None else "cuda"
    inputs = [np.array(one, dtype if one.dtype.kind == "f" else one.dtype) for one in arrays]
    before = [one.copy() for one in inputs]
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    wholes = [np.full(size + 2 * _MARGIN, _UNTOUCHED, dtype) for size in sizes]
    for whole in wholes:
        whole[_MARGIN : len(whole) - _MARGIN] = np.nan

    def parts(memory: Sequence[Any]) -> list[Any]:
        return [
            one[_MARGIN : _MARGIN + size].reshape(*shape)
            for one, size, shape in zip(memory, sizes, shapes, strict=True)
        ]

    if gpu is None:
        op.run(inputs, parts(wholes), numbers)
    else:
        there, memory = [gpu.upload(one) for one in inputs], [gpu.upload(one) for one in wholes]
        gpu.launch(op.kernel, [*there, *parts(memory)], numbers)
        inputs, wholes = [gpu.download(one) for one in there], [gpu.download(one) for one in memory]
    for name, one, old in zip(op.inputs, inputs, before, strict=True):
        if not np.array_equal(one, old, equal_nan=True):
            raise CheckError(f"op {op.name!r} on {where} overwrites its input {name!r}")
    for name, whole in zip(op.outputs, wholes, strict=True):
        around = np.concatenate([whole[:_MARGIN], whole[-_MARGIN:]])
        if not (around == _UNTOUCHED).all():
            at = int(np.argmax(around != _UNTOUCHED))
            beside = f"{_MARGIN - at} before its begin" if at < _MARGIN else f"{at - _MARGIN} past its end"
            raise CheckError(f"op {op.name!r} on {where} writes outside of its output {name!r}, {beside}")
    found: list[Array] = parts(wholes)
    return found


# Layers


class _CheckedLayer:
    """A layer with random weights and inputs, and an objective: a random combination of its outputs."""

    def __init__(self, layer: Layer, input_shape: Any, rows: int, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        layer = self._layer = copy.deepcopy(layer)  # it is given a type, weights and a name, which are not to stay
        layer._set_dtype("float64")
        shapes = _map_shapes(input_shape)
        self._x = tree.map_leaves(lambda path, shape: rng.standard_normal((rows, *shape.lengths)), shapes)
        y = layer(self._tensors(self._x), training=True)
        layer._adopt(seed)
        self.name = f"layer {layer.name or snake_case(type(layer).__name__)!r}"
        self._w = tree.map_leaves(lambda path, one: rng.standard_normal(one.shape), y)
        for one in layer.trainable_weights:
            one.assign(rng.standard_normal(one.shape) * 0.5)
        self._weights = {repr(one.path): one for one in layer.trainable_weights}
        self._state = [(one, one.numpy()) for one in layer.variables]

    def check_gradients(self) -> dict[str, Array]:
        """Compare gradients with central differences; return all that the layer computes."""
        found = self._eager()
        for path, x in tree.flatten(self._x):
            name = f"the gradient in its input{f' {path!r}' if path else ''}"
            _compare_slopes(f"{self.name}: {name}", self._objective, x, found[name], self.rng)
        for name, weight in self._weights.items():
            number = next(n for n, (one, _) in enumerate(self._state) if one is weight)
            name = f"the gradient in {name}"
            _compare_slopes(f"{self.name}: {name}", self._objective, self._state[number][1], found[name], self.rng)
        return found

    def on(self, backend: Backend) -> dict[str, Array]:
        """Return what the layer's program computes on a device, in its type."""
        dtype = backend.dtype.name
        self._layer._set_dtype(dtype)
        self._restore()
        data = {f"{what}/{path}": one for what in "xw" for path, one in tree.flatten(getattr(self, f"_{what}"))}
        inputs = {name: ((Dim.rows(len(one)), *one.shape[1:]), dtype) for name, one in data.items()}

        def traced(*given: Tensor) -> dict[str, Tensor]:
            known = dict(zip(data, given, strict=True))
            x, w = (
                tree.map_leaves(lambda path, one, what=what: known[f"{what}/{path}"], getattr(self, f"_{what}"))
                for what in "xw"
            )
            return self._computed(x, w)

        program = place(trace(traced, inputs))
        arrays = {name: backend.upload(one.astype(dtype)) for name, one in data.items()}
        executable = backend.executable(program, arrays)
        executable.run()
        found = dict(executable.outputs)
        for one, _ in self._state:
            one.move(None)
        backend.release([one for one, _ in self._state])
        names = [name for name in self._names if name in found]
        return {name: found[name] for name in names}

    def _eager(self) -> dict[str, Array]:
        self._restore()
        found = self._computed(self._tensors(self._x), self._tensors(self._w))
        self._names = list(found)
        return {name: one.numpy() for name, one in found.items()}

    def _objective(self) -> float:
        self._restore()
        return float(self._combined(self._layer(self._tensors(self._x), training=True), self._tensors(self._w)))

    def _restore(self) -> None:
        """Let the layer stand where it began: another call moves averages and counts random numbers."""
        for one, value in self._state:
            one.assign(value)

    def _tensors(self, nested: Any) -> Any:
        return tree.map_leaves(lambda path, one: differentiable(one), nested)

    def _combined(self, y: Any, w: Any) -> Tensor:
        parts = [ops.sum(one * other) for one, other in zip(tree.leaves(y), tree.leaves(w), strict=True)]
        return sum(parts[1:], parts[0])

    def _computed(self, x: Any, w: Any) -> dict[str, Tensor]:
        """Return outputs and gradients by what they are called in messages."""
        y = self._layer(x, training=True)
        inputs = dict(tree.flatten(x))
        sources = [*inputs.values(), *(one.tensor for one in self._weights.values())]
        names = [f"its input{f' {path!r}' if path else ''}" for path in inputs] + list(self._weights)
        slopes = gradients(self._combined(y, w), sources)
        found = {f"output{f' {path!r}' if path else ''}": one for path, one in tree.flatten(y)}
        for name, source, slope in zip(names, sources, slopes, strict=True):
            found[f"the gradient in {name}"] = ops.zeros_like(source) if slope is None else slope
        return found


@dataclass(frozen=True)
class _Shape:
    """The shape of a sample, as a leaf of nested data."""

    lengths: tuple[int, ...]


def _map_shapes(shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {key: _map_shapes(one) for key, one in shape.items()}
    if isinstance(shape, list) and all(isinstance(one, Sequence | Mapping) for one in shape):
        return [_map_shapes(one) for one in shape]
    return _Shape(tuple(int(n) for n in shape))


# Comparing


def _require_numbers(op: Op, outputs: Sequence[Array]) -> None:
    for name, one in zip(op.outputs, outputs, strict=True):
        if np.isnan(one).any():
            index = [int(n) for n in np.argwhere(np.isnan(one))[0]]
            raise CheckError(
                f"op {op.name!r} on numpy: {name!r} is NaN at {index} in float64; was it not written (y[...] = )?"
            )


def _compare_all(
    what: str, names: Sequence[str], found: Sequence[Array], expected: Sequence[Array], rtol: float, atol: float
) -> None:
    for name, one, other in zip(names, found, expected, strict=True):
        shown = name if " " in name or name == "output" else repr(name)
        _compare(f"{what}: {shown}", one, other, rtol, atol, "NumPy float64")


def _compare(what: str, found: Array, expected: Array, rtol: float, atol: float, reference: str) -> None:
    """Raise where |found - expected| > atol + rtol |expected|, with the first such element."""
    if found.shape != expected.shape:
        raise CheckError(f"{what} has shape {found.shape}, expected {expected.shape}")
    different = ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    if different.any():
        index = tuple(int(n) for n in np.argwhere(different)[0])
        raise CheckError(
            f"{what} differs first at {list(index)}: found {float(found[index]):.9g}, expected "
            f"{float(expected[index]):.9g} ({reference}); {int(different.sum())} of {different.size} elements differ"
        )


def _compare_slopes(
    what: str, objective: Callable[[], float], array: Array, slope: Array, rng: np.random.Generator
) -> None:
    """Compare a gradient with central differences at some elements, in their order; `array` is what is moved."""
    count = min(array.size, _PROBES)
    flat = array.reshape(-1)
    assert np.shares_memory(flat, array) or not array.size
    for at in np.sort(rng.permutation(array.size)[:count]):
        kept = flat[at]
        values = []
        for sign in (1, -1):
            flat[at] = kept + sign * _STEP
            values.append(objective())
        flat[at] = kept
        expected = (values[0] - values[1]) / (2 * _STEP)
        found = float(slope.reshape(-1)[at])
        if not abs(found - expected) <= _SLOPE_ATOL + _SLOPE_RTOL * max(abs(expected), 1.0):
            index = [int(n) for n in np.unravel_index(at, array.shape)]
            raise CheckError(
                f"{what} differs first at {index}: found {found:.9g}, expected {expected:.9g} (central differences)"
            )


@functools.cache
def _opened(device: str) -> Backend:
    """Return this rank's device, as a model would take it. Collective."""
    return open_backend(comms.current(), device=device, share_gpu=True)


def _gpu(device: str) -> Backend | None:
    """Return the GPU's backend, or None where none is to be looked for or answers. Collective.

    Raises:
        ConfigError: the word is unknown.
        DeviceError: "cuda", and none answers.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {device!r}: expected 'auto', 'cpu' or 'cuda'")
    if device == "cpu":
        return None
    backend = _opened(device)
    return backend if backend.name == "cuda" else None
