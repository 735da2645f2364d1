"""A stand-in for `nvmath.bindings.cublasLt` that computes in NumPy, by columns as cuBLASLt does.

It knows only what descriptors, layouts and preferences say, so that a wrong transposition, leading dimension, epilogue
or pointer gives wrong numbers or an error. It is stricter than the library: every handle must be alive and of its kind,
every attribute of its type's size, every pointer aligned as the preference promised when the algorithm was chosen, and
the algorithm must belong to the call. Each matrix, and the whole workspace, must lie within one allocation, and an
algorithm wants all the workspace that it was promised, of whose ends it leaves nothing as it was. Calls are queued on
the stream, and graphs can hold them.
"""

import ctypes
import functools
import itertools
from dataclasses import dataclass, field
from enum import IntEnum

import ml_dtypes
import numpy as np

from tests.standins.driver import Driver
from tests.tolerances import tf32

R_32F, COMPUTE_32F, FAST_TF32 = 0, 68, 77
TYPES = {R_32F: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


class cuBLASLtError(Exception):  # noqa: N801 - the library's name
    pass


class Epilogue(IntEnum):
    DEFAULT = 1
    RELU = 2
    BIAS = 4
    RELU_BIAS = 6


class MatmulDescAttribute(IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8


class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES = 1
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


matmul_heuristic_result_dtype = np.dtype(
    [
        ("algo", [("data_", "<u8", (8,))]),
        ("workspace_size", "<u8"),
        ("state", "<i4"),
        ("waves_count", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)


@dataclass(frozen=True)
class Layout:
    type: int
    rows: int
    columns: int
    ld: int


@dataclass
class Desc:
    compute: int
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Preference:
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Handle:
    pass


# Every live object by its handle; a test looks whether anything stays. Calls by name, for tests.
live: dict[int, object] = {}
calls: list[str] = []
_numbers = itertools.count(0x1000, 16)


def _new(value: object) -> int:
    number = next(_numbers)
    live[number] = value
    return number


def _get(number: int, kind: type):
    value = live.get(number)
    if type(value) is not kind:
        raise cuBLASLtError(f"{number:#x} is {value!r}, not a live {kind.__name__}")
    return value


def _destroy(number: int, kind: type) -> None:
    _get(number, kind)
    del live[number]


def get_version() -> int:
    return 0


def create() -> int:
    return _new(Handle())


def destroy(light_handle: int) -> None:
    _destroy(light_handle, Handle)
    if not any(isinstance(value, Handle) for value in live.values()):
        _driver().release()


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    if compute_type not in (COMPUTE_32F, FAST_TF32) or scale_type != R_32F:
        raise cuBLASLtError("not a compute type and scale of float32")
    return _new(Desc(compute_type))


def matmul_desc_destroy(matmul_desc: int) -> None:
    _destroy(matmul_desc, Desc)


def get_matmul_desc_attribute_dtype(attr: int) -> type:
    return {3: np.int32, 4: np.int32, 7: np.uint32, 8: np.int64}[int(attr)]


def matmul_desc_set_attribute(matmul_desc: int, attr: int, buf: int, size_in_bytes: int) -> None:
    dtype = get_matmul_desc_attribute_dtype(attr)
    _get(matmul_desc, Desc).attributes[int(attr)] = _value(dtype, buf, size_in_bytes)


def matrix_layout_create(type: int, rows: int, cols: int, ld: int) -> int:
    if type not in TYPES or min(rows, cols) < 1 or ld < rows:
        raise cuBLASLtError(f"no layout of type {type}: {rows} x {cols}, leading dimension {ld}")
    return _new(Layout(type, rows, cols, ld))


def matrix_layout_destroy(mat_layout: int) -> None:
    _destroy(mat_layout, Layout)


def matmul_preference_create() -> int:
    return _new(Preference())


def matmul_preference_destroy(pref: int) -> None:
    _destroy(pref, Preference)


def get_matmul_preference_attribute_dtype(attr: int) -> type:
    return {1: np.uint64}.get(int(attr), np.uint32)


def matmul_preference_set_attribute(pref: int, attr: int, buf: int, size_in_bytes: int) -> None:
    dtype = get_matmul_preference_attribute_dtype(attr)
    _get(pref, Preference).attributes[int(attr)] = _value(dtype, buf, size_in_bytes)


def _value(dtype: type, buf: int, size: int) -> int:
    if size != np.dtype(dtype).itemsize:
        raise cuBLASLtError(f"{size} bytes for an attribute of {np.dtype(dtype).itemsize}")
    return int(np.frombuffer(ctypes.string_at(buf, size), dtype)[0])


def _problem(operation_desc: int, adesc: int, bdesc: int, cdesc: int, ddesc: int) -> tuple[int, ...]:
    """Return what an algorithm is chosen for, after checking that the sizes go together."""
    desc = _get(operation_desc, Desc)
    a, b, c, d = (_get(descriptor, Layout) for descriptor in (adesc, bdesc, cdesc, ddesc))
    turn_a, turn_b = desc.attributes.get(3, 0), desc.attributes.get(4, 0)
    m, k = (a.columns, a.rows) if turn_a else (a.rows, a.columns)
    k_too, n = (b.columns, b.rows) if turn_b else (b.rows, b.columns)
    if k != k_too or (d.rows, d.columns) != (m, n) or c != d:
        raise cuBLASLtError(f"CUBLAS_STATUS_INVALID_VALUE: ({m} x {k}) ({k_too} x {n}) = {d.rows} x {d.columns}")
    if a.type != b.type or d.type != R_32F or (a.type != R_32F and desc.compute != COMPUTE_32F):
        raise cuBLASLtError(f"CUBLAS_STATUS_NOT_SUPPORTED: {a.type} by {b.type} = {d.type} in {desc.compute}")
    return desc.compute, desc.attributes.get(7, 1) | a.type << 8, turn_a, turn_b, m, n, k


def matmul_algo_get_heuristic(
    light_handle: int,
    operation_desc: int,
    adesc: int,
    bdesc: int,
    cdesc: int,
    ddesc: int,
    preference: int,
    requested_algo_count: int,
    heuristic_results_array: int,
    return_algo_count: int,
) -> None:
    calls.append("matmul_algo_get_heuristic")
    _get(light_handle, Handle)
    problem = _problem(operation_desc, adesc, bdesc, cdesc, ddesc)
    wishes = _get(preference, Preference).attributes
    alignments = [wishes.get(number, 256) for number in (5, 6, 7, 8)]
    results = np.zeros(requested_algo_count, matmul_heuristic_result_dtype)
    packed = [(problem[0] << 32) | problem[1], (problem[2] << 32) | problem[3], *problem[4:]]
    results["algo"]["data_"][0] = [*packed, *((alignments[i] << 32) | alignments[i + 1] for i in (0, 2)), 1]
    results["algo"]["data_"][0][7] = results["workspace_size"][0] = wishes.get(1, 0)
    ctypes.memmove(heuristic_results_array, results.ctypes.data, results.nbytes)
    ctypes.memmove(return_algo_count, np.array([1], np.int32).ctypes.data, 4)


def matmul(
    light_handle: int,
    compute_desc: int,
    alpha: int,
    a: int,
    adesc: int,
    b: int,
    bdesc: int,
    beta: int,
    c: int,
    cdesc: int,
    d: int,
    ddesc: int,
    algo: int,
    workspace: int,
    workspace_size_in_bytes: int,
    stream: int,
) -> None:
    calls.append("matmul")
    _get(light_handle, Handle)
    compute, epilogue, turn_a, turn_b, m, n, k = problem = _problem(compute_desc, adesc, bdesc, cdesc, ddesc)
    packed = [int(word) for word in np.frombuffer(ctypes.string_at(algo, 64), np.uint64)]
    if packed[:5] != [(problem[0] << 32) | problem[1], (problem[2] << 32) | problem[3], m, n, k]:
        raise cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED: the algorithm was chosen for another problem")
    alignments = [packed[5] >> 32, packed[5] & 0xFFFFFFFF, packed[6] >> 32, packed[6] & 0xFFFFFFFF]
    for pointer, alignment in zip((a, b, c, d), alignments, strict=True):
        if pointer % alignment:
            raise cuBLASLtError(f"misaligned address: {pointer:#x} was promised to be a multiple of {alignment}")
    if workspace % 256 or not workspace or workspace_size_in_bytes < packed[7]:
        raise cuBLASLtError("CUBLAS_STATUS_INVALID_VALUE: the workspace")
    driver = _driver()
    driver.range("the workspace", workspace, workspace_size_in_bytes)
    operands = []
    for name, pointer, descriptor in (("a", a, adesc), ("b", b, bdesc), ("c", c, cdesc), ("d", d, ddesc)):
        layout = _get(descriptor, Layout)
        count = layout.ld * (layout.columns - 1) + layout.rows
        driver.range(f"matrix {name}", pointer, TYPES[layout.type].itemsize * count)
        operands.append((layout, driver.host(count, TYPES[layout.type])))
    layout = operands[3][0]
    if layout.ld != layout.rows or _host_float(beta) or epilogue & 0xFF != Epilogue.DEFAULT:
        raise cuBLASLtError("the stand-in writes dense results of products alone")
    factor = _host_float(alpha)

    def computed() -> np.ndarray:
        left, right = (_matrix(*operand).astype(np.float64) for operand in operands[:2])
        if compute == FAST_TF32:
            left, right = (tf32(matrix.astype(np.float32)).astype(np.float64) for matrix in (left, right))
        result = factor * ((left.T if turn_a else left) @ (right.T if turn_b else right))
        return np.asarray(result.T, np.float32).reshape(-1)

    reads = {a: operands[0][1], b: operands[1][1]}
    if a == b:  # one array for both
        operands[1] = operands[1][0], operands[0][1]
        reads = {a: operands[0][1]}
    driver.queue(stream, reads, computed, d, operands[3][1], (workspace, workspace_size_in_bytes))


def _host_float(address: int) -> float:
    return float(np.frombuffer(ctypes.string_at(address, 4), np.float32)[0])


def _matrix(layout: Layout, flat: np.ndarray) -> np.ndarray:
    """Return (rows, columns), which lie by columns."""
    return np.stack([flat[j * layout.ld : j * layout.ld + layout.rows] for j in range(layout.columns)], axis=1)


@functools.cache
def _driver() -> Driver:
    return Driver(cuBLASLtError)
