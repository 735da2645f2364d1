"""A stand-in for the parts of nvmath-python that `libraries/cublaslt.py` calls; see bindings/cublasLt.py."""

from enum import IntEnum


class CudaDataType(IntEnum):
    CUDA_R_32F = 0
    CUDA_R_64F = 1
    CUDA_R_16F = 2
    CUDA_R_16BF = 14
