"""The GPU's benchmark scripts run through on the emulated driver; what they time there means nothing."""

import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator
from tests.launching import COMPILES_QUICKLY, run

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.long
def test_dptrain_trains_and_is_timed(tmp_path):
    output = tmp_path / "out.md"
    arguments = ["--quick", "--frameworks", "dptrain", "--precision", "float32", "--output", str(output)]
    finished = emulated(sys.executable, str(BENCHMARKS / "gpu_mlp.py"), *arguments, PYTHONWARNINGS="")
    assert (finished.code, finished.err) == (0, ""), finished.out
    measured = json.loads(output.with_suffix(".json").read_text())["measured"]
    assert [measurement["work"]["hidden"] for measurement in measured] == [[16], [12, 8]]
    for measurement in measured:
        row = measurement["rows"]["dptrain"]
        assert row["failed"] == ""
        assert len(row["speeds"]) == 2
        assert row["check"][1] < row["check"][0]
        seconds, kernels = row["kernels"]
        assert seconds > 0
        assert kernels > 3 * len(measurement["work"]["hidden"])
    text = output.read_text()
    assert "The losses agree." in text
    assert "On the emulated driver" in text


@pytest.mark.slow
def test_peers_agree_and_a_broken_one_stops_nobody(tmp_path):
    pytest.importorskip("torch", reason="needs the extra 'peers'")
    # JAX is "installed" and does not import.
    (tmp_path / "jax.py").write_text("raise ImportError('broken on purpose')")
    output = tmp_path / "out.md"
    arguments = ["--quick", "--device", "cpu", "--frameworks", "dptrain,PyTorch,PyTorch-graph,JAX"]
    finished = run(
        [sys.executable, str(BENCHMARKS / "gpu_mlp.py"), *arguments, "--precision", "float32", "--output", str(output)],
        timeout=300,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        PYTHONWARNINGS="",
    )
    assert (finished.code, finished.err) == (0, ""), finished.out
    for measurement in json.loads(output.with_suffix(".json").read_text())["measured"]:
        assert measurement["rows"]["JAX"]["failed"] == "ImportError: broken on purpose"
        for name in ("dptrain", "PyTorch", "PyTorch-graph"):
            assert len(measurement["rows"][name]["speeds"]) == 2, measurement["rows"][name]["failed"]
            assert measurement["rows"][name]["check"] == pytest.approx(
                measurement["rows"]["dptrain"]["check"], rel=1e-3
            )


@pytest.mark.slow
@pytest.mark.long
def test_many_runs_are_timed(tmp_path):
    output = tmp_path / "out.md"
    arguments = ["--quick", "--device", "cuda", "--frameworks", "dptrain,dptrain-in-turn", "--output", str(output)]
    finished = emulated(sys.executable, str(BENCHMARKS / "sweep.py"), *arguments, PYTHONWARNINGS="")
    assert (finished.code, finished.err) == (0, ""), finished.out
    measured = json.loads(output.with_suffix(".json").read_text())["measured"]
    assert [measurement["work"]["runs"] for measurement in measured] == [1, 3]
    for measurement in measured:
        runs = measurement["work"]["runs"]
        together, in_turn = measurement["rows"]["dptrain"], measurement["rows"]["dptrain-in-turn"]
        assert together["failed"] == in_turn["failed"] == ""
        assert len(together["speeds"]) == len(in_turn["speeds"]) == 2
        assert together["check"] == in_turn["check"], "a run has the bits of the same run alone"
        assert len(set(together["check"])) == 2 * runs
        assert all(after < before for before, after in zip(together["check"], together["check"][runs:], strict=False))
    text = output.read_text()
    assert "The losses agree." in text
    assert "On the emulated driver" in text
    assert "Whole sweeps" not in text


@pytest.mark.slow
@pytest.mark.long
def test_many_runs_beside_what_is_installed(tmp_path):
    output = tmp_path / "out.md"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--runs", "2", "--output", str(output)]
    command = [sys.executable, str(BENCHMARKS / "sweep.py"), *arguments]
    finished = run(command, timeout=300, PYTHONPATH=str(ROOT), PYTHONWARNINGS="", XLA_FLAGS=COMPILES_QUICKLY)
    assert (finished.code, finished.err) == (0, ""), finished.out
    for measurement in json.loads(output.with_suffix(".json").read_text())["measured"]:
        expected = measurement["rows"]["dptrain"]["check"]
        assert len(expected) == 2 * measurement["work"]["runs"]
        for name, row in measurement["rows"].items():
            if row["failed"].endswith("is not installed"):
                assert not name.startswith("dptrain")
                continue
            assert len(row["speeds"]) == 1, (name, row["failed"])
            assert row["check"] == pytest.approx(expected, rel=1e-3), name
    text = output.read_text()
    assert "| mpirun -n 2, one BLAS thread each |" in text or "no mpirun" in text


@pytest.fixture
def scripts(monkeypatch):
    """The scripts' modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import common
    import gpu_mlp
    import sweep

    yield common, gpu_mlp, sweep
    for name in ("common", "gpu_mlp", "sweep"):
        del sys.modules[name]


def test_an_epoch_of_many_runs(scripts):
    *_, sweep = scripts
    watches = [
        SimpleNamespace(begun=[0.0, 10.5], ended=[10.0, 20.0]),
        SimpleNamespace(begun=[1.0, 11.5], ended=[11.0, 23.0]),
    ]
    together = sweep.DptrainSweep._seconds(None, watches, 2)
    assert together == [10.5, 12.5], "until any run is in its second epoch, then until all have ended"
    assert sweep.DptrainInTurn._seconds(None, watches, 2) == [20.0, 21.0]


def test_other_losses_are_noticed(scripts):
    _, gpu_mlp, _ = scripts
    work = gpu_mlp.Work("", 32, (128,), "float32", "cuda", 0)

    def complaints(**rows):
        return gpu_mlp.disagreements(gpu_mlp.Measured(work, 100, 1, 1, {name: rows[name] for name in rows}, ""))

    ours = gpu_mlp.Row(check=[0.40, 0.20], speeds=[1.0], losses=[0.1, 0.1])
    assert complaints(dptrain=ours, peer=gpu_mlp.Row(check=[0.401, 0.201], losses=[0.11])) == []
    (line,) = complaints(dptrain=ours, peer=gpu_mlp.Row(check=[0.40, 0.21]))
    assert line == "float32, 784-128-10, batch 32: peer has loss 0.2100 in the same order, dptrain has 0.2000"
    assert len(complaints(dptrain=ours, peer=gpu_mlp.Row(check=[float("nan"), 0.2]))) == 1
    assert len(complaints(dptrain=ours, peer=gpu_mlp.Row(losses=[0.2]))) == 1
    epsilon = {"PyTorch-graph": gpu_mlp.Row(check=[0.40, 0.21])}
    assert complaints(dptrain=ours, **epsilon) == []
    assert len(complaints(dptrain=ours, **{"PyTorch-graph": gpu_mlp.Row(check=[0.40, 0.23])})) == 1


def test_workers_that_hang_or_end(scripts):
    common, *_ = scripts
    started = time.monotonic()
    silent = common.WorkerProcess("silent", [sys.executable, "-c", "import time; time.sleep(600)"], quiet=True)
    with pytest.raises(common.WorkerTimeoutError, match="no answer within 1 s"):
        silent.ask("?", timeout=1)
    silent.close()
    code = "import sys; input(); print('why', file=sys.stderr); sys.exit(3)"
    ended = common.WorkerProcess("ended", [sys.executable, "-c", code], quiet=True)
    with pytest.raises(common.WorkerError, match="exit code 3: why"):
        ended.ask("?", timeout=60)
    ended.close()
    assert time.monotonic() - started < 60


@pytest.mark.long
def test_the_probe_runs_through(tmp_path):
    script = str(BENCHMARKS / "gpu_probe.py")
    finished = emulated(sys.executable, script, "--quick", "--out", str(tmp_path), PYTHONWARNINGS="")
    answers = json.loads((tmp_path / "gpu-probe.json").read_text())["answers"]
    bad = {name: answer for name, answer in answers.items() if answer["status"] in ("failed", "not asked", "no")}
    assert (finished.code, finished.err, bad) == (0, "", {})
    assert answers["cluster_16"]["status"] == answers["cluster_16_unset"]["status"] == "yes"
    assert answers["cluster_16"]["values"]["ranks"] == [*range(16), *range(16)]
    assert answers["graphs_by_ctypes"]["status"] == "yes"
    assert answers["resident_8_large"]["values"]["cuOccupancyMaxActiveClusters"] == 132 // 8
    assert set(_files(tmp_path)) == {"gpu-probe.md", "gpu-probe.json", "gpu-probe-sm_90.cubin"}


@pytest.mark.long
def test_a_barrier_of_too_many_blocks_ends(tmp_path):
    """The wait that would hang a GPU ends, and the answer says so."""
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu_probe; from pathlib import Path\n"
        f"gpu_probe.LIMIT = 100000\n"
        f"lab = gpu_probe.Lab(Path({str(tmp_path)!r}), True)\n"
        "function = lab.kernel('grid_barrier', 'PPPiiqPP')\n"
        "counter = lab.upload(lab.np.full(1, 2**32 - 8, 'uint32'))\n"  # the count runs over before it is reached
        "failed, values, clock, timer = lab.zeros(1), lab.zeros(4), lab.zeros(1, 'int64'), lab.zeros(1, 'uint64')\n"
        "lab.launch(function, 4, 32, counter, failed, values, 1000, 0, 100000, clock, timer)\n"
        "print(lab.read(failed, 1)[0]); del function, counter, failed, values, clock, timer; lab.close()\n"
    )
    finished = emulated(sys.executable, "-c", code, PYTHONWARNINGS="", EMULATOR_LEAKS="off")
    assert (finished.code, finished.out) == (0, "1\n"), finished.err


MACHINE = BENCHMARKS / "gpu_machine.sh"


def machine():
    """Return the environment in which the script compiles nothing that the tests above have compiled."""
    return {"PYTHON": sys.executable, "MACHINE_CACHE": os.environ["DPTRAIN_CACHE"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "options", "results"),
    [
        (
            "probe",
            {"PROBE_ARGUMENTS": "--quick --only machine,cluster_8"},
            {"probe": "probe/gpu-probe.json"},
        ),
        (
            "bench",
            {
                "QUICK": "--quick",
                "BENCH_ARGUMENTS": "--frameworks dptrain --hidden 16 --batch-sizes 50 --samples 430",
                "CONV_ARGUMENTS": "--samples 64 --rounds 1 --seconds 0.01 --works LeNet",
                "SWEEP_ARGUMENTS": "--frameworks dptrain --runs 3 --batch-sizes 50",
            },
            {
                "sweep": "sweep.json",
                "conv-bfloat16": "",
                "small": "gpu-mlp-small.json",
                "large": "gpu-mlp-large.json",
                **{f"conv-{precision}": "" for precision in ("float32", "tf32")},
            },
        ),
    ],
)
def test_a_stage_of_the_script(tmp_path, stage, options, results):
    finished = emulated("bash", str(MACHINE), stage, str(tmp_path), cwd=tmp_path, **machine(), **options)
    assert finished.code == 0, finished.out + finished.err
    for result in filter(None, results.values()):
        assert json.loads((tmp_path / result).read_text())
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [[step, "ok"] for step in results]
    assert lines[-1].startswith("-- 0 step(s) failed")
    page = (tmp_path / "page.md").read_text()
    assert "Nothing." in page.split("## What failed first")[1]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        names = archive.getnames()
    assert {f"./logs/{step}.log" for step in results} <= {*names}
    assert not any(name.startswith("./work") for name in names)
    if stage == "bench":
        assert re.search(r"gpu-mlp-small: samples/s, medians\n\n- float32, 784-16-10, batch 50: dptrain [\d,]+\n", page)
        assert re.search(r"\| LeNet \| [\d,]+ \| failed \| failed \|", page), "PyTorch has no emulated GPU"


@pytest.mark.long
def test_all_stages_share_their_time(tmp_path):
    """With a stand-in for Python, whose every step takes a second."""
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(
        '#!/bin/sh\ncase "$1" in *gpu_page.py) exit ;; esac\n'
        f'[ "$1" = - ] || echo "$@" >> {log}\nsleep "${{STEP:-0}}"\n'
    )
    stand_in.chmod(0o755)
    options = {"PYTHON": str(stand_in), "CUDA_HOME": None, "CUDA_ROOT": None}
    start = time.monotonic()
    short = run(["bash", str(MACHINE), "all", str(tmp_path / "short")], ALL_SECONDS="7", STEP="1", **options)
    assert time.monotonic() - start < 30
    assert short.code == 1
    lines = (tmp_path / "short" / "summary.txt").read_text().splitlines()
    assert lines[1].split()[:2] == ["smoke", "ok"]
    assert lines[-2].split()[:3] == ["probe", "NOT", "BEGUN:"]
    log.unlink()
    run(["bash", str(MACHINE), "all", str(tmp_path / "whole")], **options)
    steps = [line.split()[0] for line in (tmp_path / "whole" / "summary.txt").read_text().splitlines()[1:-1]]
    side_by_side = {"tests", "random-programs", "warm-small", "warm-large", "warm-kernels", "warm-tma"}
    in_order = [name for name in steps if name not in side_by_side and not name.startswith(("sanitize", "="))]
    benches = ["sweep", "conv-bfloat16", "small", "large", "conv-float32", "conv-tf32"]
    assert in_order == ["smoke", "kernels", "tma", *benches, "probe"]
    assert side_by_side < {*steps}
    minutes = re.findall(r"--minutes ([\d.]+)(?!.*(?:no-kernels|fuzz))", log.read_text())
    assert len(minutes) >= 8
    assert sum(map(float, minutes)) < 7.5


@pytest.mark.long
def test_nothing_begins_after_a_smoke_test_that_fails(tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\ncase "$1" in *gpu_smoke.py) exit 1 ;; esac\n')
    stand_in.chmod(0o755)
    options = {"PYTHON": str(stand_in), "CUDA_HOME": None, "CUDA_ROOT": None}
    assert run(["bash", str(MACHINE), "all", str(tmp_path)], **options).code == 1
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert lines[1].split()[:2] == ["smoke", "FAILED"]
    assert lines[2:] == ["smoke failed: nothing else begins", f"-- 1 step(s) failed; logs and results in {tmp_path}"]


@pytest.mark.slow
@pytest.mark.long
def test_the_day_is_rehearsed(tmp_path):
    """Every stage with the day's arguments; nvcc, where it is, compiles the kernels in tests of their own."""
    options = {**machine(), "CHECK_ARGUMENTS": "-k snapshots or graphs", "CUDA_HOME": None}
    frameworks = {"BENCH_ARGUMENTS": "--frameworks dptrain", "SWEEP_ARGUMENTS": "--frameworks dptrain"}
    finished = emulated(
        "bash", str(MACHINE), "rehearse", str(tmp_path), timeout=1800, cwd=tmp_path, **options, **frameworks
    )
    assert finished.code == 0, finished.out + finished.err
    assert "7 of 7 checks passed" in (tmp_path / "logs" / "smoke.log").read_text()
    assert "## Steps, predicted and measured: us" in (tmp_path / "page.md").read_text()


@pytest.mark.long
def test_kernels_are_timed_beside_what_is_predicted(tmp_path):
    output = tmp_path / "kernels.md"
    command = [sys.executable, str(BENCHMARKS / "gpu_kernels.py"), "--quick", "--output", str(output)]
    finished = emulated(*command, PYTHONWARNINGS="", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'standins'}")
    assert (finished.code, finished.err) == (0, "")
    text = output.read_text()
    assert "On the emulated driver" in text
    tables = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    assert len(tables) == 2
    for table in tables:
        head, *rows, step, _ = table.splitlines()
        assert head.split()[-2:] == ["H200", "here"]
        durations = [float(row.split()[-1]) for row in rows]
        assert min(durations) > 0
        assert float(step.split()[-1]) == pytest.approx(sum(durations), abs=1)
    assert len(re.findall(r"A step in a graph takes [\d.]+ \(", text)) == 2
    # By our kernels, and by stand-ins for the libraries.
    measured = r" \| [\d.]+ \([^|]+ Tflop/s"
    assert len(re.findall(rf"\| (?:product|convolution) [\d x]+ \| \w+{measured}{measured}", text)) == 2


@pytest.mark.long
def test_products_by_tensor_maps_are_checked_and_timed_in_processes_of_their_own(tmp_path):
    output = tmp_path / "tma.md"
    command = [sys.executable, str(BENCHMARKS / "gpu_tma.py"), "--quick", "--rounds", "1", "--output", str(output)]
    finished = emulated(*command, PYTHONWARNINGS="")
    assert finished.code == 0, finished.out + finished.err
    records = json.loads(output.with_suffix(".json").read_text())
    assert len(records) == 5
    for record in records.values():
        assert record["worst"] < 1e-6
        assert len(record["times"]) == 2, "a product and a step"
        assert all({"tensor maps", "product_wgmma"} <= {*times} for times in record["times"].values())
    assert "5 of 5 schedules are right" in finished.out
    other = emulated(*command, PYTHONWARNINGS="", EMULATOR_CAPABILITY="8.0")
    assert (other.code, other.out.count("\n")) == (1, 1), other.out
    assert "not of compute capability 9.0" in other.out


@pytest.mark.parametrize("script", ["gpu_kernels.py", "gpu_tma.py"])
def test_without_a_gpu_kernels_are_one_line(script):
    finished = run(
        [sys.executable, str(BENCHMARKS / script)],
        PYTHONPATH=f"{ROOT / 'tests' / 'without_gpu'}{os.pathsep}{ROOT}",
        PYTHONWARNINGS="",
    )
    (line,) = finished.out.splitlines()
    assert (finished.code, finished.err) == (1, "")
    assert line.startswith(f"{script} measures nothing here: PyCUDA is not installed")


@pytest.mark.long
def test_a_script_that_fails_or_cannot_begin(tmp_path):
    options = {
        **machine(),
        "BENCH_ARGUMENTS": "--hidden nonsense",
        "CONV_ARGUMENTS": "--help",
        "SWEEP_ARGUMENTS": "--help",
    }
    failed = emulated("bash", str(MACHINE), "bench", str(tmp_path / "a"), **options)
    assert failed.code == 1
    lines = (tmp_path / "a" / "summary.txt").read_text().splitlines()
    assert lines[3].split()[0] == "small"
    assert "FAILED (2)" in lines[3]
    assert any(line.split()[:2] == ["conv-float32", "ok"] for line in lines), "one that fails does not stop the next"
    wrong = run(["bash", str(MACHINE), "everything", str(tmp_path / "b")])
    assert (wrong.code, wrong.err) == (
        2,
        "unknown stage 'everything': one of smoke check kernels bench probe all rehearse\n",
    )
    assert not (tmp_path / "b").exists()
    (tmp_path / "pycuda.py").write_text("raise ImportError('no libcuda.so.1')")
    blind = run(
        ["bash", str(MACHINE), "probe", str(tmp_path / "c")],
        PYTHON=sys.executable,
        PYTHONPATH=str(tmp_path),
        PYTHONWARNINGS="",
    )
    assert blind.code == 2, blind.out + blind.err
    assert "CANNOT BEGIN: ImportError: no libcuda.so.1" in blind.out


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
