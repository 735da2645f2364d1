"""Finds GPUs and assigns them to the ranks of a node, without PyCUDA or starting the driver in this process."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.errors import DeviceError
from dptrain.runtime.programs import run_program

# Time limit of the driver in seconds; the first start after a boot takes several.
_PATIENCE = 120.0


def probe(with_memory: bool = False) -> dict[str, Any]:
    """Return the output of `dptrain.backend.cuda.gpu.probe`; its "error" says why there is none."""
    program = str(Path(__file__).with_name("probe.py"))
    command = [sys.executable, "-I", program, *(["--memory"] if with_memory else [])]
    empty: dict[str, Any] = {"cuda": None, "gpus": []}
    try:
        process = run_program(command, _PATIENCE)
        if process.returncode == 0:
            report: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
            return report
    except subprocess.TimeoutExpired:
        return empty | {"error": f"the driver did not answer within {_PATIENCE:.0f} s"}
    except (OSError, ValueError, IndexError) as error:
        return empty | {"error": f"cannot query the driver ({error})"}
    ending = (
        f"was killed by signal {-process.returncode}"
        if process.returncode < 0
        else f"exited with code {process.returncode}"
    )
    return empty | {"error": f"a process that queried the driver {ending}"}


def visible_gpus() -> list[str]:
    """Return identities of the GPUs this process can choose from, in CUDA's order: UUIDs if the driver reports them.

    CUDA shows a process only the first of several MIG slices, and another one only if the mask names it alone; so the
    mask's names identify the others.
    """
    names_in_mask = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(name.startswith("MIG-") for name in names_in_mask):
        slices = probe()["gpus"]
        return names_in_mask if slices else []
    return [gpu["uuid"] or f"GPU {number}" for number, gpu in enumerate(probe()["gpus"])]


def assign(visible: Sequence[Sequence[str]], ranks: Sequence[int], share: bool, host: str) -> list[int]:
    """Return the GPU of each rank of a node, as an index of the identities that it sees (`visible`, by local rank).

    If all ranks see the same GPUs, local rank i takes number i. If a launcher has given them different ones (Slurm's
    --gpus-per-task, a container each), a rank takes the first that no lower rank has. DeviceError if two ranks would
    use the same GPU without `share`.
    """
    if all(own_gpus == visible[0] for own_gpus in visible):
        count = len(visible[0])
        if 0 < count < len(visible) and not share:
            raise DeviceError(
                f"host {host}: {len(visible)} ranks, {count} GPU{'s' if count > 1 else ''}{masked()}; "
                f"use -n {count}, --share-gpu or --device cpu"
            )
        return [number % max(count, 1) for number in range(len(visible))]
    rank_of: dict[str, int] = {}
    chosen = []
    for local_rank, own_gpus in enumerate(visible):
        free = [number for number, gpu in enumerate(own_gpus) if gpu not in rank_of]
        if not free and own_gpus and not share:
            raise DeviceError(
                f"host {host}: ranks {rank_of[own_gpus[0]]} and {ranks[local_rank]} would both use {own_gpus[0]}, "
                "the only GPU that their launcher makes visible to them; give each rank its own GPU, or use "
                "--share-gpu or --device cpu"
            )
        number = free[0] if free else local_rank % max(len(own_gpus), 1)
        chosen.append(number)
        if own_gpus:
            rank_of.setdefault(own_gpus[number], ranks[local_rank])
    return chosen


def visible_device(mask: str | None, number: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES that shows device `number` of those that `mask` shows (None: all)."""
    if mask is None:
        return str(number)
    entries = mask.split(",")
    return entries[number].strip() if number < len(entries) else ""


def masked() -> str:
    """Return " (CUDA_VISIBLE_DEVICES=...)" if it is set, for messages."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"


def has_driver() -> bool:
    """Whether this machine shows signs of an NVIDIA driver; does not start it."""
    if os.path.exists("/dev/nvidiactl"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
