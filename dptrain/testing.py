"""Checks of users' layers (gradients) and ops (kernels and gradients).

The reference is NumPy in float64; derivatives are central differences of it. If a CUDA driver is available, the GPU's
results are compared as well. A check raises `CheckError` at the first element that differs, and returns what it
compared. Under `mpirun` every rank calls it, and uses its own GPU.
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
from dptrain.ops.custom import CustomOp
from dptrain.program import tree
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.shapes import Shape
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, differentiable
from dptrain.registry.names import not_there
from dptrain.train.devices import open_backend

__all__ = ["CheckError", "check_layer", "check_op"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("testing", __all__)

Array = npt.NDArray[Any]

# Central differences in float64: tolerances cover truncation and rounding, for values of about 1.
_STEP, _SLOPE_RTOL, _SLOPE_ATOL = 1e-6, 1e-5, 1e-7
# Tolerance for the same ops in float64 with sums in another order.
_SAME = 1e-9
# Number of elements of each array whose derivative is checked.
_PROBES = 64
# Guard elements around an output: 256 bytes of float32, which keeps the alignment.
_MARGIN = 64
_UNTOUCHED = -12345.0


class CheckError(DptrainError, AssertionError):
    """A layer or an op computes something else than it should."""


def check_op(
    op: CustomOp,
    *inputs: Shape | Array,
    device: str = "auto",
    seed: int = 0,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **numbers: Any,
) -> tuple[str, ...]:
    """Compare an op with its NumPy function in float64, and its gradient with central differences.

    Outputs hold NaN before a call, so that unwritten elements are found, and the memory around them is checked
    afterwards. Sizes that no block size divides find most mistakes: try several, including (1,) and primes.

    Args:
        op: made by `dptrain.ops.op`.
        inputs: the shape of each input, which is then filled with standard normal numbers, or the input itself.
        device: "auto" compares with the GPU if there is one, "cuda" insists on it, "cpu" leaves it out.
        seed: of the numbers.
        rtol, atol: of float32 results, relative to the reference and absolute.
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
    arrays = [data if isinstance(data, np.ndarray) else rng.standard_normal(data) for data in inputs]
    arrays = [np.array(array, np.float64 if array.dtype.kind == "f" else array.dtype, order="C") for array in arrays]
    shapes = op.output_shapes([array.shape for array in arrays])
    gpu = _gpu(device)
    expected = _run(op, arrays, shapes, numbers, np.float64)
    _require_numbers(op, expected)
    compared = []

    def compare(
        checked: CustomOp, operands: Sequence[Array], sizes: Sequence[Shape], references: Sequence[Array], what: str
    ) -> None:
        for name, where in (("numpy", None), ("cuda", gpu)):
            if name == "numpy" or where is not None:
                results = _run(checked, operands, sizes, numbers, np.float32, where)
                _compare_all(f"op {checked.name!r} on {name}", list(checked.outputs), results, references, rtol, atol)
                compared.append(f"{name} float32{what}")

    compare(op, arrays, shapes, expected, "")
    gradient = op.gradient_op
    if gradient is None:
        return tuple(compared)
    weights = [rng.standard_normal(shape) for shape in shapes]
    sizes = [array.shape for array in arrays]
    slopes = _run(gradient, [*arrays, *weights], sizes, numbers, np.float64)
    _require_numbers(gradient, slopes)

    def objective() -> float:
        outputs = _run(op, arrays, shapes, numbers, np.float64)
        return sum(float(np.sum(weight * y)) for weight, y in zip(weights, outputs, strict=True))

    for name, array, slope in zip(op.inputs, arrays, slopes, strict=True):
        if array.dtype.kind == "f":
            _compare_slopes(f"op {gradient.name!r}: the gradient in {name!r}", objective, array, slope, rng)
    compared.insert(1, "gradient")
    compare(gradient, [*arrays, *weights], sizes, slopes, " gradient")
    return tuple(compared)


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

    Trainable weights and inputs are random, `training` is true. The layer is then traced, as in a model, and the
    program must compute the same.

    Args:
        layer: the layer, which is left as it is.
        input_shape: shape of a sample; for a layer with several inputs a list or a dictionary of shapes.
        rows: of the batch.
        device, seed, rtol, atol: see `check_op`; tolerances are for the GPU.

    Returns:
        What was compared, such as ("gradients", "program", "cuda float32").

    Raises:
        CheckError: a result differs; the message names the first such element.
        ConfigError: the layer cannot take that input, decides by a value, or uses an op without a gradient.
        DeviceError: no GPU answers and `device` is "cuda".
    """
    checked = _CheckedLayer(layer, input_shape, rows, seed)
    expected = checked.check_gradients()
    compared = ["gradients"]

    def compare(backend: Backend, what: str, rtol: float, atol: float) -> None:
        results = checked.on(backend)
        references = [expected[name] for name in results]
        _compare_all(f"{checked.name} {what}", list(results), list(results.values()), references, rtol, atol)

    compare(CpuBackend(np.float64), "as a program", _SAME, _SAME)
    compared.append("program")
    gpu = _gpu(device)
    if gpu is not None:
        compare(gpu, "on cuda", rtol, atol)
        compared.append("cuda float32")
    return tuple(compared)


# Ops


def _run(
    op: CustomOp,
    arrays: Sequence[Array],
    shapes: Sequence[Shape],
    numbers: dict[str, Any],
    dtype: npt.DTypeLike,
    gpu: Any = None,
) -> list[Array]:
    """Return an op's outputs, by NumPy or on a GPU; refuse writes to inputs or outside outputs."""
    where = "numpy" if gpu is None else "cuda"
    inputs = [np.array(array, dtype if array.dtype.kind == "f" else array.dtype) for array in arrays]
    before = [array.copy() for array in inputs]
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    wholes = [np.full(size + 2 * _MARGIN, _UNTOUCHED, dtype) for size in sizes]
    for whole in wholes:
        whole[_MARGIN : len(whole) - _MARGIN] = np.nan

    def parts(memory: Sequence[Any]) -> list[Any]:
        return [
            whole[_MARGIN : _MARGIN + size].reshape(*shape)
            for whole, size, shape in zip(memory, sizes, shapes, strict=True)
        ]

    if gpu is None:
        op.run(inputs, parts(wholes), numbers)
    else:
        there, memory = [gpu.upload(array) for array in inputs], [gpu.upload(whole) for whole in wholes]
        gpu.launch(op.kernel, [*there, *parts(memory)], numbers)
        inputs, wholes = [gpu.download(array) for array in there], [gpu.download(whole) for whole in memory]
    for name, array, old in zip(op.inputs, inputs, before, strict=True):
        if not np.array_equal(array, old, equal_nan=True):
            raise CheckError(f"op {op.name!r} on {where} overwrites its input {name!r}")
    for name, whole in zip(op.outputs, wholes, strict=True):
        around = np.concatenate([whole[:_MARGIN], whole[-_MARGIN:]])
        if not (around == _UNTOUCHED).all():
            at = int(np.argmax(around != _UNTOUCHED))
            beside = f"{_MARGIN - at} before its begin" if at < _MARGIN else f"{at - _MARGIN} past its end"
            raise CheckError(f"op {op.name!r} on {where} writes outside of its output {name!r}, {beside}")
    outputs: list[Array] = parts(wholes)
    return outputs


# Layers


class _CheckedLayer:
    """A layer with random weights and inputs, and an objective: a random combination of its outputs."""

    def __init__(self, layer: Layer, input_shape: Any, rows: int, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        layer = self._layer = copy.deepcopy(layer)  # a copy: the checks give it a type, weights and a name
        layer._set_dtype("float64")
        shapes = _map_shapes(input_shape)
        self._x = tree.map_leaves(lambda path, shape: rng.standard_normal((rows, *shape.lengths)), shapes)
        y = layer(self._tensors(self._x), training=True)
        layer._adopt(seed)
        self.name = f"layer {layer.name!r}"
        self._w = tree.map_leaves(lambda path, output: rng.standard_normal(output.shape), y)
        for weight in layer.trainable_weights:
            weight.assign(rng.standard_normal(weight.shape) * 0.5)
        self._weights = {repr(weight.path): weight for weight in layer.trainable_weights}
        self._state = [(variable, variable.numpy()) for variable in layer.variables]

    def check_gradients(self) -> dict[str, Array]:
        """Compare gradients with central differences; return all results of the layer."""
        results = self._eager()
        for path, x in tree.flatten(self._x):
            name = f"the gradient in its input{f' {path!r}' if path else ''}"
            _compare_slopes(f"{self.name}: {name}", self._objective, x, results[name], self.rng)
        for name, weight in self._weights.items():
            number = next(n for n, (variable, _) in enumerate(self._state) if variable is weight)
            name = f"the gradient in {name}"
            _compare_slopes(f"{self.name}: {name}", self._objective, self._state[number][1], results[name], self.rng)
        return results

    def on(self, backend: Backend) -> dict[str, Array]:
        """Return the results of the layer's program on a device, in the device's dtype."""
        dtype = backend.dtype.name
        self._layer._set_dtype(dtype)
        self._restore()
        data = {f"{what}/{path}": array for what in "xw" for path, array in tree.flatten(getattr(self, f"_{what}"))}
        inputs = {name: ((Dim.rows(len(array)), *array.shape[1:]), dtype) for name, array in data.items()}

        def traced(*tensors: Tensor) -> dict[str, Tensor]:
            by_name = dict(zip(data, tensors, strict=True))
            x, w = (
                tree.map_leaves(lambda path, leaf, what=what: by_name[f"{what}/{path}"], getattr(self, f"_{what}"))
                for what in "xw"
            )
            return self._computed(x, w)

        program = place(trace(traced, inputs))
        arrays = {name: backend.upload(array.astype(dtype)) for name, array in data.items()}
        executable = backend.executable(program, arrays)
        executable.run()
        results = dict(executable.outputs)
        for variable, _ in self._state:
            variable._move(None)
        backend.release([variable for variable, _ in self._state])
        names = [name for name in self._names if name in results]
        return {name: results[name] for name in names}

    def _eager(self) -> dict[str, Array]:
        self._restore()
        results = self._computed(self._tensors(self._x), self._tensors(self._w))
        self._names = list(results)
        return {name: tensor.numpy() for name, tensor in results.items()}

    def _objective(self) -> float:
        self._restore()
        return float(self._combined(self._layer(self._tensors(self._x), training=True), self._tensors(self._w)))

    def _restore(self) -> None:
        """Reset the layer's state: calls move averages and count random numbers."""
        for variable, value in self._state:
            variable.assign(value)

    def _tensors(self, nested: Any) -> Any:
        return tree.map_leaves(lambda path, array: differentiable(array), nested)

    def _combined(self, y: Any, w: Any) -> Tensor:
        parts = [ops.sum(output * other) for output, other in zip(tree.leaves(y), tree.leaves(w), strict=True)]
        return sum(parts[1:], parts[0])

    def _computed(self, x: Any, w: Any) -> dict[str, Tensor]:
        """Return outputs and gradients by their names in messages."""
        y = self._layer(x, training=True)
        inputs = dict(tree.flatten(x))
        sources = [*inputs.values(), *(weight.value for weight in self._weights.values())]
        names = [f"its input{f' {path!r}' if path else ''}" for path in inputs] + list(self._weights)
        slopes = gradients(self._combined(y, w), sources)
        results = {f"output{f' {path!r}' if path else ''}": output for path, output in tree.flatten(y)}
        for name, source, slope in zip(names, sources, slopes, strict=True):
            results[f"the gradient in {name}"] = ops.zeros_like(source) if slope is None else slope
        return results


@dataclass(frozen=True)
class _Shape:
    """The shape of a sample, as a leaf of nested data."""

    lengths: tuple[int, ...]


def _map_shapes(shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {key: _map_shapes(entry) for key, entry in shape.items()}
    if isinstance(shape, list) and all(isinstance(entry, Sequence | Mapping) for entry in shape):
        return [_map_shapes(entry) for entry in shape]
    return _Shape(tuple(int(n) for n in shape))


# Comparing


def _require_numbers(op: CustomOp, outputs: Sequence[Array]) -> None:
    for name, output in zip(op.outputs, outputs, strict=True):
        if np.isnan(output).any():
            index = [int(n) for n in np.argwhere(np.isnan(output))[0]]
            raise CheckError(
                f"op {op.name!r} on numpy: {name!r} is NaN at {index} in float64; was it not written (y[...] = )?"
            )


def _compare_all(
    what: str, names: Sequence[str], results: Sequence[Array], expected: Sequence[Array], rtol: float, atol: float
) -> None:
    for name, result, other in zip(names, results, expected, strict=True):
        shown = name if " " in name or name == "output" else repr(name)
        _compare(f"{what}: {shown}", result, other, rtol, atol, "NumPy float64")


def _compare(what: str, result: Array, expected: Array, rtol: float, atol: float, reference: str) -> None:
    """Raise where |found - expected| > atol + rtol |expected|, with the first such element."""
    if result.shape != expected.shape:
        raise CheckError(f"{what} has shape {result.shape}, expected {expected.shape}")
    different = ~np.isclose(result, expected, rtol=rtol, atol=atol, equal_nan=True)
    if different.any():
        index = tuple(int(n) for n in np.argwhere(different)[0])
        raise CheckError(
            f"{what} differs first at {list(index)}: found {float(result[index]):.9g}, expected "
            f"{float(expected[index]):.9g} ({reference}); {int(different.sum())} of {different.size} elements differ"
        )


def _compare_slopes(
    what: str, objective: Callable[[], float], array: Array, slope: Array, rng: np.random.Generator
) -> None:
    """Compare a gradient with central differences at some elements of `array`, in order."""
    count = min(array.size, _PROBES)
    flat = array.reshape(-1)
    assert np.shares_memory(flat, array) or not array.size
    for at in np.sort(rng.permutation(array.size)[:count], kind="stable"):
        original = flat[at]
        values = []
        for sign in (1, -1):
            flat[at] = original + sign * _STEP
            values.append(objective())
        flat[at] = original
        expected = (values[0] - values[1]) / (2 * _STEP)
        actual = float(slope.reshape(-1)[at])
        if not abs(actual - expected) <= _SLOPE_ATOL + _SLOPE_RTOL * max(abs(expected), 1.0):
            index = [int(n) for n in np.unravel_index(at, array.shape)]
            raise CheckError(
                f"{what} differs first at {index}: found {actual:.9g}, expected {expected:.9g} (central differences)"
            )


@functools.cache
def _opened(device: str) -> Backend:
    """Return this rank's device, shared if need be. Collective."""
    return open_backend(comms.current(), device=device, share_gpu=True)


def _gpu(device: str) -> Backend | None:
    """Return the GPU's backend; None for "cpu", or if "auto" finds none. Collective."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {device!r}: expected 'auto', 'cpu' or 'cuda'")
    if device == "cpu":
        return None
    backend = _opened(device)
    return backend if backend.name == "cuda" else None
