"""A lower bound of a kernel's time on a GPU by a roofline model; needs no GPU.

The model (Williams, Waterman and Patterson, 2009): a kernel moves its bytes at the memory's bandwidth while it computes
at the arithmetic units' peak, so the slower of the two sets its time. Two terms are added for small kernels:

- a kernel with fewer blocks than the GPU holds at once uses only that part of it: time is divided by
  fill = min(1, blocks / (multiprocessors * blocks an SM));
- each node of a CUDA graph costs `NODE_SECONDS` and each launch of a graph `GRAPH_SECONDS`, as measured on an H200
  (`benchmarks/results/gpu-first-contact_h200_2026-11-26.md`): empty kernels follow each other every 0.8 us, and a small
  kernel of a step waits for reads that wait for each other.

Left out: caches (a tensor counts for each kernel that reads it, even if still in the L2 cache), the tail of the last
wave of blocks, and how far real code stays below the peaks. Large kernels take longer than predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dptrain.backend.cuda.graphs import steps_in_graph

Unit = Literal["FP32", "TF32", "half"]
# The bottleneck: launching, global memory, one of the units, or too few blocks to fill the GPU.
Bound = Literal["launch", "memory", "blocks", "FP32", "TF32", "half"]

# Overhead in seconds of a kernel in a graph, and of a graph's launch.
NODE_SECONDS, GRAPH_SECONDS = 2.5e-6, 1e-6
# A kernel that fills less of a GPU would take half the time or less if it filled all of it.
_HALF_FULL = 0.5
# Of a multiprocessor, compute capabilities 8.0 and 9.0 (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"): threads, blocks, registers, and bytes of shared memory that the system takes of a block's.
_THREADS, _BLOCKS, _REGISTERS, _RESERVED = 2048, 32, 65536, 1024
# A warp's registers are allocated in portions.
_WARP, _PORTION = 32, 256


@dataclass(frozen=True)
class GpuModel:
    """A GPU's peaks.

    Attributes:
        processors: multiprocessors, each with `shared` bytes of shared memory.
        bandwidth: of global memory, bytes/s.
        peaks: floating-point operations/s by unit, dense: data sheets print those of tensor cores "with sparsity",
            which are twice as high.
        memory: bytes of global memory.
        link: peak bytes/s over NVLink in one direction.
    """

    name: str
    processors: int
    shared: int
    bandwidth: float
    peaks: Mapping[Unit, float]
    memory: float
    link: float


# A100: NVIDIA A100 data sheet (June 2021), SXM, 80 GB. H100: NVIDIA H100 data sheet (2023), SXM. H200: NVIDIA H200 data
# sheet (2024), SXM. They add up both directions of NVLink. Multiprocessors: NVIDIA's white papers on the Ampere and
# Hopper architectures.
GPUS = (
    GpuModel("A100", 108, 164 * 1024, 2.039e12, {"FP32": 19.5e12, "TF32": 156e12, "half": 312e12}, 80e9, 300e9),
    GpuModel("H100", 132, 228 * 1024, 3.35e12, {"FP32": 67e12, "TF32": 494.5e12, "half": 989.5e12}, 80e9, 450e9),
    GpuModel("H200", 132, 228 * 1024, 4.8e12, {"FP32": 67e12, "TF32": 494.5e12, "half": 989.5e12}, 141e9, 450e9),
)


@dataclass(frozen=True)
class Load:
    """Resources that one kernel uses.

    Attributes:
        blocks: of its grid; 0 if unknown, and assumed to fill the GPU.
        threads: of a block; 0 if unknown.
        shared, registers: bytes of a block's shared memory, registers of a thread, or None.
        spilled: bytes a thread that go through memory for want of registers, or None.
        read, written: bytes from and to global memory.
        operations: floating-point operations by unit.
        times: launches a step.
    """

    name: str
    blocks: int
    threads: int
    shared: int | None
    registers: int | None
    spilled: int | None
    read: int
    written: int
    operations: Mapping[Unit, int]
    times: int = 1


@dataclass(frozen=True)
class Prediction:
    """A kernel's time, launch included, and its bottleneck."""

    seconds: float
    bound: Bound


def blocks_per_processor(load: Load, gpu: GpuModel) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at once; unknown resources do not limit them."""
    most = _BLOCKS
    if load.threads:
        most = min(most, _THREADS // load.threads)
    if load.shared is not None:
        most = min(most, gpu.shared // (load.shared + _RESERVED))
    if load.registers and load.threads:
        warps = -(-load.threads // _WARP)
        most = min(most, _REGISTERS // (warps * -(-load.registers * _WARP // _PORTION) * _PORTION))
    return max(most, 1)


def fill(load: Load, gpu: GpuModel) -> float:
    """Return the fraction of a GPU that a kernel's blocks fill."""
    return min(1.0, load.blocks / (gpu.processors * blocks_per_processor(load, gpu))) if load.blocks else 1.0


def predict(load: Load, gpu: GpuModel) -> Prediction:
    """Return the time of a kernel in a graph."""
    memory = (load.read + load.written) / gpu.bandwidth
    by_unit = {unit: count / gpu.peaks[unit] for unit, count in load.operations.items()}
    arithmetic = sum(by_unit.values())
    filled = fill(load, gpu)
    work = max(memory, arithmetic) / filled
    bound: Bound = "memory" if memory >= arithmetic else max(by_unit.items(), key=lambda item: item[1])[0]
    if filled < _HALF_FULL:
        bound = "blocks"
    if work <= NODE_SECONDS:
        bound = "launch"
    return Prediction(NODE_SECONDS + work, bound)


def predict_step(loads: Sequence[Load], gpu: GpuModel) -> float:
    """Return the seconds of a step among several that share a graph."""
    kernels = sum(load.times * predict(load, gpu).seconds for load in loads)
    return kernels + GRAPH_SECONDS / steps_in_graph(sum(load.times for load in loads))
