"""Independent-run mode on CUDA (emulated): packs, the data once, the bits of each run alone."""

import json

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "sweep_on_cuda.py")
RUNS = ("--seeds", "0-2", "--grid", "hidden=5,8", "--dropout", "0.25", "--epochs", "2", "--batch-size", "64")
CUDA = ("--device", "cuda", "--verbose", "0")


def results(path, run=None):
    lines = (path / "results.jsonl").read_text().splitlines()
    return sorted(line for line in lines if run is None or json.loads(line)["run"] == run)


@pytest.fixture(scope="module")
def tiny_npz(tmp_path_factory):
    import numpy as np

    from dptrain.data.strokes import generate

    x_train, y_train, x_test, y_test = generate(200, 70)
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(path)


@pytest.fixture(scope="module")
def alone():
    """Return a function that trains a sweep's configuration as one run; returns its epochs."""
    kept: dict[str, list[dict]] = {}

    def alone(sweep) -> list[dict]:
        lines = (sweep / "config.yaml").read_text().splitlines()
        config = "\n".join(line for line in lines if not line.startswith("out: "))
        if config not in kept:
            out = sweep.parent / "alone"
            done = emulated_ranks(
                *(0, "-m", "dptrain", "--config", str(sweep / "config.yaml"), "--seed", "1", "--hidden", "8"),
                *("--out", str(out), "--verbose", "0"),
            )
            assert (done.code, done.err) == (0, "")
            kept[config] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return kept[config]

    return alone


@pytest.mark.long  # of packs themselves: tests/ops/test_packs_on_cuda.py
@pytest.mark.parametrize(("ranks", "places", "more"), [(2, 2, {}), (0, 6, {"EMULATOR_STREAMS": "random"})])
def test_runs_have_the_bits_of_runs_alone(tiny_npz, alone, tmp_path, ranks, places, more):
    out = tmp_path / "s"
    arguments = ("-m", "dptrain", "sweep", *RUNS, *CUDA, "--data", tiny_npz, "--runs-per-device", str(places))
    done = emulated_ranks(ranks, *arguments, "--out", str(out), EMULATOR_DEVICES=str(max(ranks, 1)), **more)
    assert (done.code, done.out, done.err) == (0, "", "")
    expected = alone(out)
    epochs = [json.loads(line) for line in results(out, run=4)]
    keys = ("loss", "accuracy", "val_loss", "val_accuracy")
    assert [[epoch[key] for key in keys] for epoch in epochs] == [[epoch[key] for key in keys] for epoch in expected]
    assert len(results(out)) == 12


@pytest.mark.long
def test_runs_side_by_side_under_every_check(tiny_npz, tmp_path):
    arguments = ("-m", "dptrain", "sweep", *RUNS, *CUDA, "--data", tiny_npz, "--runs-per-device", "3", "--fast-dev-run")
    done = emulated_ranks(0, *arguments, "--out", str(tmp_path / "s"), EMULATOR_SANITIZE="all")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.long
def test_runs_in_packs_whose_members_change(tmp_path):
    """Runs end early or diverge, others take their places, and numbers differ: each has the bits of the run alone."""
    options = {"EMULATOR_STREAMS": "random", "EMULATOR_ORDER": "shuffled"}
    done = emulated_ranks(0, str(ROOT / "tests" / "e2e" / "scripts" / "sweep_in_packs.py"), **options)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["statuses"] == ["done"] * 8 + ["diverged"] * 4
    assert facts["differing"] == {"two packs": [], "alone": [], "streams": []}
    assert {"2", "3", "5"} <= facts["sizes"]["packs"].keys()
    assert {"2", "3"} <= facts["sizes"]["two packs"].keys() <= {"1", "2", "3"}
    assert facts["chosen"] == [2]
    assert facts["sizes"]["measured"]["1"] > 50
    assert facts["sizes"]["alone"].keys() == facts["sizes"]["streams"].keys() == {"1"}


@pytest.mark.long
def test_the_data_are_on_the_gpu_once_and_memory_comes_back(tiny_npz):
    done = emulated_ranks(0, SCRIPT, tiny_npz)
    assert (done.code, done.err) == (0, "")
    assert done.out == "once\n"


@pytest.mark.long
def test_more_runs_than_the_memory_holds(tiny_npz, tmp_path):
    """Runs that do not fit beside others are trained when these have ended."""
    arguments = ("-m", "dptrain", "sweep", "--seeds", "0-3", "--hidden", "400", "--epochs", "1", "--device", "cuda")
    done = emulated_ranks(
        *(0, *arguments, "--data", tiny_npz, "--runs-per-device", "4", "--out", str(tmp_path / "s"), "--fast-dev-run"),
        EMULATOR_MEMORY=str(9 << 20),
    )
    assert (done.code, done.err) == (0, "")
    assert "rank 0: no memory for more than 1 run at a time; run 1 is trained later" in done.out
    assert len(results(tmp_path / "s")) == 2


@pytest.mark.long
def test_sparse_runs_in_a_pack_have_the_bits_of_runs_alone(tiny_npz, tmp_path):
    """Masks are variables: runs of other sparsities share a program, and each is masked by its own weights."""
    sparse = (
        "--data",
        tiny_npz,
        "--epochs",
        "2",
        "--batch-size",
        "64",
        "--hidden",
        "5",
        "--pruning.frequency",
        "2",
        *CUDA,
    )
    out, alone = tmp_path / "s", tmp_path / "alone"
    grid = ("--seeds", "0-1", "--grid", "prune=0.5,0.75", "--runs-per-device", "4", "--out", str(out))
    done = emulated_ranks(0, "-m", "dptrain", "sweep", *sparse, *grid)
    assert (done.code, done.out, done.err) == (0, "", "")
    done = emulated_ranks(0, "-m", "dptrain", *sparse, "--prune", "0.75", "--seed", "1", "--out", str(alone))
    assert (done.code, done.out, done.err) == (0, "", "")
    keys = ("loss", "accuracy", "val_loss", "val_accuracy", "sparsity")
    epochs = [json.loads(line) for line in results(out, run=3)]
    expected = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert [[epoch[key] for key in keys] for epoch in epochs] == [[epoch[key] for key in keys] for epoch in expected]
    assert epochs[-1]["sparsity"] == pytest.approx(0.75, abs=0.01)
