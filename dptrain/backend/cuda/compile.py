"""Compiles CUDA sources once per architecture, into the cache (`runtime/storage/cache.py`).

A file's name is a digest of the source with all headers, the architecture, the options and the version of nvcc. The
first rank of a node that needs a file compiles it; the others wait for it.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import DeviceError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.cache import cache_dir, compiled

# Most texts compiled at once.
_AHEAD = 8
# Time limits in seconds of nvcc's version, and of compiling.
_PATIENCE_FOR_VERSION, _PATIENCE = 60.0, 600.0
OPTIONS = ("-O3", "-std=c++17")
# nvcc optimises kernels in a thread a core; the instructions are the same.
_IN_THREADS, _THREADS_SINCE = ("--split-compile", "0"), (13, 0)
# The first driver that loads cubins of a major version of CUDA.
_DRIVERS = {12: "R525 or later", 13: "R580 or later"}


class Cubin(NamedTuple):
    """A compiled file in the cache, and its content."""

    path: Path
    content: bytes


class Resources(NamedTuple):
    """Resources of a kernel as compiled; `spilled`: bytes a thread stores and loads for want of registers."""

    registers: int
    spilled: int
    shared: int


_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def find_nvcc() -> str:
    """Return nvcc from PATH, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or NVIDIA's wheels; else DeviceError."""
    path = shutil.which("nvcc")
    if path is not None:
        return path
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", *wheel_roots()):
        if root and os.access(place := Path(root) / "bin" / "nvcc", os.X_OK):
            return str(place)
    raise DeviceError(
        "no nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin: install the CUDA toolkit "
        f"(https://developer.nvidia.com/cuda-downloads, or {pip_install('cuda-toolkit')}), or use --device cpu"
    )


def wheel_roots() -> list[Path]:
    """Return the toolkit folders of NVIDIA's wheels (site-packages/nvidia/cu13), newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(location) for location in spec.submodule_search_locations or ()]
    roots = {int(root.name[2:]): root for folder in folders for root in folder.glob("cu*") if root.name[2:].isdigit()}
    return [roots[version] for version in sorted(roots, reverse=True)]


def release(nvcc: str) -> tuple[int, int] | None:
    """Return the CUDA version of an nvcc, or None if it reports none; DeviceError if it does not work."""
    return parse_release(_version(nvcc))


def parse_release(output: str) -> tuple[int, int] | None:
    """Return the CUDA version in the output of `nvcc --version`, or None."""
    match = re.search(r"release (\d+)\.(\d+)", output)
    return None if match is None else (int(match[1]), int(match[2]))


def too_new(toolkit: tuple[int, int] | None, driver: tuple[int, int] | None) -> tuple[str, str] | None:
    """Return why a driver cannot load what an nvcc compiles, and the remedy; None if it can.

    A driver loads cubins of every nvcc of its own major version and older ones. PTX would not help: a driver refuses
    PTX of a newer version.
    """
    if toolkit is None or driver is None or toolkit[0] <= driver[0]:
        return None
    least = _DRIVERS.get(toolkit[0], "")
    return (
        f"nvcc is from CUDA {toolkit[0]}.{toolkit[1]}, but this driver supports CUDA {driver[0]}.x at most (it "
        f"reports {driver[0]}.{driver[1]})",
        f"update the NVIDIA driver (CUDA {toolkit[0]} needs {least or 'a newer one'}), or put the nvcc of a "
        f"CUDA {driver[0]} toolkit first on PATH",
    )


def compiled_own(name: str, source: str | Path, architecture: str) -> Cubin:
    """Return the compiled file of a user's source (C++ text, or a path), compiled unless the cache holds it.

    Raises:
        DeviceError: nvcc is missing or refuses the source.
        OutputError: the cache cannot be written.
    """
    nvcc = find_nvcc()
    digest = _digest(nvcc, architecture)
    with tempfile.TemporaryDirectory(prefix="dptrain-") as folder:
        path = _written(folder, name, source) if isinstance(source, str) else source
        for part in _includes(nvcc, path, architecture):
            digest.update(part.read_bytes())
        file = f"own-{name}-{architecture}-{digest.hexdigest()[:24]}.cubin"
        return _kept(file, lambda: _compile(nvcc, path, architecture))


class Ahead:
    """Compiles sources in threads before they are needed; users wait for them as for another process's file."""

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, text: str, compile_it: Callable[[], object]) -> None:
        """Start to compile a new text by `compile_it`, in another thread; its errors recur when the text is needed."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in self._begun:
            return
        self._begun.add(digest)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(_AHEAD, os.cpu_count() or 1), "dptrain nvcc")
        self._threads.submit(compile_it)


def compiled_text(name: str, text: str, architecture: str) -> Cubin:
    """Return the compiled file of a generated source, which includes only `kernels/`; see `compiled_own`."""
    return _made_of_text(name, text, architecture, "cubin", _compile)


def resources_of_text(name: str, text: str, architecture: str) -> dict[str, Resources]:
    """Return the resources of a generated source's kernels by name; raises as `compiled_own`."""
    return parse_resources(_made_of_text(name, text, architecture, "resources", _said_of_resources).content.decode())


def parse_resources(output: str) -> dict[str, Resources]:
    """Return the resources of kernels by name, from the output of `nvcc -Xptxas -v`."""
    resources = {}
    for kernel, stores, loads, registers, details in _ENTRY.findall(output):
        shared = re.search(r"(\d+) bytes smem", details)
        resources[kernel] = Resources(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
    return resources


def _made_of_text(
    name: str, text: str, architecture: str, ending: str, make: Callable[[str, Path, str], bytes]
) -> Cubin:
    """Return the file that nvcc makes of a text; `make` takes nvcc, a source's path and an architecture."""
    nvcc = find_nvcc()
    digest = _digest(nvcc, architecture)
    digest.update(text.encode())

    def compiled_file() -> bytes:
        with tempfile.TemporaryDirectory(prefix="dptrain-") as folder:
            return make(nvcc, _written(folder, name, text), architecture)

    return _kept(f"{name}-{architecture}-{digest.hexdigest()[:24]}.{ending}", compiled_file)


def _written(folder: str, name: str, text: str) -> Path:
    path = Path(folder) / f"{name}.cu"
    path.write_text(text, encoding="utf-8")
    return path


def _kept(file: str, make: Callable[[], bytes]) -> Cubin:
    with compiled(kernel_cache(), file, make, patience=_PATIENCE) as entry:
        return Cubin(kernel_cache() / file, entry.content)


def _includes(nvcc: str, source: Path, architecture: str) -> list[Path]:
    """Return a source and all files that it includes, without system headers; DeviceError if nvcc refuses it."""
    rule = _run_nvcc([nvcc, "-MM", *_options(architecture), str(source)], source, architecture).stdout
    # A rule of make: "x.o : x.cu one.h \\", in which a blank inside a name is "\\ ", and a dollar "$$".
    listed = rule.replace("\\\n", " ").partition(":")[2]
    names = (re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|\S)+", listed))
    return [Path(name) for name in dict.fromkeys(names)]


def _digest(nvcc: str, architecture: str) -> "hashlib._Hash":
    """Return a digest of what all compiled files depend on."""
    added = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
    digest = hashlib.sha256("\0".join([architecture, *OPTIONS, *added, _version(nvcc)]).encode())
    for header in sorted([*kernels_dir().glob("*.cuh"), *kernels_dir().glob("*.h")]):
        digest.update(header.read_bytes())
    return digest


def kernel_cache() -> Path:
    """The folder of compiled kernels."""
    return cache_dir() / "kernels"


def command(nvcc: str, source: Path, target: Path, architecture: str) -> list[str]:
    """Return the command that compiles a source."""
    threads = _IN_THREADS if (release(nvcc) or (0, 0)) >= _THREADS_SINCE else ()
    return [nvcc, "--cubin", *_options(architecture), *threads, "-o", str(target), str(source)]


def _options(architecture: str) -> list[str]:
    return [f"-arch={architecture}", *OPTIONS, f"-I{kernels_dir()}"]


@functools.cache
def _version(nvcc: str) -> str:
    try:
        process = run_program([nvcc, "--version"], _PATIENCE_FOR_VERSION)
        process.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"{nvcc} --version fails ({error}): is the CUDA toolkit complete?") from error
    return process.stdout.decode(errors="replace")


def _compile(nvcc: str, source: Path, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dptrain-") as folder:
        target = Path(folder) / f"{source.stem}.cubin"
        _run_nvcc(command(nvcc, source, target, architecture), source, architecture)
        return target.read_bytes()


def _said_of_resources(nvcc: str, source: Path, architecture: str) -> bytes:
    first, *options = command(nvcc, source, source.with_suffix(".cubin"), architecture)
    return _run_nvcc([first, "-Xptxas", "-v", *options], source, architecture).stderr.encode()


def _run_nvcc(arguments: Sequence[str], source: Path, architecture: str) -> "subprocess.CompletedProcess[str]":
    """Run nvcc; DeviceError if it refuses the source or does not end."""
    try:
        ended = run_program(arguments, _PATIENCE)
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"nvcc did not compile {source.name} for {architecture} within {_PATIENCE:g} s; is the machine overloaded?"
        ) from None
    output, errors = (stream.decode(errors="replace") for stream in (ended.stdout, ended.stderr))
    process = subprocess.CompletedProcess(arguments, ended.returncode, output, errors)
    if process.returncode:
        lines = [line for line in (process.stderr or process.stdout).splitlines() if line.strip()]
        line = next((line for line in lines if "error" in line or "fatal" in line), lines[0] if lines else "nothing")
        line = line.strip().replace(f"{source.parent}{os.sep}", "")
        raise DeviceError(f"nvcc cannot compile {source.name} for {architecture}: {line}")
    return process
