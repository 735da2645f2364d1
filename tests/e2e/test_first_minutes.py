"""What a newcomer, a teacher and an administrator of a cluster type in their first minutes.

Others have files of their own: data scientists (test_tables.py, test_pictures.py), researchers (test_own_model.py,
test_sweep_command.py), and engineers who serve models (test_serving.py).
"""

import json
import os
import re
import sys

import pytest

from dptrain.version import __version__
from tests.conftest import ROOT
from tests.launching import Finished, dptrain, find_mpirun, python, when_ready

WITHOUT_GPU = ROOT / "tests" / "without_gpu"
PRINT = """
found = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
if dp.rank() == 0:
    print("accuracy", found["accuracy"], model.predict(x_test[:3]).argmax(-1).tolist() if dp.world_size() == 1 else "")
"""


def readme_script() -> str:
    """Return the script that README shows, with two epochs."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "epochs=5" in code
    return code.replace("epochs=5", "epochs=2, verbose=0")


@pytest.mark.slow
def test_a_newcomer_runs_the_script_of_the_readme_alone_and_on_two_ranks(mnist_dir, tmp_path):
    accuracies = {}
    for ranks in (0, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "script.py").write_text(readme_script() + PRINT)
        environment = {"DPTRAIN_DATA": str(mnist_dir.parent), "PYTHONPATH": str(ROOT)}
        done = python(ranks, "script.py", cwd=folder, timeout=120, fresh=True, **environment)
        assert (done.code, done.err) == (0, "")
        assert (folder / "model.keras").exists()
        accuracies[ranks] = float(re.findall(r"accuracy ([0-9.]+)", done.out)[0])
        assert ranks or "[7, 2, 1]" in done.out, "the first three digits of the test set"
    assert accuracies[0] > 0.95
    assert accuracies[2] == pytest.approx(accuracies[0], abs=1e-3)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--lr", "0.01"], "did you mean '--learning-rate'?"),
        (["trian"], "did you mean 'train'?"),
        (["--data", "mnits"], "did you mean 'mnist'?"),
        (["--epochs", "many"], "train.epochs = 'many', set on the command line"),
        (["script.py"], "python -m dptrain launch -n 4 -- python script.py runs a script"),
        (["predict", "runs/none"], "runs/none: not found"),
    ],
)
def test_a_newcomers_slips_are_answered_in_one_line(typed, answer, tmp_path):
    done = dptrain(0, *typed, cwd=tmp_path)
    assert done.code in (2, 65)
    assert done.out in ("", f"dptrain {__version__}: loading {typed[-1]}\n")
    (line,) = done.err.splitlines()
    assert line.startswith("dptrain: ")
    assert answer in line


def test_a_teacher_shows_what_a_step_computes():
    model = ["--hidden", "4", "--input-shape", "3", "--classes", "2"]
    done = dptrain(0, "explain", *model, "--kernels", "--code", fresh=True)
    assert (done.code, done.err) == (0, "")
    groups = re.findall(r"^(forward|backward|update|messages): (\d+) ops", done.out, re.MULTILINE)
    assert [name for name, _ in groups] == ["forward", "backward", "update", "messages"]
    (total,) = re.findall(r"^(\d+) ops, ", done.out, re.MULTILINE)
    assert sum(int(number) for _, number in groups) == int(total)
    table = done.out[: done.out.index("kernels after fusion")]
    assert max(map(len, table.splitlines())) <= 100
    assert "batch_matmul(%4, dense/kernel)" in table
    assert "dp_product_float" in done.out or "extern" in done.out, "the generated C++"


def test_a_lab_asks_whether_more_gpus_would_pay(tmp_path):
    """Before anybody has one: no GPU, no PyCUDA."""
    options = ["--device", "cuda", "--node-gpus", "8", "--network", "200Gb", "--batch-size", "1024"]
    done = dptrain(0, "explain", "--ranks", "1-1024", *options, fresh=True, PYTHONPATH=str(WITHOUT_GPU))
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    assert len(re.findall(r"^ +(?:1|2|4|8|16|32|64|128|256|512|1024)  +\d.*%", done.out, re.M)) == 6 * 11
    words = " ".join(done.out.split())
    assert re.search(r"Use (one rank|up to \d+ ranks): ", words)
    assert "for one training gain nothing: " in words
    assert "Independent runs use them better: a sweep of 1024 runs (seeds, settings), each on 1 rank" in words
    for wrong, message in {
        "0": "expected a range of integers >= 1",
        "8-1": "expected the smaller number first",
    }.items():
        refused = dptrain(0, "explain", "--ranks", wrong)
        assert (refused.code, refused.out) == (2, "")
        (line,) = refused.err.splitlines()
        assert message in line


def test_a_researcher_asks_what_a_step_would_cost_on_a_gpu(tmp_path):
    """On a machine that has no GPU, no PyCUDA and no nvcc that works."""
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    where = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(WITHOUT_GPU)}
    options = ["--device", "cuda", "--kernels", "--hidden", "128", "--batch-size", "1024"]
    done = dptrain(0, "explain", *options, fresh=True, **where)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    _, _, costs = done.out.partition("\ncosts, predicted by a roofline model, not measured; registers not known")
    kernels = re.findall(
        r"^ *\d+ +\d+ +\d+ +[\d.k-]+ +- +- +\d+ +(\S+) +(\S+) +(\S+)( +[\d.]+ [LMBFTH]){3}$", costs, re.M
    )
    assert str(len(kernels)) == re.search(r"(\d+) kernels after fusion, on a GPU", done.out)[1]
    assert "206M" in [operations for _, _, operations, _ in kernels], "2 x 1024 x 784 x 128 of the first layer"
    assert re.search(r"^step( +[\d.]+){3}$", costs, re.M)
    assert re.search(r"^steps/s( +[\d,]+){3}$", costs, re.M)


@pytest.mark.long
def test_an_administrator_tries_a_job_stops_it_and_starts_it_again(small_npz, tmp_path):
    healthy = dptrain(2, "doctor", timeout=90, fresh=True)
    assert healthy.code == 0, healthy.out
    assert "\n  !! " not in healthy.out, "what is in the way"
    out = tmp_path / "run"
    options = ["--data", str(small_npz), "--epochs", "30", "--out", str(out), "--progress", "lines"]
    options += ["--checkpoint-every", "600s", "--batch-size", "8"]  # slow enough to be stopped
    command = [find_mpirun(), "-n", "2", sys.executable, "-m", "dptrain", *options]
    code, err = when_ready(command, "Epoch 1/30", lambda process, lines: process.terminate(), tmp_path)
    assert code == 75
    assert f"start again with --out {out}" in err
    assert state(dptrain(0, "runs", str(tmp_path), "--json", fresh=True)) == "interrupted"
    again = dptrain(2, *options, timeout=90)
    assert again.code == 0, again.err
    assert "Resuming from step " in again.out
    assert state(dptrain(0, "runs", str(tmp_path), "--json")) == "finished"


def state(done: Finished) -> str:
    """Return the state of the only run that `runs --json` prints."""
    assert (done.code, done.err) == (0, "")
    (run,) = json.loads(done.out)["runs"]
    return str(run["state"])
