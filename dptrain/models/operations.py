"""Keras' operations, as files name them, and the functions of `dptrain.ops` that compute the same.

A file has an operation as {"module": "keras.src.ops.numpy", "class_name": "NotEqual", "config": {...}}; its config has
the function's arguments that are not tensors. Functions that call others, or compute no tensor, are not found.

Source: keras/src/ops/operation.py, Keras 3.15.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.node import OperationCall, is_symbolic
from dptrain.program import tree
from dptrain.program.op import Op
from dptrain.program.tensor import Tensor

_KERAS = "keras.src.ops"  # without a submodule in `.h5` files
_MODULES = ("core", "image", "linalg", "math", "nn", "numpy")
# Functions of core that take no functions.
_CORE = "cast convert_to_tensor scatter scatter_update slice slice_update stop_gradient unstack"
_LINALG = "cholesky cholesky_inverse det eigh inv lstsq lu_factor norm pinv qr slogdet solve solve_triangular svd"
_MATH = """
    cdist erf erfc erfinv extract_sequences fft fft2 ifft2 in_top_k irfft istft logdet logsumexp rfft rsqrt segment_max
    segment_sum stft top_k
"""
_IMAGE = """
    affine_transform crop_images elastic_transform extract_patches extract_patches_3d gaussian_blur hsv_to_rgb
    map_coordinates pad_images perspective_transform resize rgb_to_grayscale rgb_to_hsv scale_and_translate sobel_edges
    ssim
"""
_CALLERS = ("not_there", "vectorize")
_OTHER_NAMES = {
    "batchnorm": "batch_normalization",
    "layernorm": "layer_normalization",
    "rmsnorm": "rms_normalization",
}
_MAX_NUMBER = 2**31


@dataclass(frozen=True)
class Operation:
    """A Keras operation: its module and class in Keras, and the function that computes it."""

    module: str
    class_name: str
    function: Callable[..., Any]

    def call(self, arguments: list[Any], keywords: Mapping[str, Any], config: Mapping[str, Any]) -> list[Tensor]:
        """Return symbolic tensors computed from others; ConfigError for unknown arguments, or without a tensor."""
        where = f"operation {self.class_name!r}"
        numbers = (leaf for leaf in tree.leaves([arguments, keywords, config]) if isinstance(leaf, int | float))
        if any(abs(number) > _MAX_NUMBER for number in numbers):
            raise ConfigError(f"not supported: {where}: a number greater than {_MAX_NUMBER}")
        if not any(map(is_symbolic, tree.leaves([arguments, keywords]))):
            raise ConfigError(f"not supported: {where} without a symbolic tensor")
        names = [name for name in _before_tensors(self.function) if name in config]
        leading = [config[name] for name in names]
        options = {name: value for name, value in config.items() if name not in names}
        try:
            outputs = self.function(*leading, *arguments, **keywords, **options)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"not supported: {where}: {error}") from error
        tensors = tree.leaves(outputs)
        if not tensors or not all(map(is_symbolic, tensors)):
            raise ConfigError(f"not supported: {where}: its output is not a tensor")
        OperationCall(self.module, self.class_name, dict(config), tuple(arguments), dict(keywords), outputs)
        return tensors


def operate(class_name: str, *tensors: Any, **config: Any) -> Tensor:
    """Apply one of NumPy's operations to symbolic tensors; files list it as Keras'."""
    description = {"module": f"{_KERAS}.numpy", "class_name": class_name}
    (output,) = operation(description).call(list(tensors), {}, config)
    return output


def operation(description: Mapping[str, Any]) -> Operation:
    """Return the operation of a description; ConfigError if dptrain has none."""
    module, class_name = str(description.get("module")), str(description.get("class_name"))
    if class_name == "GetItem":
        return Operation("keras.src.ops.numpy", class_name, _item)
    key = _OTHER_NAMES.get(class_name.lower(), class_name.lower()).replace("_", "")
    for room in _MODULES:
        if module in (_KERAS, f"{_KERAS}.{room}") and key in _functions(room):
            return Operation(f"{_KERAS}.{room}", class_name, _functions(room)[key])
    raise ConfigError(f"not supported: operation {class_name[:80]!r}")


def described_operation(function: Callable[..., Any]) -> tuple[str, str]:
    """Return Keras' module and class of the operation that a function computes.

    Raises:
        ConfigError: none does, as of functions that call others.
    """
    for room in _MODULES:
        if function in _functions(room).values():
            return f"{_KERAS}.{room}", "".join(word.capitalize() for word in function.__name__.split("_"))
    raise ConfigError(f"not supported: operation {function.__name__!r} in a file; use it in a layer")


def _item(tensor: Tensor, key: Any) -> Tensor:
    """Index a tensor by a key from a file."""
    return tensor[tuple(key) if isinstance(key, list) else key]


def _before_tensors(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments before any number of tensors: `einsum`'s equation."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    number = kinds.index(inspect.Parameter.VAR_POSITIONAL) if inspect.Parameter.VAR_POSITIONAL in kinds else 0
    return [parameter.name for parameter in parameters[:number]]


@functools.cache
def _functions(module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions for a module's operations, by their names without underscores."""
    if module in ("nn", "numpy"):
        room: Any = ops.nn if module == "nn" else ops.numpy
        names = [name for name, value in vars(room).items() if inspect.isfunction(value) or isinstance(value, Op)]
    else:
        room = ops.image if module == "image" else ops
        names = {"core": _CORE, "linalg": _LINALG, "math": _MATH, "image": _IMAGE}[module].split()
    public = (name for name in names if not name.startswith("_") and name not in _CALLERS)
    return {name.replace("_", ""): getattr(room, name) for name in public}
