"""Devices of a job: one per rank, numbered by the launcher."""

import os
from functools import cache

from dptrain import comm as comms
from dptrain.backend import tries_gpu
from dptrain.backend.cuda.gpu.selection import has_driver, visible_gpus
from dptrain.errors import ConfigError
from dptrain.mixed_precision import dtype_policy
from dptrain.runtime.launch.launcher import detect_launch

_TYPES = ("cpu", "gpu", "tpu")


def list_devices(device_type: str | None = None) -> list[str]:
    """Return a device for each rank, in order: "cpu:0", "cpu:1" and so on, or "gpu:0", "gpu:1"; none of a missing type.

    The number is the rank, not that of a GPU on its node. No GPU is opened here. The first call under a launcher starts
    MPI, which all ranks do together.

    Args:
        device_type: "cpu", "gpu" or "tpu" (else ConfigError); by default what a model trains on unless `compile` says
            otherwise: the GPU if this rank sees one and can use it, else the CPU.

    Source: `keras.distribution.list_devices`, Keras 3.15.
    """
    if device_type is None:
        device_type = "gpu" if _trains_on_gpu() else "cpu"
    kind = device_type.lower()
    if kind not in _TYPES:
        raise ConfigError(f"device_type = {device_type!r}: expected 'cpu', 'gpu' or 'tpu'")
    is_here = kind == "cpu" or (kind == "gpu" and _trains_on_gpu())
    return [f"{kind}:{rank}" for rank in range(comms.current().size)] if is_here else []


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of `list_devices`."""
    return len(list_devices(device_type))


def initialize(
    job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Check that this is the job that a script describes; a launcher such as `mpirun` has started its processes.

    Arguments that are None are read from KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES or
    KERAS_DISTRIBUTION_PROCESS_ID, if set. MPI knows the addresses; only their number is compared.

    Args:
        job_addresses: of all processes, with commas between them, or only of the first.
        num_processes: number of ranks.
        process_id: the rank of this process.

    Raises:
        ConfigError: the launcher has started another number of processes, or this one as another rank; or several
            processes are asked for without a launcher.

    Source: `keras.distribution.initialize`, Keras 3.15.
    """
    if job_addresses is None:
        job_addresses = os.environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES", "")
    count = _number("num_processes", num_processes)
    number = _number("process_id", process_id)
    addresses = job_addresses.split(",")
    if len(addresses) > 1:
        if count not in (None, len(addresses)):
            raise ConfigError(
                f"The provided job_addresses {addresses} has {len(addresses)} jobs, but num_processes is {count}"
            )
        count = len(addresses)
    if count is not None and count < 1:
        raise ConfigError(f"num_processes = {count}: expected an integer >= 1")
    launch = detect_launch()
    size, rank = (1, 0) if launch is None else (launch.size, launch.rank)
    if count not in (None, size):
        launcher = "no launcher has started this process" if launch is None else f"{launch.launcher} has started {size}"
        raise ConfigError(f"num_processes = {count}, but {launcher}; use mpirun -n {count} python script.py")
    if number not in (None, rank):
        raise ConfigError(f"process_id = {number}, but this process is rank {rank} of {size}; leave process_id out")


@cache
def _sees_gpu() -> bool:
    return has_driver() and bool(visible_gpus())


def _trains_on_gpu() -> bool:
    return tries_gpu("auto", dtype_policy().name) and _sees_gpu()


def _number(name: str, value: int | None) -> int | None:
    """Return an argument of `initialize`, or the environment's value."""
    variable = f"KERAS_DISTRIBUTION_{name.upper()}"
    if value is not None or variable not in os.environ:
        return value
    text = os.environ[variable]
    if not text.isdecimal():
        raise ConfigError(f"{variable} = {text!r}: expected an integer")
    return int(text)
