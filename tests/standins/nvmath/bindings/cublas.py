"""The enumerations of cuBLAS that dptrain uses, with the library's numbers."""

from enum import IntEnum


class Operation(IntEnum):
    N = 0
    T = 1


class ComputeType(IntEnum):
    COMPUTE_32F = 68
    COMPUTE_32F_FAST_TF32 = 77
