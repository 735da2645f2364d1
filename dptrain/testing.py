"""Checks of what users bring along: a layer's gradients, an op's kernel and its gradient.

The reference is NumPy in float64; derivatives are central differences of it. Where a CUDA driver answers, the GPU's
results are compared as well. A check raises `CheckError` with the first element that differs, and returns what it has
compared. Under `mpirun` every rank calls it, and looks at its own GPU.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.backend.base import Backend, Buffer
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.backend.custom import Op, Shape
from dptrain.errors import ConfigError, DptrainError
from dptrain.layers import Layer, LayerBuffers, StepContext
from dptrain.model import Architecture
from dptrain.optimizers import SGD
from dptrain.registry.names import not_there
from dptrain.train.devices import open_backend
from dptrain.train.explicit import ExplicitReplica, NoLoss

__all__ = ["CheckError", "check_layer", "check_op"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("testing", __all__)

Array = npt.NDArray[Any]

# Of central differences in float64: the error of the second derivative and of rounding, for values of about 1.
_STEP, _SLOPE_RTOL, _SLOPE_ATOL = 1e-6, 1e-5, 1e-7
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
    if len(inputs) != op.inputs:
        raise ConfigError(f"check_op: op {op.name!r} has {op.inputs} input(s), {list(op.buffers)}; found {len(inputs)}")
    rng = np.random.default_rng(seed)
    arrays = [one if isinstance(one, np.ndarray) else rng.standard_normal(one) for one in inputs]
    arrays = [np.array(one, np.float64 if one.dtype.kind == "f" else one.dtype, order="C") for one in arrays]
    shapes = op.output_shapes([one.shape for one in arrays])
    reference = NumpyBackend(np.float64)
    gpu = _gpu(device)
    others: list[Backend] = [NumpyBackend(np.float32), *([gpu] if gpu is not None else [])]
    expected = _run(op, reference, arrays, shapes, numbers)
    _require_numbers(op, expected)
    done = []
    for ops in others:
        found = _run(op, ops, arrays, shapes, numbers)
        _compare_all(f"op {op.name!r} on {ops.name}", op.buffers[op.inputs :], found, expected, rtol, atol)
        done.append(f"{ops.name} float32")
    gradient = op.gradient_op
    if gradient is None:
        return tuple(done)
    weights = [rng.standard_normal(shape) for shape in shapes]
    slopes = _run(gradient, reference, [*arrays, *weights], [one.shape for one in arrays], numbers)
    _require_numbers(gradient, slopes)

    def objective() -> float:
        outputs = _run(op, reference, arrays, shapes, numbers)
        return sum(float(np.sum(weight * y)) for weight, y in zip(weights, outputs, strict=True))

    for name, array, slope in zip(op.buffers, arrays, slopes, strict=False):
        if array.dtype.kind == "f":
            _compare_slopes(f"op {gradient.name!r}: the gradient in {name!r}", objective, array, slope, rng)
    done.insert(1, "gradient")
    for ops in others:
        found = _run(gradient, ops, [*arrays, *weights], [one.shape for one in arrays], numbers)
        names = gradient.buffers[gradient.inputs :]
        _compare_all(f"op {gradient.name!r} on {ops.name}", names, found, slopes, rtol, atol)
        done.append(f"{ops.name} float32 gradient")
    return tuple(done)


def check_layer(
    layer: Layer,
    input_shape: Shape,
    *,
    rows: int = 5,
    device: str = "auto",
    seed: int = 0,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> tuple[str, ...]:
    """Compare a layer's gradients in its parameters and its input with central differences of its forward pass.

    Parameters and inputs are random. The layer must write all of y, dx and the gradients (they hold NaN before), leave
    x and the parameters alone, and work without dx as a first layer does.

    Args:
        layer: the layer.
        input_shape: shape of one sample.
        rows: of the batch.
        device: as `check_op`.
        seed: of the numbers.
        rtol: of float32 results on a GPU, relative to NumPy's in float64.
        atol: of float32 results on a GPU.

    Returns:
        What was compared, such as ("gradients", "cuda float32").

    Raises:
        CheckError: a result differs; the message names the first such element.
        ConfigError: the layer cannot take that input.
        DeviceError: no GPU answers and `device` is "cuda".
    """
    layer = copy.copy(layer)  # it is given a name, which is not to stay
    architecture = Architecture([layer], tuple(input_shape))
    if layer.is_view:
        return ()
    rng = np.random.default_rng(seed)
    values = {entry.name: rng.standard_normal(entry.shape) * 0.5 for entry in architecture.layout.entries}
    x = rng.standard_normal((rows, *input_shape))
    weights = rng.standard_normal((rows, *architecture.output_shape))
    reference = NumpyBackend(np.float64)
    name = f"layer {layer.name!r}"

    def passes(ops: Backend) -> dict[str, Array]:
        return _layer_passes(name, ops, architecture, values, x, weights)

    expected = passes(reference)

    def objective() -> float:
        one = _layer_buffers(reference, architecture, values, x)[1]
        with reference.step_scope():
            layer.forward(reference, one, _CONTEXT)
        return float(np.sum(weights * reference.download(one.y)))

    _compare_slopes(f"{name}: the gradient in its input", objective, x, expected["dx"], rng)
    for parameter, value in values.items():
        _compare_slopes(f"{name}: the gradient in {parameter!r}", objective, value, expected[parameter], rng)
    done = ["gradients"]
    gpu = _gpu(device)
    if gpu is not None:
        found = passes(gpu)
        _compare_all(f"{name} on cuda", list(found), list(found.values()), list(expected.values()), rtol, atol)
        done.append("cuda float32")
    return tuple(done)


# Ops


def _run(
    op: Op, ops: Backend, arrays: Sequence[Array], shapes: Sequence[Shape], numbers: dict[str, Any]
) -> list[Array]:
    """Return an op's outputs on a device, after looking at what it must not touch."""
    inputs = [_upload(ops, one) for one in arrays]
    before = [ops.download(one) for one in inputs]
    wholes, outputs = [], []
    for shape in shapes:
        size = int(np.prod(shape, dtype=np.int64))
        whole = ops.empty((size + 2 * _MARGIN,))
        filled = np.full(size + 2 * _MARGIN, _UNTOUCHED, ops.dtype)
        filled[_MARGIN : _MARGIN + size] = np.nan
        ops.write(whole, filled)
        wholes.append(whole)
        outputs.append(whole[_MARGIN : _MARGIN + size].reshape(*shape))
    with ops.step_scope():
        op(ops, *inputs, *outputs, **numbers)
    for name, one, old in zip(op.buffers, inputs, before, strict=False):
        if not np.array_equal(ops.download(one), old, equal_nan=True):
            raise CheckError(f"op {op.name!r} on {ops.name} overwrites its input {name!r}")
    for name, whole in zip(op.buffers[op.inputs :], wholes, strict=True):
        around = ops.download(whole)
        around = np.concatenate([around[:_MARGIN], around[-_MARGIN:]])
        if not (around == _UNTOUCHED).all():
            place = int(np.argmax(around != _UNTOUCHED))
            where = f"{_MARGIN - place} before its begin" if place < _MARGIN else f"{place - _MARGIN} past its end"
            raise CheckError(f"op {op.name!r} on {ops.name} writes outside of its output {name!r}, {where}")
    return [ops.download(one) for one in outputs]


def _upload(ops: Backend, array: Array) -> Buffer:
    """Return a copy on the device, floating-point numbers in its dtype."""
    return ops.upload(np.array(array, ops.dtype if array.dtype.kind == "f" else array.dtype))


# Layers


_CONTEXT = StepContext(training=True, seed=5, step=3, first_row=2)


def _layer_buffers(
    ops: Backend, architecture: Architecture, values: dict[str, Array], x: Array
) -> tuple[ExplicitReplica, LayerBuffers]:
    """Return a layer's memory, with outputs full of NaN."""
    replica = ExplicitReplica(ops, architecture, 0)
    replica.compile(NoLoss(), SGD(), [])
    replica.reserve(len(x))
    (one,) = replica._buffers(len(x), 0)
    for name, view in architecture.layout.views(replica.params).items():
        ops.write(view, values[name])
    ops.write(one.x, x)
    for buffer in (one.y, one.dx, *one.grads.values(), *one.scratch.values()):
        ops.write(buffer, np.full(buffer.shape, np.nan))
    return replica, one


def _layer_passes(
    name: str, ops: Backend, architecture: Architecture, values: dict[str, Array], x: Array, weights: Array
) -> dict[str, Array]:
    """Return y, dx and the parameters' gradients, after looking at what the layer must not touch."""
    (layer,) = architecture.layers
    replica, one = _layer_buffers(ops, architecture, values, x)
    with ops.step_scope():
        layer.forward(ops, one, _CONTEXT)
        y = ops.download(one.y)
        ops.write(one.dy, weights)
        layer.backward(ops, one, _CONTEXT)
        found = {"y": y, "dx": ops.download(one.dx)}
        found |= {
            key: ops.download(view) for key, view in architecture.layout.gradient_views(replica._partial(0)).items()
        }
        for what, buffer, old in (
            ("its input x", one.x, x),
            *((f"parameter {key!r}", one.params[key.split("/", 1)[1]], old) for key, old in values.items()),
        ):
            if not np.array_equal(ops.download(buffer), old.astype(ops.dtype)):
                raise CheckError(f"{name} on {ops.name} overwrites {what}")
        # As the first layer of a model, which nobody asks for dx.
        one.dx = None
        layer.forward(ops, one, _CONTEXT)
        ops.write(one.dy, weights)
        layer.backward(ops, one, _CONTEXT)
    return found


# Comparing


def _require_numbers(op: Op, outputs: Sequence[Array]) -> None:
    for name, one in zip(op.buffers[op.inputs :], outputs, strict=True):
        if np.isnan(one).any():
            index = [int(n) for n in np.argwhere(np.isnan(one))[0]]
            raise CheckError(
                f"op {op.name!r} on numpy: {name!r} is NaN at {index} in float64; was it not written (y[...] = )?"
            )


def _compare_all(
    what: str, names: Sequence[str], found: Sequence[Array], expected: Sequence[Array], rtol: float, atol: float
) -> None:
    for name, one, other in zip(names, found, expected, strict=True):
        _compare(f"{what}: {name!r}", one, other, rtol, atol, "NumPy float64")


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
    for place in np.sort(rng.permutation(array.size)[:count]):
        kept = flat[place]
        values = []
        for sign in (1, -1):
            flat[place] = kept + sign * _STEP
            values.append(objective())
        flat[place] = kept
        expected = (values[0] - values[1]) / (2 * _STEP)
        found = float(slope.reshape(-1)[place])
        if not abs(found - expected) <= _SLOPE_ATOL + _SLOPE_RTOL * max(abs(expected), 1.0):
            index = [int(n) for n in np.unravel_index(place, array.shape)]
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
