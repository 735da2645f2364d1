"""`python -m dptrain doctor`: reports what is installed, what is missing, and what would be used.

Anything may be broken, so each check stands alone, and a failure becomes a line of the report. Programs and libraries
that might crash run in separate processes. A new check is a function that returns rows, listed in `CHECKS`.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_info

from dptrain import backend as backends
from dptrain import comm as comms
from dptrain import ops
from dptrain.backend import Backend, DeviceAssignment
from dptrain.backend.base import amount
from dptrain.backend.cpu.compile import compiler, native_cache
from dptrain.backend.cuda.compile import find_nvcc, kernel_cache, parse_release, too_new
from dptrain.backend.cuda.gpu.selection import has_driver, masked, probe
from dptrain.backend.cuda.libraries import cublaslt, cudnn
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.backend.transfers import Exchange
from dptrain.batches.base import ArrayBatches
from dptrain.batches.inputs import Samples
from dptrain.batches.sampling import GlobalSampler, Sampler
from dptrain.cli.building import build_model
from dptrain.cli.measuring import measured, stated
from dptrain.cli.options.config import Config, device_options
from dptrain.cli.ranks import show_ranks
from dptrain.comm import Communicator, nccl
from dptrain.data.loading import LoadedData, Split
from dptrain.errors import AgreedError, DptrainError, ExitCode
from dptrain.models import Model
from dptrain.program.program import trace
from dptrain.program.shapes import size
from dptrain.program.sharding.messages import stages
from dptrain.program.sharding.placement import place
from dptrain.runtime.extras import pip_install
from dptrain.runtime.failure import describe, phase
from dptrain.runtime.launch.launcher import core_affinity, detect_launch, usable_cores
from dptrain.runtime.launch.mpirun import mpi_family
from dptrain.runtime.output.terminal import say
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.cache import cache_dir, own_folder
from dptrain.train.devices import check_devices, find_place, open_backend
from dptrain.version import __version__

# Time limit in seconds of a program's version.
_PATIENCE = 60
# Timed steps, and warm-up steps.
_REPEATS, _WARM_UP = 15, 3
# The first PyCUDA that does so.
_KNOWS_CUDA_13 = (2026, 1)
# Linux's PCI data: NVIDIA's vendor ID, and the prefix of the display class.
_PCI, _NVIDIA, _DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"
_MARKS = {"ok": "ok", "note": "--", "bad": "!!"}


@dataclass(frozen=True)
class Row:
    """A line of the report."""

    label: str
    text: str
    state: Literal["ok", "note", "bad"] = "ok"  # "ok"; "note" or "bad": something optional or required is missing
    fix: str = ""  # what to do about it


class CheckContext:
    """What checks look at: the configuration and the ranks."""

    def __init__(self, config: Config, comm: Communicator) -> None:
        self.config = config
        self.comm = comm

    @cached_property
    def driver(self) -> dict[str, Any]:
        """The driver's report; one rank a node asks for free memory."""
        return probe(with_memory=self.comm.local_rank == 0)

    @cached_property
    def pycuda(self) -> tuple[int, str]:
        """Exit status and last line of a process that imports PyCUDA."""
        return _ask([sys.executable, "-c", "import pycuda, pycuda.driver; print(pycuda.VERSION_TEXT)"])

    @cached_property
    def mpi_library(self) -> tuple[int, str]:
        """Exit status and last line of a process that loads MPI without starting it."""
        code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
        return _ask([sys.executable, "-W", "ignore", "-c", code], line=0)


def doctor(config: Config, comm: Communicator, parsed: argparse.Namespace) -> int:
    """Print the report; return 0 if training would run, on the GPUs that `--device` asks for or finds. Collective."""
    phase.enter("doctor")
    context = CheckContext(config, comm)
    launch = detect_launch()
    show = _Printer(comm.rank == 0 and (launch is None or launch.rank == 0))
    with_gpu = config.device == "cuda" or (config.device == "auto" and any(comm.allgather(_signs_of_a_gpu())))
    show(f"dptrain {__version__}: environment   (ok present, -- optional and missing, !! a problem)")
    for title, checks in CHECKS.items():
        selected = [_no_gpu] if title == "GPU" and not with_gpu else checks
        _show_section(show, comm, title, [row for check in selected for row in _isolated(check, context)])

    trouble = None
    if with_gpu:
        place = find_place(comm, "cuda", "float32", config.share_gpu)
        row, opened = try_gpu(context, place)
        _show_section(show, comm, "Trying the GPU", [row])
        trouble = _why_not(config, comm, row, opened)
    if launch is not None and launch.size > 1 and comm.size == 1:
        trouble = "the ranks cannot communicate"

    backend = None
    # A driver that crashes processes must not be started here, neither on this rank nor beside it.
    if not with_gpu or all(comm.allgather(_is_safe(context))):
        backend, used = _what_would_be_used(config, comm)
        trouble = trouble or next((reason for reason in comm.allgather(None if backend else used) if reason), None)
    else:
        used = "not tried: the NVIDIA driver or PyCUDA crashes; use --device cpu"
    rows = comm.allgather([comm.host, os.getpid(), used])
    show("\nWould be used")
    if show.active and comm.size > 1:
        show_ranks([[rank, *row] for rank, row in enumerate(rows)])
    show(f"  --device {config.device} -> {used}")
    if comm.size > 1 and backend is not None:
        show("\nOne step of the configured model (28x28 inputs, ten classes)")
        for line in _split_of_a_step(config, comm):
            show(f"  {line}")
    if backend is not None and backend.name == "cpu":
        show("\nMeasured on a rank, as options of python -m dptrain explain --ranks 1-64")
        try:
            show(f"  {stated(measured(backend, comm))}")
        except DptrainError as error:
            show(f"  could not be measured: {error}")
    device = "cuda" if with_gpu else config.device
    if trouble is not None:
        instead = "; the CPU computes with --device cpu" if with_gpu else ""
        raise AgreedError("doctor", ExitCode.DEVICE, f"--device {device} would not run here: {trouble}{instead}", [])
    show(f"\n--device {device} would run here{'' if with_gpu else ', on the CPU'}.")
    return 0


# Checks


def _python(context: CheckContext) -> list[Row]:
    return [Row("Python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")]


def _dptrain(context: CheckContext) -> list[Row]:
    return [Row("dptrain", f"{__version__} in {Path(__file__).parents[2]}; CUDA sources in {kernels_dir()}")]


def _numpy(context: CheckContext) -> list[Row]:
    blas = [
        f"{pool['internal_api']} {pool['version'] or ''}, {_plural(pool['num_threads'], 'thread')}"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    if not blas:
        text = f"{np.__version__}; no BLAS with a configurable number of threads"
        return [Row("NumPy", text, "note", "pip install --force-reinstall numpy: its wheels hold OpenBLAS")]
    return [Row("NumPy", f"{np.__version__} with {'; '.join(dict.fromkeys(blas))}")]


def _compiler(context: CheckContext) -> list[Row]:
    path_and_version = compiler()
    if path_and_version is not None:
        return [
            Row("C++ compiler", f"{path_and_version[1]} ({' '.join(path_and_version[0])}): compiles steps for the CPU")
        ]
    fix = "install g++ or clang++, or set CXX: compiled steps of small models take a fraction of the time"
    return [Row("C++ compiler", "none: steps on the CPU are NumPy calls", "note", fix)]


def _cores(context: CheckContext) -> list[Row]:
    usable, bound, all_cores = usable_cores(), len(core_affinity()), os.cpu_count() or 1
    text = f"{usable} usable; this process may run on {bound} of {all_cores}"
    if usable < bound:
        text += f", and the container's quota is {usable}"
    return [Row("cores", text)]


def _mpi4py(context: CheckContext) -> list[Row]:
    status, output = context.mpi_library
    if status == 0:
        return [
            Row("mpi4py", f"{metadata.version('mpi4py')} with {mpi_family(output)} ({' '.join(output.split()[:5])})")
        ]
    try:
        version = f"{metadata.version('mpi4py')} does not load: {output}"
    except metadata.PackageNotFoundError:
        return [Row("mpi4py", "not installed: no training under mpirun", "bad", "pip install mpi4py")]
    return [Row("mpi4py", version, "bad", f"install an MPI library, or {pip_install('mpich')}, which brings one")]


def _mpirun(context: CheckContext) -> list[Row]:
    on_path, beside = shutil.which("mpirun"), Path(sys.executable).with_name("mpirun")
    if on_path is None and not beside.exists():
        fix = f"{pip_install('mpich')}, or your system's package of MPI"
        return [Row("mpirun", "neither on PATH nor next to this Python", "bad", fix)]
    place = on_path or str(beside)
    status, output = _ask([place, "--version"], line=None)
    library, launcher_family = mpi_family(context.mpi_library[1]), mpi_family(output)
    if status:
        return [Row("mpirun", f"{place} --version fails: {_last(output)}", "bad", "install MPI again")]
    # MPIs of the MPICH family start each other's processes.
    hydra = {"MPICH", "Intel MPI", "MVAPICH"}
    if context.mpi_library[0] == 0 and launcher_family != library and not {launcher_family, library} <= hydra:
        text = f"{place} is {launcher_family}'s, mpi4py uses {library}: every process would be its own MPI world"
        fix = (
            f"start with {beside}"
            if beside.exists() and str(beside) != place
            else f"start with the mpirun of {library}"
        )
        return [Row("mpirun", text, "bad", fix)]
    if on_path is None:
        fix = f"start with {beside}, or activate the environment"
        return [Row("mpirun", f"{beside} ({launcher_family}), next to this Python and not on PATH", "note", fix)]
    return [Row("mpirun", f"{place} ({launcher_family})")]


def _ranks(context: CheckContext) -> list[Row]:
    launch, comm = detect_launch(), context.comm
    if launch is None:
        return [Row("launcher", "none: one process; run doctor under mpirun -n N to check all ranks")]
    if launch.size > 1 and comm.size == 1:
        try:
            comms.current()
            text = f"{launch.launcher} started {launch.size} processes, each its own MPI world"
        except Exception as error:
            text = describe(error)
        return [Row("launcher", text, "bad", "see mpi4py and mpirun above")]
    return [Row("launcher", f"{launch.launcher}: {_plural(comm.size, 'rank')}, {comm.local_size} on this node")]


def _transport(context: CheckContext) -> list[Row]:
    if context.config.comm == "host":
        return [Row("CUDA-aware", "not checked: gradients travel through host memory (--comm host)", "note")]
    if context.config.comm == "nccl":
        reason = nccl.why_not()
        if reason:
            return [Row("NCCL", reason, "bad", "use --comm host")]
        return [Row("NCCL", "nccl4py and its library load")]
    if context.config.comm != "cuda-aware":
        return [Row("messages", f"--comm {context.config.comm}: chosen when training starts", "note")]
    if reason := context.comm.why_not_cuda_aware():
        return [Row("CUDA-aware", reason, "bad", "use --comm host, or an MPI that is built with CUDA")]
    return [Row("CUDA-aware", "yes: device memory was copied through MPI")]


def _shared_memory(context: CheckContext) -> list[Row]:
    status = os.statvfs("/dev/shm")
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{amount(free)} of {amount(total)} free, for the node's one copy of the data set"
    if free >= 256 << 20:
        return [Row("/dev/shm", text)]
    fix = "give the container more (docker --shm-size, an emptyDir of medium Memory); else each rank keeps a copy"
    return [Row("/dev/shm", text, "note", fix)]


def _locked_memory(context: CheckContext) -> list[Row]:
    import resource  # not on every operating system

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [Row("ulimit -l", "unlimited" if soft == resource.RLIM_INFINITY else f"{amount(soft)} of locked memory")]


def _signs_of_a_gpu() -> bool:
    """Whether this machine has an NVIDIA driver, or a card that needs one."""
    if has_driver():
        return True
    for device in _PCI.glob("*"):
        with suppress(OSError):
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if maker == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    return False


def _no_gpu(context: CheckContext) -> list[Row]:
    text = "not checked (--device cpu)" if context.config.device == "cpu" else "none here: the CPU computes"
    return [Row("GPU", text, "note", "--device cuda shows what a GPU would need")]


def _driver(context: CheckContext) -> list[Row]:
    driver = context.driver
    version = ""
    with suppress(OSError, IndexError):
        content = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        version = re.findall(r"\d+\.\d+[.\d]*", content)[0]
    knows = f", for CUDA up to {driver['cuda']}" if driver["cuda"] else ""
    if driver["error"] is None:
        return [Row("NVIDIA driver", f"{version or 'found'}{knows}{masked()}")]
    fix = "nvidia-smi must work first: install or repair the driver; in a container, start it with --gpus all"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        fix = "CUDA_VISIBLE_DEVICES hides GPUs: unset it, or name some; " + fix
    return [Row("NVIDIA driver", f"{version}{knows} {driver['error']}{masked()}".strip(" ,"), "bad", fix)]


def _gpus(context: CheckContext) -> list[Row]:
    rows = []
    for number, gpu in enumerate(context.driver["gpus"]):
        text = f"{gpu['name']}, {gpu['uuid'] or 'UUID unknown'}, {amount(gpu['total'])}"
        text += "" if gpu["free"] is None else f", {amount(gpu['free'])} free"
        text += f", {gpu['architecture']}"
        if gpu["error"] is None:
            rows.append(Row(f"GPU {number}", text))
        else:
            fix = "nvidia-smi shows which processes use it; stop them, or hide it with CUDA_VISIBLE_DEVICES"
            rows.append(Row(f"GPU {number}", f"{text}; it cannot run a program: {gpu['error']}", "bad", fix))
    return rows or [Row("GPUs", "none that a program can use", "bad", "see the NVIDIA driver above")]


def _pycuda(context: CheckContext) -> list[Row]:
    status, output = context.pycuda
    if status == 0:
        if tuple(map(int, re.findall(r"\d+", output)[:2])) < _KNOWS_CUDA_13:
            fix = pip_install("cuda")
            return [Row("PyCUDA", f"{output}, which does not support CUDA 13", "note", fix)]
        return [Row("PyCUDA", output)]
    if "No module named 'pycuda'" in output or "pycuda halted" in output:
        lacks, place = _lacking(), f"PATH={Path(find_nvcc()).parent}:$PATH " if _nvcc_beside_path() else ""
        text = f"not installed; to compile it there is no {', no '.join(lacks)}" if lacks else "not installed"
        return [Row("PyCUDA", text, "bad", f"{place}{pip_install('cuda')} (needs the CUDA toolkit and g++)")]
    return [Row("PyCUDA", f"does not load: {output}", "bad", "see the NVIDIA driver above, or install PyCUDA again")]


def _nvcc_beside_path() -> bool:
    """Whether nvcc exists but is not on PATH, where PyCUDA's build looks for it."""
    with suppress(DptrainError):
        return bool(find_nvcc()) and shutil.which("nvcc") is None
    return False


def _lacking() -> list[str]:
    """Return what is missing to compile PyCUDA, which has no wheels."""
    lacks = [] if shutil.which(os.environ.get("CXX") or "g++") else ["C++ compiler (g++)"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        lacks.append("Python.h (the system's package of Python headers)")
    try:
        folders = [str(Path(find_nvcc()).parent.parent / "include"), *os.environ.get("CPATH", "").split(os.pathsep)]
    except DptrainError:
        return [*lacks, "nvcc", "cuda.h"]
    there = any(folder and (Path(folder) / "cuda.h").is_file() for folder in folders)
    return lacks if there else [*lacks, f"cuda.h in {folders[0]}"]


def _nvcc(context: CheckContext) -> list[Row]:
    try:
        nvcc = find_nvcc()
    except DptrainError:
        fix = (
            "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads, or "
            f"{pip_install('cuda-toolkit')}) or set CUDA_HOME"
        )
        return [Row("nvcc", "neither on PATH nor in $CUDA_HOME or /usr/local/cuda", "bad", fix)]
    status, output = _ask([nvcc, "--version"], line=None)
    if status:
        return [Row("nvcc", f"{nvcc} --version fails: {_last(output)}", "bad", "install the CUDA toolkit again")]
    release, cuda = parse_release(output), context.driver["cuda"]
    text = f"{'.'.join(map(str, release)) if release else 'of an unknown release'}, {nvcc}"
    if trouble := too_new(release, cuda and tuple(map(int, cuda.split(".")))):
        return [Row("nvcc", f"{text}: {trouble[0]}", "bad", trouble[1])]
    architectures = sorted({gpu["architecture"] for gpu in context.driver["gpus"]})
    status, listed = _ask([nvcc, "--list-gpu-code"], line=None)
    if status or not architectures:
        return [Row("nvcc", text)]
    # An nvcc that lists sm_90 knows sm_90a, which it does not list.
    unknown = [architecture for architecture in architectures if architecture.removesuffix("a") not in listed.split()]
    if unknown:
        fix = "install a CUDA toolkit that supports this GPU"
        return [Row("nvcc", f"{text} does not support {', '.join(unknown)}", "bad", fix)]
    return [Row("nvcc", f"{text}, supports {', '.join(architectures)}")]


def _kernels(context: CheckContext) -> list[Row]:
    architectures = sorted({gpu["architecture"] for gpu in context.driver["gpus"]})
    if not architectures:
        return [Row("kernels", "a model's steps are compiled at their first use", "note")]
    rows = []
    for architecture in architectures:
        there = len(list(kernel_cache().glob(f"*-{architecture}-*.cubin")))
        text = f"{_plural(there, 'program')} compiled for {architecture} in {kernel_cache()}, others on first use"
        rows.append(Row("kernels", text))
    return rows


def _libraries(context: CheckContext) -> list[Row]:
    rows = []
    for kind, title, choice, why_not in (
        ("gemm", "cuBLASLt", context.config.gemm, cublaslt.why_not),
        ("conv", "cuDNN", context.config.conv, cudnn.why_not),
    ):
        if choice == "dptrain":
            rows.append(Row(title, f"not checked: dptrain's own kernels are used (--{kind} dptrain)", "note"))
        elif reason := why_not():
            rows.append(
                Row(
                    title,
                    reason,
                    "note" if choice == "auto" else "bad",
                    f"dptrain's own kernels do not need it (--{kind} dptrain)",
                )
            )
        else:
            rows.append(Row(title, "its bindings and the library load"))
    return rows


def _cache(context: CheckContext) -> list[Row]:
    place = cache_dir()
    try:
        with own_folder(native_cache()) as opened, tempfile.TemporaryFile(dir=opened):
            pass
    except OSError as error:
        fix = "set DPTRAIN_CACHE to a writable folder that you own"
        return [Row("cache", f"{place} cannot be used: {error.strerror}", "bad", fix)]
    return [Row("cache", f"{place}, {amount(shutil.disk_usage(place).free)} free")]


# By title of the section, in the order of the report. A check is not collective.
CHECKS: dict[str, list[Callable[[CheckContext], list[Row]]]] = {
    "Python": [_python, _dptrain, _numpy, _compiler, _cores, _cache],
    "MPI": [_mpi4py, _mpirun, _ranks, _transport, _shared_memory, _locked_memory],
    "GPU": [_driver, _gpus, _pycuda, _nvcc, _kernels, _libraries],
}


def try_gpu(context: CheckContext, place: DeviceAssignment) -> tuple[Row, Backend | None]:
    """Open this rank's GPU and compute an op on it."""
    label = "one op"
    if place.trouble is not None:
        return Row(label, place.trouble, "bad"), None
    if not context.driver["gpus"]:
        text = context.driver["error"] or "the driver shows none"
        return Row(label, f"no GPU: {text}{masked()}", "bad", "see the NVIDIA driver above"), None
    if context.pycuda[0]:
        return Row(label, f"PyCUDA: {_pycuda(context)[0].text}", "bad", "see PyCUDA above"), None
    try:
        started = time.perf_counter()
        select = context.config.gpu_select
        backend = backends.create("cuda", "float32", 1, place=place, gpu_select=select)
        opened = time.perf_counter()
        difference = _try_op(backend)
        end = time.perf_counter()
    except Exception as error:
        return Row(label, describe(error).removeprefix("--device cuda: "), "bad"), None
    if not difference <= (1e-5 if context.config.precision == "float32" else 3e-2):
        text = f"{backend.description}: a dense layer differs from NumPy's by {difference:.1e}"
        return Row(
            label, text, "bad", "the GPU or its driver computes wrongly: please report it with this output"
        ), None
    text = (
        f"{backend.description}: opened in {opened - started:.1f} s; "
        f"a dense layer in {1e3 * (end - opened):.0f} ms with its compilation, as NumPy computes it"
    )
    return Row(label, text), backend


def _try_op(backend: Backend) -> float:
    """Return the largest difference between the backend's dense layer and NumPy's."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (33, 70), "kernel": (70, 17), "bias": (17,)}.items()
    }
    layer = trace(
        lambda x, kernel, bias: {"y": ops.tanh(x @ kernel + bias)},
        {name: (array.shape, array.dtype) for name, array in arrays.items()},
    )
    program = backend.executable(place(layer), {name: backend.upload(array) for name, array in arrays.items()})
    program.run()
    x, kernel, bias = arrays.values()
    expected = np.tanh(x.astype(np.float64) @ kernel + bias)
    return float(np.max(np.abs(program.outputs["y"] - expected)))


def _why_not(config: Config, comm: Communicator, row: Row, opened: Backend | None) -> str | None:
    """Return, on all ranks, why they cannot use GPUs, or None. Collective."""
    reasons = comm.allgather(None if row.state == "ok" else row.text)
    if opened is None or any(reasons):
        first = next(rank for rank, text in enumerate(reasons) if text)
        return str(reasons[first]) if len(set(reasons)) == 1 else f"rank {first}: {reasons[first]}"
    try:
        check_devices(comm, opened, config.share_gpu)
    except AgreedError as error:
        return str(error)
    return None


def _what_would_be_used(config: Config, comm: Communicator) -> tuple[Backend | None, str]:
    try:
        backend = open_backend(comm, **device_options(config))
    except Exception as error:
        return None, f"nothing: {describe(error)}"
    return backend, backend.description


# Parts of a step's time


def _split_of_a_step(config: Config, comm: Communicator) -> list[str]:
    """Time a step on all ranks and on one, and say whether more ranks pay off. Collective."""
    try:
        images = Split(np.zeros((1, 28, 28), np.uint8), np.zeros(1, np.int64))
        times = _measure(config, comm, build_model(config, LoadedData("doctor", images, images, 10)))
    except DptrainError as error:
        return [f"could not be measured: {error}"]
    alone, compute, copy, mpi = (max(column) for column in zip(*comm.allgather(times), strict=True))
    total, ranks, batch = compute + copy + mpi, comm.size, config.train.batch_size
    parts = ", ".join(
        f"{name} {100 * part / total:.0f} %" for name, part in zip(_PARTS, (compute, copy, mpi), strict=True)
    )
    lines = [
        f"global batch {batch} on {ranks} ranks: {1e6 * total:,.0f} us, split into {parts}; all of it on one rank: "
        f"{1e6 * alone:,.0f} us (medians of {_REPEATS}, the slowest rank)"
    ]
    if alone < 1.1 * total:
        lines.append(
            f"More ranks do not help this model at this batch size: train {ranks} independent runs (seeds, settings) "
            "at once, one per rank, or use a larger --batch-size or model."
        )
    else:
        lines.append(f"{ranks} ranks take {total / alone:.0%} of one rank's time per step.")
    return lines


_PARTS = ("compute", "copy", "MPI")


def _measure(config: Config, comm: Communicator, model: Model) -> tuple[float, float, float, float]:
    """Return seconds: a step on this rank alone; compute, copy and MPI of a step on all. Collective."""
    trainer, step, batch = model._open_trainer(comm), model._make_step("train"), config.train.batch_size
    backend = trainer.backend
    rng = np.random.default_rng(0)
    samples = Samples(
        rng.integers(0, 256, (batch, 28, 28), np.uint8), rng.integers(0, 10, batch), dtype=model._data_dtype
    )

    def timed(sampler: Sampler, alone: bool) -> float:
        with ArrayBatches(*samples.stored(), sampler).open(backend, None) as batches:
            shards = next(iter(batches.epoch(0)))
            rows = batches.rows([shards])

            def once() -> None:
                trainer.programs.run(step, batches.spec, rows, [shards], alone=alone)
                trainer.wait()

            comm.agree("measuring", lambda: trainer.programs.placed(step, batches.spec, batch))
            return _median(comm, once)

    alone = timed(GlobalSampler(batch, batch, shuffle=False), True)
    total = timed(GlobalSampler(batch, batch, comm.rank, comm.size, shuffle=False), False)
    placed = trainer.programs.placed(step, samples.stored()[1], batch)
    copy = mpi = 0.0
    if backend.transport == "nccl":  # nothing for the host to time
        return alone, total, 0.0, 0.0
    for message in (message for stage in stages(placed) for message in stage.messages):
        buffer = backend.upload(np.zeros(sum(size(tensor.shape) for tensor in message), message[0].dtype))
        exchange = backend.exchange(buffer, direct=backend.transport == "cuda-aware")

        def there_and_back(exchange: Exchange = exchange) -> None:
            exchange.begin()
            exchange.values()
            exchange.end()
            trainer.wait()

        def summed(exchange: Exchange = exchange) -> None:
            comm.allreduce_sum(exchange.values())

        copy += _median(comm, there_and_back) if backend.name == "cuda" else 0.0
        mpi += _median(comm, summed)
    return alone, max(total - copy - mpi, 0.0), copy, mpi


def _median(comm: Communicator, action: Callable[[], None]) -> float:
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        comm.barrier()
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return median(times[_WARM_UP:])


# Helpers


class _Printer:
    def __init__(self, active: bool) -> None:
        self.active = active

    def __call__(self, text: str, indent: int = 2) -> None:
        if self.active:
            for line in text.split("\n"):
                say(line, indent=indent)


def _isolated(check: Callable[[CheckContext], list[Row]], context: CheckContext) -> list[Row]:
    try:
        return check(context)
    except Exception as error:
        return [Row(check.__name__.strip("_"), f"check failed: {describe(error)}", "bad")]


def _show_section(show: _Printer, comm: Communicator, title: str, rows: list[Row]) -> None:
    by_rank = [[Row(**row) for row in rank_rows] for rank_rows in comm.allgather([asdict(row) for row in rows])]
    show(f"\n{title}")
    shown = set()
    for rank, rank_rows in enumerate(by_rank):
        for row in rank_rows:
            if rank == 0 or (row.state == "bad" and row not in shown):
                shown.add(row)
                whose = "" if rank == 0 else f" (rank {rank})"
                show(f"  {_MARKS[row.state]} {row.label:<13} {row.text}{whose}", indent=19)
                if row.fix and row.state != "ok":
                    show(f"     {'':<13} -> {row.fix}", indent=22)


def _is_safe(context: CheckContext) -> bool:
    """Whether neither the driver nor PyCUDA crashed the process that asked."""
    return not str(context.driver["error"]).startswith("a process that queried") and context.pycuda[0] >= 0


def _ask(command: Sequence[str], line: int | None = -1) -> tuple[int, str]:
    """Return a program's exit status and one line of its output (None: all of it)."""
    try:
        process = run_program(command, _PATIENCE)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_PATIENCE} s"
    except OSError as error:
        return 1, error.strerror or str(error)
    content = process.stdout if process.returncode == 0 else process.stderr or process.stdout
    text = content.decode(errors="replace").strip()
    if process.returncode < 0:
        text = f"{text}\nkilled by signal {-process.returncode}"
    lines = text.splitlines() or ["nothing"]
    return process.returncode, text if line is None else lines[line if process.returncode == 0 else -1]


def _last(text: str) -> str:
    return text.splitlines()[-1] if text else "nothing"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
