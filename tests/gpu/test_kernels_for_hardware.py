"""Every kernel compiles with NVIDIA's nvcc for every supported architecture, without spilling registers."""

import re
import shutil
import subprocess

import pytest

from dptrain.backend.cuda.compile import command, find_nvcc
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import DeviceError

ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
SOURCES = sorted(path.stem for path in kernels_dir().glob("*.cu"))
ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(.*?)$",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture(scope="session")
def nvcc() -> str:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler: nvcc needs g++ on PATH")
    try:
        found = find_nvcc()
    except DeviceError as error:
        pytest.skip(str(error))
    if "emulated" in subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("nvcc is the emulator's")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_spills(nvcc, architecture, tmp_path, record_property):
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if architecture not in known:
        pytest.skip(f"this nvcc does not know {architecture}")
    rows = []
    for source in SOURCES:
        place = kernels_dir() / f"{source}.cu"
        line = [
            *command(nvcc, place, tmp_path / f"{source}.cubin", architecture),
            "-Xptxas",
            "-v",
            "-Werror",
            "all-warnings",
        ]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for name, stores, loads, registers, rest in ENTRY.findall(done.stderr):
            shared = re.search(r"(\d+) bytes smem", rest)
            rows.append((name, int(registers), int(shared[1]) if shared else 0, int(stores) + int(loads)))
    assert len(rows) == sum(_kernels(source) for source in SOURCES)
    table = [f"{architecture:24} registers  shared memory  spills (bytes)"]
    for name, registers, shared_bytes, spills in sorted(rows):
        table.append(f"{name:24} {registers:9}  {shared_bytes:13}  {spills:6}")
    record_property("table", "\n".join(table))
    assert [name for name, _, _, spills in rows if spills] == []


def _kernels(source: str) -> int:
    """The number of kernels in a source, after its macros."""
    text = (kernels_dir() / f"{source}.cu").read_text()
    preprocessed = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-D__global__=KERNEL", f"-I{kernels_dir()}", "-"],
        input=re.sub(r"#include <.*>", "", text),  # CUDA's own headers, which hold no kernel of ours
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return len(re.findall(r"\bKERNEL\b", preprocessed))
