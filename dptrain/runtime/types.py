"""The table of number types: one record each, with all that kernels, libraries, networks and files call it.

Whoever adds a type adds its record here and, if kernels are to have it, its struct to `kernels/half.h`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

# The floating-point type that narrower ones are computed in; that of Python's numbers is `floatx()`.
FLOATX = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class NumberType:
    """Properties and names of a type; None, 0, "" or () where something lacks it.

    Attributes:
        storage: NumPy's type in memory; floating-point ones that only ml_dtypes has are of kind "V" or "f".
        compute: type of elementwise computation: float32 for narrower floating-point types.
        accumulate: type in which a GPU's threads add their sums.
        is_numpy: whether it is NumPy's own.
        mixes: whether other floating-point operands may stand beside it, and are promoted.
        is_policy: whether floatx and layers' policies may name it.
        is_factor: whether kernels of products read factors of it as they are.
        c: name in C++ and CUDA.
        suffix: of C++'s literals.
        random_bits: of a uniform fraction: all are exact then, and none is 1.
        not_finite: bits that are all set in infinities and NaN alone, for `kernels/digest.h`.
        node_sums: whether `kernels/native_ranks.h` sums it over the ranks of a node.
        device_joins: type as which `kernels/ranks.h` reduces it over ranks.
        nccl: reductions that NCCL has of it. It would round half precision at every rank; and its maximum of a number
            and NaN is the number.
        cublas: `CudaDataType` of factors.
        cudnn: `data_type` of images and kernels.
        tensor_map: `CUtensorMapDataType`.
        is_onnx: whether ONNX's opset 18 has it.
        onnx: type in which ONNX Runtime computes it: others have no kernels of arithmetic and comparisons.
        safetensors: name in safetensors' headers.
        protocol: datatype of the Open Inference Protocol.
    """

    storage: DType
    compute: DType
    accumulate: DType
    is_float: bool = False
    is_integer: bool = False
    is_numpy: bool = True
    mixes: bool = True
    is_policy: bool = False
    is_factor: bool = False
    c: str | None = None
    suffix: str = ""
    random_bits: int = 32
    not_finite: int = 0
    node_sums: bool = False
    device_joins: str | None = None
    nccl: tuple[str, ...] = ()
    cublas: str | None = None
    cudnn: str | None = None
    tensor_map: int | None = None
    is_onnx: bool = True
    onnx: str = "int64"
    safetensors: str = ""
    protocol: str | None = None

    @property
    def name(self) -> str:
        """NumPy's and Keras' name."""
        return self.storage.name

    @property
    def portable(self) -> DType:
        """The type in which users and files of arrays, such as HDF5, have it: one of NumPy's own."""
        return self.storage if self.is_numpy else self.compute

    @property
    def is_narrow(self) -> bool:
        """Whether it is computed in a wider type, and rounded."""
        return self.storage != self.compute


def _whole(scalar: type, c: str, **names: Any) -> NumberType:
    """Return the record of integers or booleans."""
    storage = np.dtype(scalar)
    return NumberType(storage=storage, compute=storage, accumulate=storage, c=c, **names)


def _floating(scalar: type, c: str, **names: Any) -> NumberType:
    """Return the record of a floating-point type."""
    storage = np.dtype(scalar)
    compute = storage if storage.itemsize >= FLOATX.itemsize else FLOATX
    wide = np.dtype(np.float64)
    return NumberType(storage=storage, compute=compute, accumulate=wide, is_float=True, c=c, **names)


_integer = functools.partial(_whole, is_integer=True)
_half = functools.partial(_floating, is_policy=True, is_factor=True, node_sums=True, onnx="float32")
_float8 = functools.partial(_floating, is_numpy=False, mixes=False, is_onnx=False, node_sums=True, onnx="float32")
_BOTH = ("sum", "max")
# In the order in which messages list them.
_RECORDS = (
    _whole(np.bool_, "bool", device_joins="uint8", onnx="int32", safetensors="BOOL", protocol="BOOL"),
    _integer(
        np.uint8, "unsigned char", device_joins="uint8", nccl=_BOTH, onnx="int32", safetensors="U8", protocol="UINT8"
    ),
    _integer(np.uint16, "unsigned short", onnx="int32", safetensors="U16", protocol="UINT16"),
    _integer(
        np.uint32, "unsigned int", suffix="u", device_joins="uint32", nccl=_BOTH, safetensors="U32", protocol="UINT32"
    ),
    _integer(
        np.uint64,
        "unsigned long long",
        suffix="ull",
        device_joins="uint64",
        nccl=_BOTH,
        safetensors="U64",
        protocol="UINT64",
    ),
    _integer(np.int8, "signed char", nccl=_BOTH, onnx="int32", safetensors="I8", protocol="INT8"),
    _integer(np.int16, "short", onnx="int32", safetensors="I16", protocol="INT16"),
    _integer(np.int32, "int", device_joins="int32", nccl=_BOTH, onnx="int32", safetensors="I32", protocol="INT32"),
    _integer(np.int64, "long long", suffix="ll", device_joins="int64", nccl=_BOTH, safetensors="I64", protocol="INT64"),
    _half(
        np.float16,
        "dp_float16",
        random_bits=11,
        not_finite=0x7C00,
        device_joins="float16",
        cublas="CUDA_R_16F",
        cudnn="HALF",
        tensor_map=6,
        safetensors="F16",
        protocol="FP16",
    ),
    _floating(
        np.float32,
        "float",
        is_policy=True,
        is_factor=True,
        suffix="f",
        random_bits=24,
        not_finite=0x7F80_0000,
        node_sums=True,
        device_joins="float32",
        nccl=("sum",),
        cublas="CUDA_R_32F",
        cudnn="FLOAT",
        onnx="float32",
        safetensors="F32",
        protocol="FP32",
    ),
    _floating(
        np.float64,
        "double",
        is_policy=True,
        is_factor=True,
        not_finite=0x7FF0_0000_0000_0000,
        node_sums=True,
        device_joins="float64",
        nccl=("sum",),
        onnx="float64",
        safetensors="F64",
        protocol="FP64",
    ),
    _half(
        ml_dtypes.bfloat16,
        "dp_bfloat16",
        is_numpy=False,
        random_bits=8,
        not_finite=0x7F80,
        device_joins="bfloat16",
        cublas="CUDA_R_16BF",
        cudnn="BFLOAT16",
        tensor_map=9,
        safetensors="BF16",
        protocol="BF16",
    ),
    _float8(
        ml_dtypes.float8_e4m3fn,
        "dp_float8_e4m3fn",
        random_bits=4,
        not_finite=0x7F,  # it has no infinities
        device_joins="float8_e4m3fn",
        safetensors="F8_E4M3",
    ),
    _float8(
        ml_dtypes.float8_e5m2,
        "dp_float8_e5m2",
        random_bits=3,
        not_finite=0x7C,
        device_joins="float8_e5m2",
        safetensors="F8_E5M2",
    ),
)
# The records of tensors' types by name.
TYPES = {record.name: record for record in _RECORDS}
# Floating-point types that floatx and layers may have, the narrow ones last.
POLICY_TYPES = sorted((t for t in _RECORDS if t.is_policy), key=lambda t: (t.is_narrow, t.name))


@functools.lru_cache(512)
def type_of(dtype: DType) -> NumberType:
    """Return the record of a type; one without names for a type that tensors do not have."""
    known = TYPES.get(dtype.name)
    if known is not None:
        return known
    is_float = dtype.kind == "f"
    return NumberType(
        storage=dtype, compute=dtype, accumulate=np.dtype(np.float64) if is_float else dtype, is_float=is_float
    )


def named(char: str) -> str:
    """Return the name of a type by its character, which NumPy does not know of those of ml_dtypes."""
    return next((known.name for known in TYPES.values() if known.storage.char == char), None) or np.dtype(char).name


@functools.lru_cache(512)
def is_floating(dtype: DType) -> bool:
    """Whether a type is floating-point, those of ml_dtypes included."""
    return type_of(dtype).is_float


@functools.lru_cache(512)
def is_narrow(dtype: DType) -> bool:
    """Whether a type is stored as such and computed in float32: half precision and float8."""
    return type_of(dtype).is_narrow
