"""Keras' operations, as files name them, and the functions of `dptrain.ops` that compute the same.

A file has an operation as {"module": "keras.src.ops.numpy", "class_name": "NotEqual", "config": {...}} and its calls.
Tensors, and what may be one, are arguments of a call; the function's other arguments are in the config. Functions that
call others, or compute no tensor, are not found.

Source: keras/src/ops/operation.py, Keras 3.15.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.operation_calls import OperationCall, is_symbolic
from dptrain.program import tree
from dptrain.program.dims import is_number
from dptrain.program.op import Op
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import image_data_format

_KERAS = "keras.src.ops"  # without a submodule in `.h5` files
_MODULES = ("core", "einops", "image", "linalg", "math", "nn", "numpy")
# Functions of core that take no functions.
_CORE = """
    cast convert_to_tensor saturate_cast scatter scatter_update slice slice_update stop_gradient unstack
"""
_LINALG = """
    cholesky cholesky_inverse det eigh inv lstsq lu_factor matrix_rank norm pinv qr slogdet solve solve_triangular svd
"""
_MATH = """
    cdist erf erfc erfinv extract_sequences fft fft2 ifft2 in_top_k irfft istft logdet logsumexp rfft rsqrt segment_max
    segment_min segment_prod segment_sum stft top_k
"""
_IMAGE = """
    affine_transform crop_images elastic_transform extract_patches extract_patches_3d gaussian_blur hsv_to_rgb
    map_coordinates pad_images perspective_transform resize rgb_to_grayscale rgb_to_hsv scale_and_translate sobel_edges
    ssim
"""
_CALLERS = ("not_there", "vectorize")
# Keras' classes whose names are not those of their functions in capitals.
_CLASSES = {
    "allclose": "AllClose",
    "batch_normalization": "BatchNorm",
    "cdist": "CDist",
    "conj": "Conjugate",
    "ctc_decode": "CTCDecode",
    "ctc_loss": "CTCLoss",
    "extract_patches_3d": "ExtractPatches",
    "fft": "FFT",
    "fft2": "FFT2",
    "hsv_to_rgb": "HSVToRGB",
    "ifft2": "IFFT2",
    "irfft": "IRFFT",
    "isin": "IsIn",
    "istft": "ISTFT",
    "layer_normalization": "LayerNorm",
    "psnr": "PSNR",
    "rfft": "RFFT",
    "rgb_to_grayscale": "RGBToGrayscale",
    "rgb_to_hsv": "RGBToHSV",
    "rms_normalization": "RMSNorm",
    "searchsorted": "SearchSorted",
    "ssim": "SSIM",
    "stft": "STFT",
    "svd": "SVD",
}
_OTHER_NAMES = {
    "batchnorm": "batch_normalization",
    "layernorm": "layer_normalization",
    "rmsnorm": "rms_normalization",
}
# Names of the arguments of calls, in Keras' functions; any others are in the config.
_OPERANDS = """
    a array atol axes_lengths b beta bias bins choicelist condition condlist constant_values coordinates data default
    depthwise_kernel end_points fill_value gamma image1 image2 images indices inputs kernel key mask mean offset
    operands output output_length output_shape pattern pointwise_kernel predictions q query rtol scale segment_ids
    sequence_lengths sorted_sequence start start_indices start_points step stop target target_length targets tensor
    transform translation updates value values variable variance volumes weights x x1 x2 xs y
"""
# Arguments of these names that are in the config all the same, by function.
_CONFIGURED = {
    "affine_transform": ("fill_value",),
    "allclose": ("atol", "rtol"),
    "bincount": ("weights",),
    "diagonal": ("offset",),
    "elastic_transform": ("fill_value",),
    "histogram": ("bins",),
    "map_coordinates": ("fill_value",),
    "perspective_transform": ("fill_value",),
    "resize": ("fill_value",),
    "squareplus": ("b",),
    "trace": ("offset",),
    "trapezoid": ("x",),
    "unique": ("fill_value",),
}
_MAX_NUMBER = 2**31


@dataclass(frozen=True)
class Operation:
    """A Keras operation: its class in Keras, and the function that computes it."""

    class_name: str
    function: Callable[..., Any]

    def call(self, arguments: list[Any], keywords: Mapping[str, Any], config: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors computed from symbolic ones; ConfigError for unknown arguments, or without a tensor."""
        where = f"operation {self.class_name!r}"
        numbers = (leaf for leaf in tree.leaves([arguments, keywords, config]) if isinstance(leaf, int))
        if any(abs(number) > _MAX_NUMBER for number in numbers):
            raise ConfigError(f"not supported: {where}: a number greater than {_MAX_NUMBER}")
        if not any(map(is_symbolic, tree.leaves([arguments, keywords]))):
            raise ConfigError(f"not supported: {where} without a symbolic tensor")
        try:
            outputs = _called(self.function, arguments, {**keywords, **config})
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"not supported: {where}: {error}") from error
        tensors = tree.leaves(outputs)
        if not any(map(is_symbolic, tensors)) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ConfigError(f"not supported: {where}: its output is not a tensor")
        return tensors


def operation(description: Mapping[str, Any]) -> Operation:
    """Return the operation of a description; ConfigError if dptrain has none."""
    module, class_name = str(description.get("module")), str(description.get("class_name"))
    if class_name == "GetItem":
        return Operation(class_name, _item)
    key = _OTHER_NAMES.get(class_name.lower(), class_name.lower()).replace("_", "")
    for room in _MODULES:
        if module in (_KERAS, f"{_KERAS}.{room}") and key in _functions(room):
            return Operation(class_name, _functions(room)[key])
    raise ConfigError(f"not supported: operation {class_name[:80]!r}")


@dataclass(frozen=True)
class Description:
    """A call of an operation as Keras writes it: its module and class, and the arguments of the call and the class."""

    module: str
    class_name: str
    arguments: list[Any]
    keywords: dict[str, Any]
    config: dict[str, Any]


def described_call(call: OperationCall) -> Description:
    """Return the description of a call.

    Raises:
        ConfigError: Keras has no such operation, as of functions that call others.
    """
    name = call.function.__name__
    kind = described_operation(call.function)
    if kind is None:
        raise ConfigError(f"not supported: operation {name!r} in a file; use it in a layer")
    bound = inspect.signature(call.function).bind(*call.arguments, **call.keywords)
    bound.apply_defaults()
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for parameter in inspect.signature(call.function).parameters.values():
        value = bound.arguments[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments += value
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (keywords if _is_operand(call.function, parameter.name) else config).update(value)
        elif _is_operand(call.function, parameter.name):
            arguments.append(np.array(value) if parameter.name == "key" and isinstance(value, list) else value)
        else:
            config[parameter.name] = _configured(parameter.name, value)
    if kind[0] == f"{_KERAS}.nn" and "data_format" in config:
        config["data_format"] = config["data_format"] or image_data_format()
    return Description(*kind, arguments, keywords, config)


def _configured(name: str, value: Any) -> Any:
    """Return an argument of a Keras class: lists for tuples and arrays of integers, -1 for a length to be inferred."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        value = value.tolist()
    if name == "dtype" and value is not None:
        return np.dtype(value).name
    if name == "newshape" and isinstance(value, list | tuple) and -1 not in value:
        unknown = [not is_number(length) for length in value]
        return [-1 if is_unknown and sum(unknown) == 1 else n for n, is_unknown in zip(value, unknown, strict=True)]
    return value


def described_operation(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return Keras' module and class of the operation that a function or an op computes; None if none does."""
    return described_operations().get(function)


@functools.cache
def described_operations() -> dict[Callable[..., Any], tuple[str, str]]:
    """Return all that `described_operation` returns, by function."""
    descriptions: dict[Callable[..., Any], tuple[str, str]] = {}
    for room in _MODULES:
        for function in _functions(room).values():
            name = function.name if isinstance(function, Op) else function.__name__
            class_name = _CLASSES.get(name, "".join(word.capitalize() for word in name.split("_")))
            descriptions[function] = f"{_KERAS}.{room}", class_name
    return descriptions


def _item(tensor: Tensor, key: Any) -> Tensor:
    """Index a tensor by a key from a file."""
    return tensor[tuple(key) if isinstance(key, list) else key]


def _called(function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call a function with the arguments of a call in Keras, which go by position among themselves."""
    if isinstance(function, Op) or function is _item:
        return function(*arguments, **keywords)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        leading = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        return function(*[keywords.pop(name) for name in leading], *arguments, **keywords)
    operands = [parameter.name for parameter in parameters if _is_operand(function, parameter.name)]
    return function(**dict(zip(operands, arguments, strict=False)), **keywords)


def _is_operand(function: Callable[..., Any], name: str) -> bool:
    """Whether an argument of a function is one of a call in Keras, not of the operation."""
    return name in _OPERANDS.split() and name not in _CONFIGURED.get(function.__name__, ())


@functools.cache
def _functions(module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions for a module's operations, by their names without underscores."""
    if module == "einops":
        return {"rearrange": ops.rearrange}
    if module in ("nn", "numpy"):
        room: Any = ops.nn if module == "nn" else ops.numpy
        names = [name for name, value in vars(room).items() if inspect.isfunction(value) or isinstance(value, Op)]
    else:
        room = ops.image if module == "image" else ops
        names = {"core": _CORE, "linalg": _LINALG, "math": _MATH, "image": _IMAGE}[module].split()
    public = (name for name in names if not name.startswith("_") and name not in _CALLERS)
    return {name.replace("_", ""): getattr(room, name) for name in public}
