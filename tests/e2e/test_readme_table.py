"""README's table, row by row, with what README's own install command installs and nothing else."""

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas
import pytest
from packaging.requirements import Requirement

from tests.conftest import MNIST, ROOT
from tests.e2e.test_users import write_data
from tests.launching import completed, run
from tests.sample import sample

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("| to | type |\n|---|---|\n")[2].partition("\n\n")[0]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", TABLE, re.MULTILINE))
EXTRAS = re.findall(r"pip install -q -e '\.\[([\w,]+)\]'", README)[0].split(",")
COMMANDS = [matched[1] for text in ROWS.values() if (matched := re.match(r"`python -m dptrain ?([^`]*)`", text))]
# Ends when it is told to; the others end by themselves.
SERVES = next(words for words in COMMANDS if words.startswith("serve "))
COMMANDS.remove(SERVES)
# As if distributions that the install command does not bring were not there.
BLOCKING = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED: raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def installed(requirement: Requirement, names: set[tuple[str, str]]) -> None:
    """Add the distributions that a requirement brings, with the extras that they are asked for, to those known."""
    for extra in ("", *requirement.extras):
        key = re.sub(r"[-_.]+", "-", requirement.name).lower(), extra
        if key in names:
            continue
        names.add(key)
        try:
            needed = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for dependency in map(Requirement, needed):
            if dependency.marker is None or dependency.marker.evaluate({"extra": extra}):
                installed(dependency, names)


@pytest.fixture(scope="module")
def only_installed(tmp_path_factory) -> Path:
    """A folder that hides, in front on PYTHONPATH, what README's install command does not install."""
    distributions: set[tuple[str, str]] = set()
    installed(Requirement(f"dptrain[{','.join(EXTRAS)}]"), distributions)
    names = {name for name, _ in distributions} | {"dptrain"}
    blocked = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not names & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
    }
    assert {"pandas", "PIL", "matplotlib", "scipy", "yaml", "h5py"}.isdisjoint(blocked)
    assert {"keras", "onnx", "optuna", "tensorboardX"} & blocked, "tests have more installed than a user"
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {blocked!r}\n{BLOCKING}")
    return folder


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    """A user's folder: data, a model, and a run."""
    folder = tmp_path_factory.mktemp("user")
    write_data(folder)
    (folder / "new.csv").write_text("area,rooms,town\n0.1,0.2,Rome\n0.3,-0.2,Lima\n")
    (folder / "corpus").mkdir()
    for shard in range(2):  # half of the rows each
        part = pandas.DataFrame({"x": np.arange(shard, 200, 2) / 200.0, "y": np.arange(shard, 200, 2) % 3})
        part.to_parquet(folder / "corpus" / f"{shard}.parquet")
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (folder / "models.py").write_text(page.partition("```python\n# models.py\n")[2].partition("```")[0])
    return folder


def typed(folder: Path, hidden: Path, words: str) -> str:
    """Return what a command prints that succeeds."""
    environment = {"PYTHONPATH": f"{hidden}:{ROOT}", "PYTHONWARNINGS": None, "DPTRAIN_DATA": str(MNIST.parent)}
    done = run([sys.executable, "-m", "dptrain", *shlex.split(words)], cwd=folder, timeout=300, **environment)
    assert (done.code, done.messages) == (0, []), f"{words}\n{done.out[-1000:]}{done.err[-1000:]}"
    assert "Traceback" not in done.err
    return done.out


def test_the_table_is_read_whole():
    assert len(ROWS) == TABLE.count("\n") + 1 >= 10
    others = [text for text in ROWS.values() if not text.startswith("`python -m dptrain")]
    resumes, generates = others
    assert resumes == "the same command with the same `--out` ([checkpoints](docs/training.md#checkpoints))"
    assert generates.startswith("`model.generate(prompt, 50, top_p=0.9)` in Python, `POST /generate` as a stream (")


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("words", sample(COMMANDS, 5))
def test_a_row_runs_as_it_stands(user, only_installed, words):
    if "--data mnist" in words and not MNIST.is_dir():
        words = words.replace("--data mnist", "--data strokes")  # of the same shape, and in need of no download
    if "runs/X" in words and not (user / "runs" / "X").exists():
        typed(user, only_installed, "--data houses.csv --target price --epochs 1 --out runs/X")
    printed = typed(user, only_installed, words)
    if "predictions.csv" in words:
        assert (user / "predictions.csv").read_text().count("\n") == 3
    else:
        assert printed


@pytest.mark.long
@pytest.mark.slow
def test_a_model_is_served_until_a_signal(user, only_installed):
    if not (user / "runs" / "X").exists():
        typed(user, only_installed, "--data houses.csv --target price --epochs 1 --out runs/X")
    environment = completed({"PYTHONPATH": f"{only_installed}:{ROOT}", "PYTHONWARNINGS": None})
    command = [sys.executable, "-m", "dptrain", *shlex.split(SERVES), "--port", "0"]
    with subprocess.Popen(command, cwd=user, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            body = b'[{"area": 0.1, "rooms": 0.2, "town": "Rome"}]'
            with urllib.request.urlopen(f"{url}/predict", body, timeout=100) as response:
                assert [*json.load(response)["predictions"][0]] == ["price"]
            process.terminate()
            assert process.wait(100) == 0
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.long
def test_the_same_command_with_the_same_out_goes_on(user, only_installed):
    """After a kill -9, once an epoch is saved."""
    (words,) = (words for words in COMMANDS if "houses.csv" in words)
    command = f"{words} --out runs/killed --epochs"
    metrics = user / "runs" / "killed" / "metrics.jsonl"
    environment = completed({"PYTHONPATH": f"{only_installed}:{ROOT}", "PYTHONWARNINGS": None})
    process = subprocess.Popen(
        [sys.executable, "-m", "dptrain", *shlex.split(command), "100000"],
        cwd=user,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert "Resuming from" in typed(user, only_installed, f"{command} {metrics.read_text().count(chr(10)) + 20}")
