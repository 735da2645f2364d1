"""Kills trainings with sharded variables at random moments, and goes on with each on another mesh.

    python benchmarks/mesh_kills.py --kills 30 --output benchmarks/results/mesh-kills_HARDWARE_DATE.md

A training of `tests/mpi/scripts/checkpoints.py` saves every second step. One rank is killed (SIGKILL) at a random step
or at a random call to the file system in a save, or all ranks and mpirun at a random moment. Then every checkpoint of
a final name must be whole, and no older one the newest; another form of training goes on. After `MOST` kills at most it
comes to its end, and its weights must be those of a training that nobody disturbed, to 1e-12.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import Report, machine_line, versions

from dptrain.saving import checkpoints
from dptrain.saving.parts import read_part

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests/mpi/scripts/checkpoints.py"
# Ranks, and how variables are divided among them.
FORMS = (
    *((1, ""), (2, ""), (3, ""), (4, ""), (2, "--shard-optimizer"), (3, "--shard-optimizer"), (3, "--shard-weights")),
    *((4, "--shard-weights"), (4, "batch=2,model=2"), (4, "batch=2,model=2 --shard-weights"), (4, "batch=1,model=4")),
)
# Kills of one training; epochs of three steps; seconds that a launch may take.
MOST, EPOCHS, LIMIT = 3, 12, 120
# What every rank calls that writes, and rank 0 beside it.
CALLS, OF_RANK_0 = ("open", "write", "fsync"), ("mkdir", "rename", "unlink")


@dataclass(frozen=True)
class Kill:
    """A launch that was killed, or was to be.

    Attributes:
        ranks: of the launch.
        form: of the launch.
        kind: "a step", "a save", "all".
        hit: whether it was killed.
        newest: steps of the newest checkpoint that it left, -1 for none.
    """

    ranks: int
    form: str
    kind: str
    hit: bool
    newest: int


def train(folder: Path, ranks: int, form: str, planted: str = "", kill_after: float | None = None) -> int:
    """Train to the end, or until it is killed; return the exit code.

    Args:
        folder: of the checkpoints; beside it comes out.npz.
        ranks: how many.
        form: of the training.
        planted: as the script's PLANTED.
        kill_after: seconds after the first checkpoint after which all ranks are killed.
    """
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), sys.executable, str(SCRIPT)]
    given = [str(folder / "checkpoints"), str(folder / "out.npz"), str(EPOCHS), form]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DPTRAIN_STALL_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}
    environment |= {"PLANTED": planted} if planted else {}
    with (folder / "err.txt").open("w") as err:
        process = subprocess.Popen(
            [*command, *given], env=environment, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
        )
    before, until = names(folder), time.monotonic() + LIMIT
    try:
        while kill_after is not None and process.poll() is None and names(folder) == before:
            time.sleep(0.002)
        process.wait(LIMIT if kill_after is None else kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(until - time.monotonic())
    return process.returncode


def names(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are there, in order."""
    return sorted(path.name for path in (folder / "checkpoints").glob("0*"))


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, -1 for none, once all were read, every array of them.

    Raises:
        DataError: one is not whole.
    """
    found = [checkpoints.read(folder / "checkpoints" / name) for name in names(folder)]
    for one in found:
        with one.open() as opened:
            for array in one.manifest.arrays.values():
                read_part(opened, array, (0,) * len(array.shape), array.shape)
    return max((one.manifest.step for one in found), default=-1)


def killed(folder: Path, rng: random.Random, form: tuple[int, str]) -> Kill:
    """Go on with a training, and kill it."""
    ranks, flags = form
    kind = rng.choice(("a step", "a save", "a save", "all"))
    rank = rng.randrange(ranks)
    planted, after = "", None
    if kind == "a step":
        planted = f"{rank} step {rng.randrange(2, 13)}"
    elif kind == "a save":  # where nothing is sharded, rank 0 alone writes
        rank = rank if flags else 0
        planted = f"{rank} {rng.choice(CALLS if rank else CALLS + OF_RANK_0)} {rng.randrange(3, 18)}"
    else:
        after = rng.uniform(0, 0.4)
    code = train(folder, ranks, flags, planted, after)
    return Kill(ranks, flags, kind, code != 0, newest(folder))


def undisturbed() -> dict[str, np.ndarray]:
    """Return what a training on one rank ends with."""
    with tempfile.TemporaryDirectory() as name:
        assert train(Path(name), 1, "") == 0
        return outcome(Path(name))


def outcome(folder: Path) -> dict[str, np.ndarray]:
    """Return what a training has ended with."""
    with np.load(folder / "out.npz") as found:
        return dict(found)


def disturbed(rng: random.Random, expected: dict[str, np.ndarray], kills: int) -> tuple[list[Kill], float]:
    """Return kills of one training, and how far from the undisturbed one it ended: relative to each array's largest.

    Raises:
        AssertionError: a checkpoint was lost, or a launch failed that nobody has killed.
        DataError: a checkpoint is not whole.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, found, last = Path(name), list[Kill](), -1
        forms = [rng.choice(FORMS)]
        while len(forms) <= kills:
            forms.append(rng.choice([one for one in FORMS if one != forms[-1]]))
        for form in forms[:-1]:
            found.append(killed(folder, rng, form))
            assert found[-1].newest >= last, f"{found}: step {last} was there"
            last = found[-1].newest
        code = train(folder, *forms[-1])
        assert code == 0, f"{found}, then {forms[-1]}: exit code {code}: {(folder / 'err.txt').read_text()}"
        made = outcome(folder)
        assert made.keys() == expected.keys()
        differences = [
            float(np.abs(made[key] - one).max() / max(np.abs(one).max(), 1e-300)) for key, one in expected.items()
        ]
        return found, max(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    report = Report()
    report.add("# Kills and resumes on other meshes", "", machine_line(), f"- {versions(['numpy', 'mpi4py', 'mpich'])}")
    report.add(f"- `python benchmarks/mesh_kills.py --kills {given.kills} --seed {given.seed}`", "")
    expected, rng = undisturbed(), random.Random(given.seed)
    found, most, trainings = list[Kill](), 0.0, 0
    while sum(one.hit for one in found) < given.kills:
        kills, difference = disturbed(rng, expected, rng.randint(1, MOST))
        found, most, trainings = found + kills, max(most, difference), trainings + 1
        print(f"{sum(one.hit for one in found)} kills, {most:.1e}", file=sys.stderr, flush=True)
    hits = Counter((one.ranks, one.form or "data parallel", one.kind) for one in found if one.hit)
    kinds = ("a step", "a save", "all")
    report.add("| ranks | form | one rank at a step | one rank in a save | all ranks |", "|---|---|---|---|---|")
    for ranks, form in sorted({key[:2] for key in hits}):
        report.add(f"| {ranks} | {form} | {' | '.join(str(hits[ranks, form, kind]) for kind in kinds)} |")
    total = sum(hits.values())
    early = sum(one.newest < 0 for one in found if one.hit)
    report.add(
        "",
        f"{total} kills of {trainings} trainings, {early} of them before the first checkpoint was there; "
        f"{len(found) - total} launches ended before their kill. No checkpoint was lost or damaged. Weights, slots and "
        f"counts at the end differ from those of an undisturbed training on one rank by at most {most:.1e}.",
    )
    if given.output:
        report.save(given.output)
    return int(most > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
