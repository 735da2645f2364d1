"""`python -m dptrain doctor` where all is well, and where one thing after the other is broken."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dptrain.backend.cuda.gpu.selection import has_driver
from dptrain.cli.commands import doctor
from dptrain.cli.options.config import Config
from dptrain.comm import SoloCommunicator
from dptrain.errors import DeviceError
from dptrain.runtime.launch.mpirun import mpi_family
from tests.conftest import ROOT
from tests.emulated import emulated, emulated_ranks, inside_emulator
from tests.launching import Finished, dptrain, on_terminal, shown
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
LABELS = (
    *("Python", "dptrain", "NumPy", "C++ compiler", "cores", "cache", "mpi4py", "mpirun", "launcher", "CUDA-aware"),
    *("/dev/shm", "ulimit", "NVIDIA", "GPU", "PyCUDA", "nvcc", "kernels", "one"),
)


def line(done: Finished, label: str) -> str:
    """Return the one line of the report about something, with what to do about it."""
    lines = re.findall(rf"^  (?:ok|--|!!) {re.escape(label)} .*(?:\n  +-> .*)?", done.out, re.MULTILINE)
    assert len(lines) == 1, f"{label}: {lines}\n{done.out}\n{done.err}"
    return lines[0]


def refused(done: Finished, *words: str, device: str = "cuda", option: str = "auto") -> None:
    """Check the exit code and the one message of a report that says no."""
    assert done.code == 69, done.out + done.err
    (message,) = done.messages
    assert message.startswith(f"dptrain: --device {device} would not run here: "), message
    assert all(word in message for word in words), message
    assert "Traceback" not in done.out + done.err
    assert f"--device {option} -> " in done.out


def script(folder: Path, name: str, text: str) -> str:
    """Make a program and return a PATH that finds it first."""
    place = folder / "bin" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return f"{place.parent}:/usr/bin:/bin"


def without(package: str, folder: Path) -> str:
    """Return a PYTHONPATH under which a package cannot be imported."""
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None")
    return f"{folder}:{ROOT}"


def test_lines_are_broken_between_words_on_a_terminal():
    columns = 60
    done = on_terminal([sys.executable, "-m", "dptrain", "doctor"], columns=columns)
    report = shown(done.out.partition("dptrain: --device cuda would")[0])
    assert report[0].startswith("dptrain ")
    # A path of its own stays whole, to be copied.
    assert [text for text in report if len(text) > columns and " " in text.strip()] == []
    assert max(map(len, report)) > 40


def test_all_is_well():
    done = emulated_ranks(0, "-m", "dptrain", "doctor", fresh=True)
    assert (done.code, done.err) == (0, "")
    for label in LABELS:
        assert len(re.findall(rf"^  (?:ok|--) {re.escape(label)} ", done.out, re.MULTILINE)) == 1, label
    assert re.search(r"GPU-[0-9a-f-]{36}, 32\.0 GiB, 32\.0 GiB free, sm_90a$", line(done, "GPU 0"))
    assert "as NumPy computes it" in line(done, "one op")
    assert "none: one process" in line(done, "launcher")
    assert "--device auto -> Emulated GPU" in done.out
    assert done.out.endswith("\n--device cuda would run here.\n")
    assert "One step of" not in done.out


@pytest.mark.long
def test_kernels_are_compiled_at_the_first_call(tmp_path):
    for compiled in ("0 programs", "1 program"):
        done = emulated_ranks(0, "-m", "dptrain", "doctor", DPTRAIN_CACHE=str(tmp_path))
        assert (done.code, done.err) == (0, "")
        assert f" {compiled} compiled for sm_90" in line(done, "kernels")


@pytest.mark.long
@pytest.mark.parametrize("options", [["--gpu-select", "index"], ["--share-gpu"]])
def test_all_ranks_take_part(options):
    devices = "1" if "--share-gpu" in options else "2"
    model = ["--hidden", "8", "--batch-size", "32"]
    done = emulated_ranks(2, "-m", "dptrain", "doctor", *options, *model, EMULATOR_DEVICES=devices, COLUMNS="150")
    assert (done.code, done.err) == (0, "")
    rows = [row.split(maxsplit=3) for row in done.out.splitlines() if re.match(r"[01] +\S+ +\d+ +", row)]
    assert [row[0] for row in rows] == ["0", "1"]
    assert len({row[2] for row in rows}) == 2
    assert len({re.findall(r"GPU-[0-9a-f-]{36}", row[3])[0] for row in rows}) == int(devices)
    assert "2 ranks, 2 on this node" in line(done, "launcher")
    assert re.search(r"global batch 32 on 2 ranks: .* compute \d+ %, copy \d+ %, MPI \d+ %; all of it on one", done.out)
    assert ("independent runs" in done.out) != ("of one rank's time per step" in done.out)


def test_the_split_is_of_the_configured_model():
    done = dptrain(2, "doctor", "--device", "cpu", "--hidden", "7", "--batch-size", "12", "--dropout", "0.5")
    assert re.search(r"^  --gflops \S+ --memory-bandwidth \S+GB --link \S+GB,\S+us$", done.out, re.MULTILINE)
    assert "--device cpu -> CPU" in done.out
    assert re.search(
        r"global batch 12 on 2 ranks: [\d,]+ us, split into compute \d+ %, copy \d %, MPI \d+ %;", done.out
    )


@pytest.mark.long
def test_more_ranks_than_gpus():
    done = emulated_ranks(3, "-m", "dptrain", "doctor", EMULATOR_DEVICES="2")
    refused(done, ": 3 ranks, 2 GPUs; use -n 2, --share-gpu or --device cpu")


@pytest.mark.long
def test_a_gpu_on_one_rank_only(tmp_path):
    run = 'test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 || export CUDA_VISIBLE_DEVICES=\nexec "$@"'
    script(tmp_path, "wrapper", run)
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside Python")
    command = [str(mpirun), "-n", "2", str(tmp_path / "bin" / "wrapper"), sys.executable, "-m", "dptrain", "doctor"]
    done = emulated(*command)
    refused(done, "rank 1: no GPU: ", "CUDA_ERROR_NO_DEVICE")
    assert "nothing: some ranks have a GPU and others do not" in done.out
    assert re.search(r"^  ok one op .*\n  !! one op .*no GPU.*\(rank 1\)$", done.out, re.MULTILINE)


@pytest.mark.long
def test_hidden_gpus():
    done = emulated_ranks(2, "-m", "dptrain", "doctor", CUDA_VISIBLE_DEVICES="")
    refused(done, "CUDA_ERROR_NO_DEVICE (CUDA_VISIBLE_DEVICES=)")
    assert "unset it" in line(done, "NVIDIA driver")


def test_no_pycuda(tmp_path):
    done = emulated(sys.executable, "-m", "dptrain", "doctor", PYTHONPATH=without("pycuda", tmp_path))
    refused(done, "PyCUDA: not installed")
    assert "!! PyCUDA" in line(done, "PyCUDA")
    assert "pip install 'pycuda>=2026.1'" in line(done, "PyCUDA")
    assert re.search(r"to compile it there is no cuda\.h in \S+/include\n", line(done, "PyCUDA"))  # beside this nvcc
    assert "an NVIDIA driver is installed, but not PyCUDA" in done.out


def test_what_pycuda_is_compiled_with(tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path / "include"))
    script(tmp_path, "nvcc", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    context = doctor.CheckContext(Config(), SoloCommunicator())
    context.pycuda = 1, "ModuleNotFoundError: No module named 'pycuda'"
    (row,) = doctor._pycuda(context)
    assert (row.text, row.state) == ("not installed", "bad")
    monkeypatch.setenv("CXX", "no-such-compiler")
    (row,) = doctor._pycuda(context)
    assert row.text == "not installed; to compile it there is no C++ compiler (g++)"


def test_an_old_pycuda():
    context = doctor.CheckContext(Config(), SoloCommunicator())
    context.pycuda = 0, "2025.1.2"
    (row,) = doctor._pycuda(context)
    assert (row.text, row.state) == ("2025.1.2, which does not support CUDA 13", "note")
    assert "pip install 'pycuda>=2026.1'" in row.fix


def test_no_driver(tmp_path):
    if has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    done = dptrain(0, "doctor", "--device", "cuda", PYTHONPATH=without("pycuda", tmp_path))
    refused(done, "the driver's library does not load", option="cuda")
    assert "install or repair the driver" in line(done, "NVIDIA driver")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ranks", "device"), [(2, "auto"), (0, "cpu")])
def test_a_machine_without_a_gpu_is_well(tmp_path, ranks, device):
    if doctor._signs_of_a_gpu():
        pytest.skip("this machine has a GPU or its driver")
    done = dptrain(ranks, "doctor", "--device", device, PYTHONPATH=without("pycuda", tmp_path))
    assert (done.code, done.err) == (0, "")
    assert "!!" not in done.out.split("\n", 1)[1]
    assert "--device cuda shows what a GPU would need" in line(done, "GPU")
    assert f"--device {device} -> CPU, " in done.out
    assert done.out.endswith(f"\n--device {device} would run here, on the CPU.\n")


@pytest.mark.parametrize(
    ("maker", "kind", "there"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_a_card_without_a_driver_is_a_gpu(tmp_path, monkeypatch, maker, kind, there):
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "vendor").write_text(f"{maker}\n")
    (tmp_path / "card" / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(doctor, "_PCI", tmp_path)
    monkeypatch.setattr(doctor, "has_driver", lambda: False)
    assert doctor._signs_of_a_gpu() is there


@pytest.mark.parametrize(
    ("device", "body", "expected"),
    sample(
        [
            ("cuda", "return 999;", "cuInit fails: error 999"),
            ("auto", "*(volatile int *)0 = 1; return 0;", "a process that queried the driver was killed by signal 11"),
            ("auto", "_exit(3);", "a process that queried the driver exited with code 3"),
        ],
        3,
        first=1,
    ),
)
def test_a_damaged_driver(tmp_path, device, body, expected):
    source = tmp_path / "driver.c"
    source.write_text(
        f"#include <unistd.h>\nint cuInit(unsigned flags) {{ {body} }}\n"
        "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }\n"
    )
    try:
        library = str(tmp_path / "libcuda.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O0", "-w", "-o", library, str(source)], check=True)
    except OSError:
        pytest.skip("no C compiler")
    done = dptrain(0, "doctor", "--device", device, LD_LIBRARY_PATH=str(tmp_path))
    assert done.code == 69
    assert len(done.messages) == 1
    assert expected in done.messages[0]
    assert expected in line(done, "NVIDIA driver")


def test_no_nvcc(tmp_path):
    hide = "import os\nreal = os.access\nos.access = lambda path, mode: 'nvcc' not in str(path) and real(path, mode)\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = emulated(sys.executable, "-m", "dptrain", "doctor", PYTHONPATH=f"{tmp_path}:{ROOT}")
    refused(done, "no nvcc on PATH")
    assert "install the CUDA toolkit" in line(done, "nvcc")


@pytest.mark.parametrize(
    ("text", "expected", "code"),
    sample(
        [
            ("echo broken >&2; exit 1", "--version fails: broken", 69),
            ("kill -11 $$", "--version fails: killed by signal 11", 69),
            ("test $1 = --version && echo release 13.0 && exit; echo too bad; exit 1", "13.0, ", 69),
            ('test $1 = --list-gpu-code && echo sm_50 sm_75 && exit; exec "$REAL" "$@"', "does not support sm_90a", 0),
            ('test $1 = --list-gpu-code && echo sm_80 sm_90 && exit; exec "$REAL" "$@"', ", supports sm_90a", 0),
        ],
        5,
        first=2,
    ),
)
def test_a_broken_nvcc(tmp_path, text, expected, code):
    path = script(tmp_path, "nvcc", text)
    through = ["sh", "-c", f'REAL=$(command -v nvcc) PATH={path} exec "$@"', "sh"]
    # What another nvcc has compiled is there, and must not be taken.
    done = emulated_ranks(0, "-m", "dptrain", "doctor", through=through)
    assert done.code == code, done.out + done.err
    assert expected in line(done, "nvcc")
    if code:
        refused(done, "nvcc")


def test_an_nvcc_that_is_too_new_for_the_driver(tmp_path):
    done = emulated_ranks(0, "-m", "dptrain", "doctor", EMULATOR_DRIVER="12.4", DPTRAIN_CACHE=str(tmp_path))
    refused(done, "nvcc is from CUDA 13.0", "CUDA 12.x at most", "R580 or later")
    assert "!! nvcc " in line(done, "nvcc")
    assert "the nvcc of a CUDA 12 toolkit first on PATH" in line(done, "nvcc")


@pytest.mark.long
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = emulated_ranks(0, "-m", "dptrain", "doctor", DPTRAIN_CACHE=str(tmp_path / "file" / "cache"))
    assert done.code == 0
    (warning,) = done.messages
    assert "cannot cache compiled code there (Not a directory); each process compiles its own" in warning
    assert "file/cache cannot be used: Not a directory" in line(done, "cache")
    assert "set DPTRAIN_CACHE to a writable folder that you own" in line(done, "cache")


@pytest.mark.long
def test_a_full_gpu():
    done = emulated_ranks(2, "-m", "dptrain", "doctor", EMULATOR_MEMORY="1K", EMULATOR_DEVICES="2")
    refused(done, "CUDA out of memory on Emulated GPU")
    assert "could not be measured: CUDA out of memory" in done.out


@pytest.mark.long
def test_no_mpi4py(tmp_path):
    alone = emulated(sys.executable, "-m", "dptrain", "doctor", PYTHONPATH=without("mpi4py", tmp_path))
    assert alone.code == 0, alone.err
    assert "!! mpi4py" in line(alone, "mpi4py")
    several = dptrain(2, "doctor", PYTHONPATH=without("mpi4py", tmp_path))
    refused(several, "the ranks cannot communicate", device="cuda" if doctor._signs_of_a_gpu() else "auto")
    assert "mpi4py halted" in line(several, "launcher")


def test_a_launcher_of_another_mpi():
    done = dptrain(0, "doctor", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    refused(done, "the ranks cannot communicate", device="cuda" if doctor._signs_of_a_gpu() else "auto")
    assert "Open MPI started 2 processes" in line(done, "launcher")
    other = dptrain(0, "doctor", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")
    assert (other.code, other.out, other.err) == (69, "", "")


MPIRUNS = [
    ("echo 'mpirun (Open MPI) 4.1.4'", "bad", "is Open MPI's, mpi4py uses MPICH: .*"),
    ("echo 'HYDRA build details:'", "ok", r"bin/mpirun \(MPICH\)"),
    ("echo 'Intel(R) MPI Library for Linux* OS, Version 2021.1'", "ok", r"\(Intel MPI\)"),
    ("echo no >&2; exit 2", "bad", "--version fails: no"),
    ("exit 2", "bad", "--version fails: nothing"),
]


def test_mpirun_belongs_to_the_library(tmp_path, monkeypatch):
    context = doctor.CheckContext(Config(), SoloCommunicator())
    if mpi_family(context.mpi_library[1]) != "MPICH":
        pytest.skip("mpi4py does not use MPICH here")
    for said, state, expected in MPIRUNS:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", script(tmp_path, "mpirun", said))
            (row,) = doctor._mpirun(context)
        assert row.state == state, row
        assert re.search(expected, row.text), row
    done = dptrain(0, "doctor", PATH=script(tmp_path, "mpirun", MPIRUNS[0][0]))
    mpirun_line = line(done, "mpirun")
    assert mpirun_line.startswith("  !! ")
    assert re.search(rf"{MPIRUNS[0][2]}\n .*-> start with .*mpirun", mpirun_line), mpirun_line


def test_a_check_that_fails_is_a_line():
    def _nonsense(context: doctor.CheckContext) -> list[doctor.Row]:
        raise DeviceError("nothing works") if context.comm.size == 1 else ValueError

    (row,) = doctor._isolated(_nonsense, doctor.CheckContext(Config(), SoloCommunicator()))
    assert (row.label, row.text, row.state) == ("nonsense", "check failed: nothing works", "bad")


def test_a_gpu_that_computes_wrongly(monkeypatch):
    """A backend whose dense layer is off is refused, not only one that raises."""
    from dptrain.backend.cpu.backend import CpuBackend

    class Wrong(CpuBackend):
        def executable(self, *arguments, **options):
            executable = super().executable(*arguments, **options)
            run = executable.run

            def run_and_spoil(*starts):
                run(*starts)
                executable.outputs["y"][-1, -1] += 1e-3

            executable.run = run_and_spoil
            return executable

    context = doctor.CheckContext(Config(), SoloCommunicator())
    context.driver = {"cuda": "13.0", "error": None, "gpus": [{}]}
    context.pycuda = (0, "1")
    for kind, state in ((CpuBackend, "ok"), (Wrong, "bad")):
        monkeypatch.setattr(doctor.backends, "create", lambda *_, factory=kind, **__: factory())
        row, backend = doctor.try_gpu(context, doctor.DeviceAssignment())
        assert (row.state, backend is None) == (state, state == "bad")


def test_help_mentions_it():
    done = dptrain(0, "--help")
    assert "usage: python -m dptrain [COMMAND] [options]" in done.out
    assert "python -m dptrain doctor " in done.out
