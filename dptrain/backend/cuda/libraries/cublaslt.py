"""Matrix products by NVIDIA's cuBLASLt through nvmath-python, an optional provider (`--gemm cublaslt`).

**Products have run only against a stand-in for `nvmath.bindings.cublasLt` (tests/standins), never on hardware.** Names
and argument orders of the bindings were compared with nvmath-python 1.0; descriptors, layouts and preferences, which
need no GPU, were filled and read back with cuBLASLt 12.9.

cuBLASLt is column-major. A row-major (R, C) array is, by columns, its transpose (C, R) with leading dimension C; so
c = op(a) op(b) is computed as c^T = op(b)^T op(a)^T: b first, a second, sizes N, M, K.

The descriptor, the layouts and the algorithm that the heuristic chose are created once for each shape. Products of the
same shape on the same GPU with the same library have the same bits; another GPU or version may choose another
algorithm, so the version is part of `numerics`.

The only module that imports nvmath. Source: cuBLAS Library User Guide, chapter "Using the cuBLASLt API".
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.backend.cuda.libraries.providers import Problem
from dptrain.errors import ConfigError, DeviceError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.types import TYPES

# NVIDIA's recommendation for Hopper; older GPUs need less.
WORKSPACE_BYTES = 32 * 2**20
# The largest alignment that cuBLASLt asks about.
_ALIGNMENT = 256


def why_not() -> str:
    """Return why cuBLASLt is unusable in this process, or an empty string if it seems usable."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()
    except ImportError as error:
        return f"nvmath-python is not installed ({error}); {pip_install('cublaslt')}"
    except Exception as error:  # nvmath has an error class for each reason
        return f"the library does not load ({error})"
    return ""


@dataclass
class _Matmul:
    """Opaque handles and the algorithm of one shape."""

    operation: int
    layout_a: int
    layout_b: int
    layout_c: int
    algorithm: Any


class CublasLt:
    """Products by cuBLASLt, queued on `stream`; `precision` "tf32" stands for its fast TF32 compute type.

    `workspace` returns the address of at least so many bytes, aligned to 256, in place until the backend closes.
    `numerics` is what the bits of products depend on, beyond the device.

    Raises:
        ConfigError: nvmath-python is not installed.
        DeviceError: the library does not load or start.
    """

    def __init__(self, precision: str, stream: int, workspace: Callable[[int], int]) -> None:
        try:
            from nvmath import CudaDataType
            from nvmath.bindings import cublas, cublasLt
        except ImportError as error:
            raise ConfigError(
                f"gemm = 'cublaslt': nvmath-python is not installed ({error}); {pip_install('cublaslt')}"
            ) from error
        self._lt, self._stream = cublasLt, stream
        self._kinds = {name: int(getattr(CudaDataType, known.cublas)) for name, known in TYPES.items() if known.cublas}
        compute = cublas.ComputeType
        self._of_halves = int(compute.COMPUTE_32F)
        self._compute = self._of_halves if precision == "float32" else int(compute.COMPUTE_32F_FAST_TF32)
        self._keep, self._transpose = int(cublas.Operation.N), int(cublas.Operation.T)
        self._matmuls: dict[tuple[Any, ...], _Matmul] = {}
        try:
            self._handle: int | None = cublasLt.create()
            version = cublasLt.get_version()
        except Exception as error:  # nvmath has an error class for each reason
            raise DeviceError(
                f"gemm = 'cublaslt': the library cannot be initialized ({error}); use --gemm dptrain"
            ) from error
        self.numerics = f"cublaslt {version}"
        self._workspace = workspace(WORKSPACE_BYTES)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def takes(self, problem: Problem) -> bool:
        """Whether cuBLASLt computes a product, as it reports itself."""
        return True

    def prepared(self, problem: Problem, a: int, b: int, c: int) -> Callable[[], None]:
        """Return a function that queues c = op(a) op(b), row-major at these addresses, c in float32; or DeviceError."""
        transposed, sizes = (bool(problem.sizes[0]), bool(problem.sizes[1])), problem.sizes[3:]
        M, N, K = sizes
        # Slices of a batch may be unaligned; an algorithm for aligned matrices would misread them.
        alignments = tuple(min(pointer & -pointer, _ALIGNMENT) for pointer in (a, b, c))
        key = (transposed, sizes, problem.dtype, alignments)

        @contextlib.contextmanager
        def reported() -> Iterator[None]:
            try:
                yield
            except self._lt.cuBLASLtError as error:
                raise DeviceError(
                    f"gemm = 'cublaslt': a matrix product of M, N, K = {sizes} failed ({error}); use --gemm dptrain"
                ) from error

        with reported():
            if key not in self._matmuls:
                self._matmuls[key] = self._prepare(transposed, (M, N, K), problem.dtype, alignments)
        matmul = self._matmuls[key]

        def queue() -> None:
            with reported():
                self._lt.matmul(
                    self._handle,
                    matmul.operation,
                    self._one.ctypes.data,
                    *(b, matmul.layout_b),
                    *(a, matmul.layout_a),
                    self._zero.ctypes.data,
                    *(c, matmul.layout_c),
                    *(c, matmul.layout_c),
                    matmul.algorithm.ctypes.data,
                    self._workspace,
                    WORKSPACE_BYTES,
                    self._stream,
                )

        return queue

    def close(self) -> None:
        """Release the library's resources; all queued work has ended."""
        for matmul in self._matmuls.values():
            for layout in (matmul.layout_a, matmul.layout_b, matmul.layout_c):
                self._lt.matrix_layout_destroy(layout)
            self._lt.matmul_desc_destroy(matmul.operation)
        self._matmuls.clear()
        if self._handle is not None:
            self._lt.destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # an exception here would reach nobody
            self.close()

    def _prepare(
        self, transposed: tuple[bool, bool], sizes: tuple[int, int, int], dtype: str, alignments: tuple[int, ...]
    ) -> _Matmul:
        lt = self._lt
        M, N, K = sizes
        compute = self._compute if dtype == "float32" else self._of_halves
        operation = lt.matmul_desc_create(compute, self._kinds["float32"])
        self._set(operation, lt.MatmulDescAttribute.TRANSA, self._transpose if transposed[1] else self._keep)
        self._set(operation, lt.MatmulDescAttribute.TRANSB, self._transpose if transposed[0] else self._keep)
        # Rows and columns as stored, swapped for column-major order.
        layout_a = self._matrix(dtype, *((K, M) if transposed[0] else (M, K)))
        layout_b = self._matrix(dtype, *((N, K) if transposed[1] else (K, N)))
        layout_c = self._matrix("float32", M, N)
        preference = lt.matmul_preference_create()
        names = lt.MatmulPreferenceAttribute
        wishes = {names.MAX_WORKSPACE_BYTES: WORKSPACE_BYTES}
        aligned_a, aligned_b, aligned_c = alignments
        wishes |= {names.MIN_ALIGNMENT_A_BYTES: aligned_b, names.MIN_ALIGNMENT_B_BYTES: aligned_a}
        wishes |= {names.MIN_ALIGNMENT_C_BYTES: aligned_c, names.MIN_ALIGNMENT_D_BYTES: aligned_c}
        for name, value in wishes.items():
            wish = np.array([value], lt.get_matmul_preference_attribute_dtype(name))
            lt.matmul_preference_set_attribute(preference, name, wish.ctypes.data, wish.nbytes)
        heuristic, count = np.zeros(1, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            self._handle,
            operation,
            *(layout_b, layout_a, layout_c, layout_c),
            preference,
            1,
            heuristic.ctypes.data,
            count.ctypes.data,
        )
        lt.matmul_preference_destroy(preference)
        if count[0] == 0 or heuristic["state"][0] != 0:
            raise DeviceError(f"gemm = 'cublaslt': no algorithm for M, N, K = {M}, {N}, {K}; use --gemm dptrain")
        # The algorithm is the result's first field: one address serves for both.
        return _Matmul(operation, layout_a, layout_b, layout_c, heuristic)

    def _matrix(self, dtype: str, rows: int, columns: int) -> int:
        handle: int = self._lt.matrix_layout_create(self._kinds[dtype], columns, rows, columns)
        return handle

    def _set(self, operation: int, name: int, value: int) -> None:
        data = np.array([value], self._lt.get_matmul_desc_attribute_dtype(name))
        self._lt.matmul_desc_set_attribute(operation, name, data.ctypes.data, data.nbytes)
