"""Compiles generated C++ with the system's compiler, into the cache (`runtime/storage/cache.py`).

A library's name is a digest of its text and headers, compiler, options and CPU. Without a compiler NumPy executes
programs (`program/execute.py`).
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import CompilerError, DeviceError
from dptrain.program.codegen.cpp import ctype
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.cache import cache_dir, compiled
from dptrain.runtime.text import one_line, short
from dptrain.runtime.types import TYPES

# The headers of generated programs, and those of products.
HEADERS = ("scalar.h", "half.h", "native_window.h", "native.h", "native_calls.h", "native_attention.h")
PRODUCT = ("scalar.h", "half.h", "native_product.h")
SHARED = ("scalar.h", "half.h", "native_threads.h", "native_ranks.h")
TILES = (*PRODUCT, "native_tiles.h")
CONVOLUTION = (*PRODUCT, "native_window.h", "native_patches.h", "native_planes.h", "native_convolution.h")
WINOGRAD = (*PRODUCT, "native_window.h", "native_winograd.h")
# No option lets the compiler fuse or reorder floating-point operations, so bits do not depend on it or on its tuning.
# Without -ffp-contract=off it may round a multiply-add once, which NumPy rounds twice, and GCC decides that for each
# loop and each CPU: a row would differ from the same row among many, fused loops from single ones. Products use
# explicit fused multiply-adds (dp_fma in native_product.h).
OPTIONS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-march=native"),
)
# Time limits in seconds: of a compiler's version, of compiling, and of loading a library.
_PATIENCE_FOR_VERSION, _PATIENCE, _PATIENCE_FOR_LOADING = 20.0, 600.0, 60.0
# Fields of a 64-bit library's header: begin of the section table, the last thing in the file, length of an entry, and
# their number. A truncated library may load, and crash only when missing pages are called.
_ELF = struct.Struct("40xQ10xHH")
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


@functools.cache
def compiler() -> tuple[tuple[str, ...], str] | None:
    """Return the command and version of a C++ compiler, or None."""
    return next(filter(None, map(compiler_named, (os.environ.get("CXX"), "c++", "g++", "clang++"))), None)


def compiler_named(name: str | None) -> tuple[tuple[str, ...], str] | None:
    """Return a compiler's command and version; None if it is missing or does not start."""
    try:
        command = shlex.split(name or "")
    except ValueError as error:  # an open quote
        _refuse(f"CXX = {short(name)}", one_line(error))
        return None
    if not command or not shutil.which(command[0]):
        return None
    try:
        finished = run_program([*command, "--version"], _PATIENCE_FOR_VERSION)
    except subprocess.TimeoutExpired:
        _refuse(f"{name} --version", f"no answer within {_PATIENCE_FOR_VERSION:g} s")
        return None
    except OSError as error:
        _refuse(f"{name} --version", error.strerror or one_line(error))
        return None
    if finished.returncode:
        return None
    lines = finished.stdout.decode(errors="replace").splitlines() or [""]
    return tuple(command), lines[0]


def _refuse(command: str, reason: str) -> None:
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        write_error(f"dptrain: warning: {command}: {reason}; this compiler is not used\n")


@functools.cache
def _cpu() -> str:
    """Return the CPU's features, which -march=native code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    return "\n".join(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", lines, re.MULTILINE))


@functools.cache
def _header(name: str) -> str:
    return (kernels_dir() / name).read_text()


@functools.cache
def library(
    source: str, headers: tuple[str, ...] = HEADERS, options: tuple[str, ...] = (), by: str | None = None
) -> ctypes.CDLL:
    """Return a library compiled `by` a compiler, after `headers` of `kernels/`; DeviceError if that fails."""
    candidate = compiler() if by is None else compiler_named(by)
    if candidate is None:
        raise DeviceError("no C++ compiler: neither $CXX nor c++, g++ or clang++ on PATH")
    command, version = candidate
    text = "\n".join((*map(_header, headers), source))
    digest = hashlib.sha256("\0".join((text, *command, version, *OPTIONS, *options, _cpu())).encode()).hexdigest()[:32]
    name, full = f"{digest}.so", (*command, *OPTIONS, *options)
    with compiled(native_cache(), name, lambda: _compiled(text, full), _try_to_load) as file:
        try:
            return ctypes.CDLL(str(file.path))
        except OSError as error:  # such as a disk mounted noexec
            raise _not_loaded(one_line(error)) from error


def _try_to_load(path: Path) -> None:
    """Load a new library in a separate process, which a truncated file kills; raise DeviceError if that fails."""
    with path.open("rb") as file:
        header, size = file.read(_ELF.size), path.stat().st_size
    if len(header) == _ELF.size and header[:5] == b"\x7fELF\2":
        start, entry_size, count = _ELF.unpack(header)
        if start + entry_size * count > size:
            raise _not_loaded(f"it ends after {size} of {start + entry_size * count} bytes")
    if not sys.executable:  # a Python inside another program
        return
    try:
        finished = run_program([sys.executable, "-I", "-S", "-c", _LOAD, str(path)], _PATIENCE_FOR_LOADING)
    except subprocess.TimeoutExpired:
        raise _not_loaded(f"no end within {_PATIENCE_FOR_LOADING:g} s") from None
    if finished.returncode < 0:
        raise _not_loaded(f"loading it ends by signal {-finished.returncode}")
    if finished.returncode:
        lines = finished.stderr.decode(errors="replace").splitlines() or [f"exit code {finished.returncode}"]
        raise _not_loaded(one_line(lines[-1].removeprefix("OSError: ").removeprefix(f"{path}: ")))


def _not_loaded(reason: str) -> CompilerError:
    # Such as a disk mounted noexec, or a compiler that was killed.
    return CompilerError(f"a compiled program does not load: {reason}; set DPTRAIN_CACHE, or CXX to another compiler")


def native_cache() -> Path:
    """The folder of compiled programs."""
    return cache_dir() / "native"


# Code shared by all programs is compiled once.

_SUMS = "".join(f"DP_ADD({known.c}, {name})\n" for name, known in TYPES.items() if known.node_sums)


def shared(name: str) -> int:
    """Return the address of a function of `native_threads.h` or `native_ranks.h`; raises as `library`."""
    return _address(library(_SUMS, SHARED, ("-pthread",))[name])


@functools.cache
def has_tiles() -> bool:
    """Whether CPU, compiler and system can multiply bfloat16 matrices on AMX tiles; raises as `library`."""
    return "amx_bf16" in _cpu().split() and bool(library("", ("native_cpu.h",)).dp_has_tiles())


@functools.cache
def parallel() -> Future[int]:
    """Start to compile the thread pool; see `products`."""
    return _begun(lambda: shared("dp_parallel"))


@functools.cache
def products(dtype: str) -> Future[int]:
    """Start to compile a NumPy type's product, slower than a program; the result, its address, raises as `library`."""
    scalar = ctype(np.dtype(dtype))
    in_tiles = dtype == "bfloat16" and has_tiles()
    source = f"DP_EXPORT({scalar}, dp_Tiles)\n" if in_tiles else f"DP_PRODUCT({scalar})\n"
    return _beginning(source, TILES if in_tiles else PRODUCT, f"dp_product_{scalar}")


@functools.cache
def convolutions(by: str, dtype: str) -> Future[int]:
    """Start to compile a type's convolutions by "channels", "pixels" or "winograd"; see `products`."""
    scalar, headers = ctype(np.dtype(dtype)), WINOGRAD if by == "winograd" else CONVOLUTION
    return _beginning(f"DP_CONVOLUTION_{by.upper()}({scalar})\n", headers, f"dp_{by}_{scalar}")


def _beginning(source: str, headers: tuple[str, ...], function: str) -> Future[int]:
    return _begun(lambda: _address(library(source, headers)[function]))


def _begun(find: Callable[[], int]) -> Future[int]:
    future: Future[int] = Future()

    def work() -> None:
        try:
            future.set_result(find())
        except BaseException as error:  # raised for whoever asks for the result
            future.set_exception(error)

    # A daemon: the end of the process does not wait for it.
    threading.Thread(target=work, name="dptrain-compile", daemon=True).start()
    return future


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _compiled(text: str, command: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dptrain-") as folder:
        source, target = Path(folder, "program.cpp"), Path(folder, "program.so")
        source.write_text(text)
        try:
            finished = run_program([*command, str(source), "-o", str(target)], _PATIENCE)
        except subprocess.TimeoutExpired:
            advice = "set CXX to another compiler, or --jit-compile off"
            raise CompilerError(f"{command[0]} has not compiled a program within {_PATIENCE:g} s: {advice}") from None
        if finished.returncode:
            killed = (
                f"killed by signal {-finished.returncode}"
                if finished.returncode < 0
                else f"exit code {finished.returncode}"
            )
            message = finished.stderr.decode(errors="replace").strip()[:2000] or killed
            raise CompilerError(f"{' '.join(command)} fails on a generated program: {message}")
        return target.read_bytes()
