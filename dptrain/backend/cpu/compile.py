"""Compiling generated C++ with the system's compiler, into the cache (`runtime/cache.py`).

A library's name is a digest of everything that its content depends on: the text with its headers, the compiler, the
options and the CPU. Without a compiler programs are executed by NumPy instead (`program/execute.py`).
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import DeviceError
from dptrain.program.cpp import TYPES
from dptrain.runtime.cache import cache_dir, compiled
from dptrain.runtime.text import one_line

# The headers of generated programs, and those of products.
HEADERS = ("scalar.h", "half.h", "native_window.h", "native.h", "native_calls.h")
PRODUCT = ("scalar.h", "half.h", "native_product.h")
SHARED = ("scalar.h", "half.h", "native_threads.h", "native_ranks.h")
TILES = (*PRODUCT, "native_tiles.h")
CONVOLUTION = (*PRODUCT, "native_window.h", "native_patches.h", "native_planes.h", "native_convolution.h")
WINOGRAD = (*PRODUCT, "native_window.h", "native_winograd.h")
# No option lets the compiler join or reorder floating-point operations, so bits do not depend on it or on what it tunes
# for. Without -ffp-contract=off it may round a multiply-add once, which NumPy rounds twice, and GCC decides anew for
# each loop and each CPU that it tunes for: a row would differ from the same row among many, fused loops from single
# ones. Products want fused multiply-adds and say so themselves (dp_fma in native_product.h).
OPTIONS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-march=native"),
)


@functools.cache
def compiler() -> tuple[tuple[str, ...], str] | None:
    """Return the command of a C++ compiler and what it says of its version, or None where there is none."""
    return next(filter(None, map(compiler_named, (os.environ.get("CXX"), "c++", "g++", "clang++"))), None)


def compiler_named(name: str | None) -> tuple[tuple[str, ...], str] | None:
    """Return one compiler's command and version, or None where it is not there or does not start."""
    command = shlex.split(name or "")
    if command and shutil.which(command[0]):
        found = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return tuple(command), found.stdout.splitlines()[0]
    return None


@functools.cache
def _cpu() -> str:
    """Return what tells CPUs apart for which -march=native makes different code."""
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
    """Return a compiled library.

    Args:
        source: its text.
        headers: of `kernels/`, that come before it.
        options: besides `OPTIONS`, and after them.
        by: the compiler's name; None for `compiler()`.

    Raises:
        DeviceError: there is no compiler, or it fails.
    """
    found = compiler() if by is None else compiler_named(by)
    if found is None:
        raise DeviceError("no C++ compiler: neither $CXX nor c++, g++ or clang++ on PATH")
    command, version = found
    text = "\n".join((*map(_header, headers), source))
    digest = hashlib.sha256("\0".join((text, *command, version, *OPTIONS, *options, _cpu())).encode()).hexdigest()[:32]
    name, full = f"{digest}.so", (*command, *OPTIONS, *options)
    with compiled(native_cache(), name, lambda: _compiled(text, full)) as file:
        try:
            return ctypes.CDLL(str(file.path))
        except OSError as error:  # such as a disk from which nothing may be executed
            raise DeviceError(f"a compiled program does not load: {one_line(error)}; set DPTRAIN_CACHE") from error


def native_cache() -> Path:
    """The folder of compiled programs."""
    return cache_dir() / "native"


# What all programs share is compiled once.


def shared(name: str) -> int:
    """Return the address of a function of `native_threads.h` or `native_ranks.h`; raises as `library`."""
    return _address(library("", SHARED, ("-pthread",))[name])


@functools.cache
def has_tiles() -> bool:
    """Whether AMX tiles compute products of bfloat16 factors: if CPU, compiler and system can; as `library`."""
    return "amx_bf16" in _cpu().split() and bool(library("", ("native_cpu.h",)).dp_has_tiles())


@functools.cache
def parallel() -> Future[int]:
    """Begin to compile the threads; as `products`."""
    return _begun(lambda: shared("dp_parallel"))


@functools.cache
def products(dtype: str) -> Future[int]:
    """Begin to compile the product of factors of a type, by its NumPy name, and return what will be its address.

    That takes longer than compiling a program, which can be done meanwhile. The result raises as `library`.
    """
    scalar = TYPES[dtype]
    in_tiles = dtype == "bfloat16" and has_tiles()
    source = f"DP_EXPORT({scalar}, dp_Tiles)\n" if in_tiles else f"DP_PRODUCT({scalar})\n"
    return _beginning(source, TILES if in_tiles else PRODUCT, f"dp_product_{scalar}")


@functools.cache
def convolutions(by: str, dtype: str) -> Future[int]:
    """Begin to compile the convolutions of a type by "channels", "pixels" or "winograd"; as `products`."""
    scalar, headers = TYPES[dtype], WINOGRAD if by == "winograd" else CONVOLUTION
    return _beginning(f"DP_CONVOLUTION_{by.upper()}({scalar})\n", headers, f"dp_{by}_{scalar}")


def _beginning(source: str, headers: tuple[str, ...], function: str) -> Future[int]:
    return _begun(lambda: _address(library(source, headers)[function]))


def _begun(find: Callable[[], int]) -> Future[int]:
    made = ThreadPoolExecutor(1)
    try:
        return made.submit(find)
    finally:
        made.shutdown(wait=False)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _compiled(text: str, command: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dptrain-") as folder:
        source, made = Path(folder, "program.cpp"), Path(folder, "program.so")
        source.write_text(text)
        done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise DeviceError(f"{' '.join(command)} fails on a generated program: {done.stderr.strip()[:2000]}")
        return made.read_bytes()
