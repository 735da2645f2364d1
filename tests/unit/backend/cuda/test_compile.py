"""Compiling kernels into the cache, with a stand-in for nvcc that notes its calls."""

import os
import sys
from pathlib import Path

import pytest

from dptrain.backend.cuda import compile as compiling
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import DeviceError
from tests.emulated import emulated, inside_emulator

NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then cat "{folder}/version"; exit 0; fi
if [ -e "{folder}/broken" ]; then echo "in file included" >&2; echo "x.cu(3): error: no such thing" >&2; exit 1; fi
if [ "$1" = -MM ]; then shift $(($# - 1)); echo "x.o : $1 $(cat "{folder}/includes" 2>/dev/null)"; exit 0; fi
echo "$@" >> "{folder}/calls"
cat "{folder}/ptxas" >&2 2>/dev/null
while [ $# -gt 1 ]; do [ "$1" = -o ] && target=$2; shift; done
echo "$1" > "$target"
"""


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A folder with the stand-in, in front of PATH, and a cache of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvcc").write_text(NVCC.format(folder=folder))
    (folder / "nvcc").chmod(0o755)
    (folder / "version").write_text("release 1")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))
    return folder


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else 0


def test_a_source_is_compiled_once(nvcc):
    first = compiling.compiled_text("program", "text", "sm_90")
    assert calls(nvcc) == 1
    assert Path(first.content.decode().strip()).name == "program.cu"
    assert compiling.compiled_text("program", "text", "sm_90") == first
    assert calls(nvcc) == 1
    names = {first.path.name + ending for ending in ("", ".lock", ".sha256")}
    assert {path.name for path in compiling.kernel_cache().iterdir()} == names, "no leftovers"


def test_nvcc_has_an_end(nvcc, monkeypatch):
    monkeypatch.setattr(compiling, "_PATIENCE", 0.2)
    (nvcc / "nvcc").write_text('#!/bin/sh\n[ "$1" = --version ] || sleep 60\n')
    with pytest.raises(DeviceError, match=r"nvcc did not compile program\.cu for sm_90 within 0\.2 s"):
        compiling.compiled_text("program", "text", "sm_90")
    monkeypatch.setattr(compiling, "_PATIENCE_FOR_VERSION", 0.2)
    (nvcc / "nvcc").write_text("#!/bin/sh\nsleep 60\n")
    compiling._version.cache_clear()
    with pytest.raises(DeviceError, match=r"nvcc --version fails \(.*timed out after 0\.2 seconds"):
        compiling.compiled_text("program", "text", "sm_90")
    compiling._version.cache_clear()


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    32 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size, 18432 bytes smem
ptxas info    : Compile time = 4.055 ms
"""


def test_what_kernels_are_given_is_asked_once(nvcc):
    (nvcc / "ptxas").write_text(PTXAS)
    expected = {"one": (38, 0, 0), "two": (255, 32, 18432)}
    for _ in range(2):
        assert compiling.resources_of_text("program", "text", "sm_90") == expected
    assert calls(nvcc) == 1
    (nvcc / "ptxas").unlink()  # as of an nvcc that says nothing
    assert compiling.resources_of_text("program", "other text", "sm_90") == {}


def test_a_damaged_file_is_compiled_again(nvcc):
    first = compiling.compiled_text("program", "text", "sm_90")
    first.path.write_bytes(b"\0" + first.content[1:])
    assert compiling.compiled_text("program", "text", "sm_90").path.read_bytes()[:1] == first.content[:1]
    assert calls(nvcc) == 2


def test_what_changes_the_result_changes_the_name(nvcc, monkeypatch, tmp_path):
    first = compiling.compiled_text("program", "text", "sm_90")
    assert compiling.compiled_text("program", "text", "sm_80") != first
    assert compiling.compiled_text("program", "other text", "sm_90") != first
    (nvcc / "version").write_text("release 2")
    assert compiling.compiled_text("program", "text", "sm_90") == first, "a process asks nvcc once"
    compiling._version.cache_clear()
    assert compiling.compiled_text("program", "text", "sm_90") != first
    (nvcc / "version").write_text("release 1")
    compiling._version.cache_clear()
    for changed in ("scalar.h", "common.cuh"):
        copy = tmp_path / f"with another {changed}"
        copy.mkdir()
        for path in kernels_dir().iterdir():
            (copy / path.name).write_bytes(path.read_bytes() + (b"//" if path.name == changed else b""))
        monkeypatch.setattr(compiling, "kernels_dir", lambda copy=copy: copy)
        assert compiling.compiled_text("program", "text", "sm_90") != first
    assert calls(nvcc) == 6


def test_what_nvcc_says_is_told_and_leaves_nothing(nvcc):
    (nvcc / "broken").touch()
    with pytest.raises(DeviceError, match=r"nvcc cannot compile program\.cu for sm_90: x\.cu\(3\): error: no such"):
        compiling.compiled_text("program", "text", "sm_90")
    assert [path.suffix for path in compiling.kernel_cache().iterdir()] == [".lock"]


def test_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(compiling.os, "access", lambda path, mode: False)
    with pytest.raises(DeviceError, match=r"no nvcc on PATH.*install the CUDA toolkit .*pip install 'cuda-toolkit\["):
        compiling.find_nvcc()
    monkeypatch.undo()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert compiling.find_nvcc() == str(tmp_path / "bin" / "nvcc")


def test_nvcc_from_wheels(monkeypatch, tmp_path):
    for name in ("cu9", "cu12", "cu13", "cublas"):
        place = tmp_path / "nvidia" / name / "bin" / "nvcc"
        place.parent.mkdir(parents=True)
        if name in ("cu9", "cu12"):
            place.write_text("")
            place.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    real = os.access
    monkeypatch.setattr(compiling.os, "access", lambda path, mode: "/usr/local" not in str(path) and real(path, mode))
    assert compiling.find_nvcc() == str(tmp_path / "nvidia" / "cu12" / "bin" / "nvcc")


def test_a_cache_that_cannot_be_written(nvcc, monkeypatch, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "file"))
    assert compiling.compiled_text("program", "text", "sm_90").content
    assert compiling.compiled_text("program", "text", "sm_90").content
    assert calls(nvcc) == 1
    assert "cannot cache compiled code there (Not a directory); each process compiles its own; set DPTRAIN_CACHE" in (
        capfd.readouterr().err
    )


def test_a_users_source_is_compiled_once_and_again_when_it_or_a_header_changes(nvcc, tmp_path):
    first = compiling.compiled_own("swish", "text", "sm_90")
    assert compiling.compiled_own("swish", "text", "sm_90") == first
    assert calls(nvcc) == 1
    assert compiling.compiled_own("swish", "other text", "sm_90") != first
    assert compiling.compiled_own("swish", "text", "sm_80") != first
    assert calls(nvcc) == 3
    path = tmp_path / "own" / "swish.cu"
    path.parent.mkdir()
    path.write_text("text")
    assert compiling.compiled_own("swish", path, "sm_90") == first  # the same content
    header = tmp_path / "other place" / "mine.cuh"
    header.parent.mkdir()
    header.write_text("header")
    (nvcc / "includes").write_text("\\\n " + str(header).replace(" ", "\\ "))
    second = compiling.compiled_own("swish", path, "sm_90")
    header.write_text("another header")
    assert len({first, second, compiling.compiled_own("swish", path, "sm_90")}) == 3
    assert f"-I{kernels_dir()}" in (nvcc / "calls").read_text()


@pytest.mark.long
@pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
def test_headers_of_other_folders_count_too(tmp_path):
    source, beside, elsewhere = tmp_path / "a b" / "twice.cu", tmp_path / "x.h", tmp_path / "include" / "y.h"
    for place in (source, elsewhere):
        place.parent.mkdir()
    source.write_text('#include "../x.h"\n#include <y.h>\nextern "C" __global__ void twice(float *x) { *x = X + Y; }\n')
    outputs = []
    for x, y in [(1, 1), (1, 1), (2, 1), (2, 2), (1, 1)]:
        beside.write_text(f"#define X {x}\n")
        elsewhere.write_text(f"#define Y {y}\n")
        code = (
            "from pathlib import Path; from dptrain.backend.cuda.compile import compiled_own; "
            f"print(compiled_own('twice', Path({str(source)!r}), 'sm_90').path)"
        )
        cache = str(tmp_path / "cache")
        process = emulated(sys.executable, "-c", code, DPTRAIN_CACHE=cache, CPATH=str(elsewhere.parent))
        assert (process.code, process.err) == (0, "")
        outputs.append(process.out)
    assert len(set(outputs)) == 3
    assert outputs[0] == outputs[1] == outputs[4]


def test_a_users_mistake_is_one_line_without_the_folder(nvcc):
    (nvcc / "broken").touch()
    with pytest.raises(DeviceError, match=r"^nvcc cannot compile swish.cu for sm_90: x.cu\(3\): error: no such"):
        compiling.compiled_own("swish", "text", "sm_90")


@pytest.mark.parametrize(
    ("version", "in_threads"), [("release 12.9", False), ("release 13.0", True), ("no number", False)]
)
def test_kernels_are_optimised_in_threads(nvcc, version, in_threads):
    (nvcc / "version").write_text(version)
    compiling._version.cache_clear()
    compiling.compiled_text("program", "text", "sm_90")
    assert ("--split-compile 0" in (nvcc / "calls").read_text()) == in_threads
    compiling._version.cache_clear()
