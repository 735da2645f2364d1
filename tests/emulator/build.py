"""Builds the emulator from nothing: the driver library, and PyCUDA against it, in a cache folder of the user.

`python tests/emulator/build.py` prints the folder; `ready()` returns it to Python code. Nothing is written into the
repository or into the environment of the caller: PyCUDA and what it needs go into a folder of their own, which
`run` puts in front of PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYCUDA = "2026.1"
CUDA_HEADERS = "nvidia-cuda-runtime==13.0.96"  # cuda.h; PyCUDA and the driver must see the same one
PYCUDA_NEEDS = ["pytools", "platformdirs", "mako"]
# The wheel has no cudaProfiler.h, and CUDA 13 has dropped a declaration that PyCUDA still uses.
PROFILER_HEADER = """\
#pragma once
#include <cuda.h>
extern "C" {
typedef enum CUoutput_mode_enum { CU_OUT_KEY_VALUE_PAIR = 0, CU_OUT_CSV = 1 } CUoutput_mode;
CUresult CUDAAPI cuProfilerInitialize(const char *, const char *, CUoutput_mode);
CUresult CUDAAPI cuProfilerStart(void);
CUresult CUDAAPI cuProfilerStop(void);
}
"""
# PyCUDA's own build configuration; -O0, which tests do not notice, takes half the time of building it.
SITECONF = """\
USE_SHIPPED_BOOST = True
CUDA_ROOT = None
CUDA_INC_DIR = [{include!r}]
CUDADRV_LIB_DIR = [{library!r}]
CUDADRV_LIBNAME = ["cuda"]
CUDA_ENABLE_CURAND = False
CUDA_ENABLE_GL = False
CXXFLAGS = ["-O0", "-g0", "-w"]
LDFLAGS = []
"""
# setup.py compiles one file after the other, and reads Boost.Python's headers anew for each, which takes most of the
# time. This compiles two at a time, with the headers precompiled.
PARALLEL_SETUP = """\
import runpy
from multiprocessing.pool import ThreadPool

import setuptools
from distutils.ccompiler import CCompiler


def compile(self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
            extra_postargs=None, depends=None):
    macros, objects, extra_postargs, options, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs)
    arguments = self._get_cc_args(options, debug, extra_preargs)
    if len(objects) > 1:
        with open("common.hpp", "w") as file:
            file.write("#include <boost/python.hpp>\\n#include <boost/thread/thread.hpp>\\n")
        header = ["-x", "c++-header", "common.hpp", "-o", "common.hpp.gch"]
        self.spawn([*self.compiler_so, *arguments, *extra_postargs, *header])
        extra_postargs = [*extra_postargs, "-include", "common.hpp"]
    with ThreadPool(2) as pool:
        pool.map(lambda o: self._compile(o, *build[o], arguments, extra_postargs, options), list(build))
    return objects


CCompiler.compile = compile
runpy.run_path("setup.py", run_name="__main__")
"""
# Sources in which nothing runs for each thread or access of a kernel: -O1 compiles them in two thirds of -O2's time.
ONCE_A_CALL = ("api", "graphs", "module", "report", "stubs")


class BuildError(Exception):
    """Why the emulator cannot be built here, in one line."""


def missing() -> str:
    """What this machine lacks to build the emulator, or an empty string."""
    if sys.platform != "linux":
        return f"the emulator runs on Linux only, not on {sys.platform}"
    if not shutil.which("g++"):
        return "no C++ compiler: g++ is not on PATH"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "the headers of this Python (Python.h) are not installed"
    return ""


def cache() -> Path:
    """Where built emulators are kept: $DPTRAIN_EMULATOR_CACHE or the user's cache folder."""
    place = os.environ.get("DPTRAIN_EMULATOR_CACHE")
    if place:
        return Path(place).absolute()
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(user) / "dptrain" / "emulator"


def digest(*parts: str | bytes) -> str:
    """A short name for what was built from these."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        result.update(len(data).to_bytes(8, "little") + data)
    return result.hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def call(command: list[str], cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Runs a build step quietly; its output is shown only when it fails.

    Raises:
        BuildError: with the end of the output.
    """
    environment = dict(os.environ if environment is None else environment)
    environment.pop("PYTHONWARNINGS", None)  # what the caller thinks of warnings is no matter of pip's
    finished = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, text=True, errors="replace", check=False)  # fmt: skip
    if finished.returncode:
        tail = "\n".join(finished.stdout.splitlines()[-30:])
        raise BuildError(f"{' '.join(command[:6])} ... failed with status {finished.returncode}\n{tail}")


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"emulator: {text}", file=sys.stderr, flush=True)


def in_parallel(commands: list[list[str]]) -> None:
    """Runs compiler commands, two at a time."""
    running: list[subprocess.Popen[str]] = []
    failed: list[str] = []

    def reap() -> None:
        process = running.pop(0)
        output, _ = process.communicate()
        if process.returncode:
            failed.append(output)

    for command in commands:
        if len(running) == 2:
            reap()
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                             text=True)
        )  # fmt: skip
    while running:
        reap()
    if failed:
        raise BuildError("the driver does not compile\n" + failed[0][-4000:])


def place(folder: Path, work: Path) -> None:
    """Makes a finished folder visible under its name, all at once."""
    (work / "complete").touch()
    if folder.exists():
        shutil.rmtree(folder)  # an unfinished one of a killed builder: the lock is ours
    work.rename(folder)


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Runs pip of this interpreter, as it is configured."""
    call([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], environment=environment)


def build_headers(root: Path) -> Path:
    """The folder with cuda.h, from a wheel that is unpacked and not installed."""
    folder = root / f"headers-{digest(CUDA_HEADERS, PROFILER_HEADER)}"
    if (folder / "complete").exists():
        return folder
    say("fetching the CUDA headers")
    work = Path(tempfile.mkdtemp(dir=root, prefix="work-"))
    pip("download", "--no-deps", "-d", str(work / "wheel"), CUDA_HEADERS)
    (wheel,) = (work / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (header,) = (name for name in archive.namelist() if name.endswith("/cuda.h"))
        (work / "cuda.h").write_bytes(archive.read(header))
    (work / "cudaProfiler.h").write_text(PROFILER_HEADER)
    shutil.rmtree(work / "wheel")
    place(folder, work)
    return folder


def driver_sources() -> list[Path]:
    """Everything that goes into libcuda.so.1."""
    return [*sorted((HERE / "driver").iterdir()), HERE / "include" / "emulator" / "abi.h"]


def build_driver(root: Path, headers: Path) -> Path:
    """The folder with lib/libcuda.so.1."""
    contents = [part for path in driver_sources() for part in (path.name, path.read_bytes())]
    folder = root / f"driver-{digest(headers.name, *ONCE_A_CALL, *contents)}"
    if (folder / "complete").exists():
        return folder
    say("compiling the driver")
    work = Path(tempfile.mkdtemp(dir=root, prefix="work-"))
    (work / "lib").mkdir()
    sources = [path for path in driver_sources() if path.suffix == ".cpp"]
    objects = [str(work / f"{path.stem}.o") for path in sources]
    in_parallel([
        ["g++", "-std=c++20", "-O1" if path.stem in ONCE_A_CALL else "-O2", "-g1", "-fPIC", "-fvisibility=default",
         "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wno-deprecated-declarations", f"-I{HERE / 'include'}", f"-I{headers}",
         "-c", str(path), "-o", target]
        for path, target in zip(sources, objects, strict=True)
    ])  # fmt: skip
    library = work / "lib" / "libcuda.so.1"
    call(["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), *objects, "-lpthread", "-ldl", "-lrt"])
    (work / "lib" / "libcuda.so").symlink_to("libcuda.so.1")
    for name in objects:
        Path(name).unlink()
    place(folder, work)
    return folder


def build_pycuda(root: Path, headers: Path, driver: Path) -> Path:
    """A folder for PYTHONPATH with PyCUDA and what it imports.

    The driver's sources are no part of its name: any build of libcuda.so.1 serves one build of PyCUDA.
    """
    import_tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    try:
        numpy = importlib.metadata.version("numpy").split(".")[0]
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError("PyCUDA is built against NumPy, which this Python does not have") from error
    folder = root / f"pycuda-{PYCUDA}-{digest(import_tag, numpy, headers.name, SITECONF, *PYCUDA_NEEDS)}"
    if (folder / "complete").exists():
        return folder
    say(f"building PyCUDA {PYCUDA} against the emulated driver (about a minute)")
    work = Path(tempfile.mkdtemp(dir=root, prefix="work-"))
    try:
        # What setup.py needs, in a folder of its own; with it pip need not make an environment to read metadata.
        tools = work / "tools"
        pip("install", "--target", str(tools), "setuptools", "wheel")
        environment = dict(os.environ, PYTHONPATH=str(tools))
        pip("download", "--no-deps", "--no-binary", "pycuda", "--no-build-isolation", "-d", str(work / "sdist"),
            f"pycuda=={PYCUDA}", environment=environment)  # fmt: skip
        (archive,) = (work / "sdist").iterdir()
        shutil.unpack_archive(archive, work / "source", filter="data")
        (source,) = (work / "source").iterdir()
        (source / "siteconf.py").write_text(SITECONF.format(include=str(headers), library=str(driver / "lib")))
        (source / "parallel_setup.py").write_text(PARALLEL_SETUP)
        call([sys.executable, "-W", "ignore", "parallel_setup.py", "-q", "build", "--build-lib", str(work / "site")],
             cwd=source, environment=environment)  # fmt: skip
        # platformdirs, pytools, mako and what these import; NumPy stays the caller's.
        pip("install", "--target", str(work / "site"), *PYCUDA_NEEDS)
        for name in ("sdist", "source", "tools"):
            shutil.rmtree(work / name)
        place(folder, work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def ready(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Builds what is not there yet and returns an environment made one in which commands run on the emulator.

    Raises:
        BuildError: when something is missing or does not build.
    """
    lack = missing()
    if lack:
        raise BuildError(lack)
    root = cache()
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "lock"):
        headers = build_headers(root)
        driver = build_driver(root, headers)
        pycuda = build_pycuda(root, headers, driver)
        commands = command_folder(root)
    environment = dict(environment)

    def put_first(name: str, value: Path) -> None:
        old = environment.get(name)
        environment[name] = f"{value}{os.pathsep}{old}" if old else str(value)

    put_first("PATH", commands)
    put_first("LD_LIBRARY_PATH", driver / "lib")
    put_first("PYTHONPATH", pycuda / "site")
    environment["EMULATOR_HOME"] = str(driver)
    # Kernels compiled for the emulator never meet those for a real GPU.
    environment["PYCUDA_CACHE_DIR"] = str(root / "kernels")
    (root / "kernels").mkdir(exist_ok=True)
    return environment


def machine_flags() -> list[str]:
    """Fused multiply-add where the processor has it: a GPU has, and fmaf() in software is slow."""
    if platform.machine() == "x86_64":
        try:
            flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
        except (OSError, IndexError):
            return []
        if {"avx2", "fma", "bmi2", "f16c"} <= set(flags):
            return ["-march=x86-64-v3"]
    return []


# A process that compiles asks for the version and mostly compiles nothing: a shell answers in a fiftieth of the time
# in which Python starts. PyCUDA and dptrain key their caches of compiled kernels by this text, so everything that
# changes the result is in it. Python looks at no environment and at none of its packages.
NVCC = """\
#!/bin/sh
case "$1" in --version|-V)
    case "$EMULATOR_SANITIZE" in ""|off) kind=plain level=1;; *) kind=checked level=g;; esac
    case "$EMULATOR_OPTIMIZE" in 0) level=0;; esac
    echo "nvcc: emulated CUDA compiler of dptrain"
    echo "Cuda compilation tools, release 13.0, V13.0.0" \\
        "(g++ {compiler}, $kind -O$level, {flags}, $EMULATOR_HOME, {digest})"
    exit;;
esac
EMULATOR_MACHINE="{flags}" exec "{python}" -S -I -c \
    "import sys; sys.path.append('{folder}/emulator'); import nvcc; nvcc.main(sys.argv[1:])" "$@"
"""


def compiler_folder(root: Path, compiler: str, flags: str) -> Path:
    """A folder whose `emulator` is a copy of nvcc.py and its headers, the one before every source precompiled.

    Args:
        root: of all folders.
        compiler: version of g++.
        flags: of it, for this processor.
    """
    sources = [HERE / "nvcc.py", *sorted(path for path in (HERE / "include").rglob("*") if path.is_file())]
    contents = [part for path in sources for part in (str(path.relative_to(HERE)), path.read_bytes())]
    folder = root / f"nvcc-{digest(compiler, flags, *contents)}"
    if not (folder / "complete").exists():
        work = Path(tempfile.mkdtemp(dir=root, prefix="work-"))
        for path in sources:
            copy = work / "emulator" / path.relative_to(HERE)  # where the driver knows headers by: emulator/include
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        if int(compiler.split(".")[0]) >= 12:  # older ones may fail to load what they precompiled
            precompile = f"import sys; sys.path.append('{work}/emulator'); import nvcc; nvcc.precompile()"
            for kind, level in itertools.product(("off", "all"), "01"):
                options = {"EMULATOR_MACHINE": flags, "EMULATOR_SANITIZE": kind, "EMULATOR_OPTIMIZE": level}
                call([sys.executable, "-S", "-I", "-c", precompile], environment=dict(os.environ) | options)
        place(folder, work)
    return folder


def command_folder(root: Path) -> Path:
    """A folder for PATH with `nvcc`."""
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    flags = " ".join(machine_flags())
    code = compiler_folder(root, compiler, flags)
    text = NVCC.format(compiler=compiler, flags=flags, digest=code.name, python=sys.executable, folder=code)
    folder = root / f"bin-{digest(text)}"
    if not (folder / "complete").exists():
        work = Path(tempfile.mkdtemp(dir=root, prefix="work-"))
        (work / "nvcc").write_text(text)
        (work / "nvcc").chmod(0o755)
        place(folder, work)
    return folder


def main() -> None:
    """Builds, and prints the driver's folder."""
    try:
        print(ready()["EMULATOR_HOME"])
    except BuildError as error:
        sys.exit(f"emulator: {error}")


if __name__ == "__main__":
    main()
