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
    """A launch that was, or should have been, killed."""

    ranks: int
    form: str  # of the training
    kind: str  # "a step", "a save" or "all"
    hit: bool  # it was killed
    newest: int  # steps of its newest checkpoint, -1 for none


def train(folder: Path, ranks: int, form: str, planted: str = "", kill_after: float | None = None) -> int:
    """Train to the end or the kill, and return the exit code; out.npz lies beside the checkpoints.

    `planted`: the script's PLANTED; `kill_after`: seconds from the first checkpoint to the kill of all ranks.
    """
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), sys.executable, str(SCRIPT)]
    arguments = [str(folder / "checkpoints"), str(folder / "out.npz"), str(EPOCHS), form]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DPTRAIN_STALL_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}
    environment |= {"PLANTED": planted} if planted else {}
    with (folder / "err.txt").open("w") as err:
        process = subprocess.Popen(
            [*command, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
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
    """Return the newest checkpoint's step, -1 for none, after reading every array of all checkpoints."""
    saved = [checkpoints.read(folder / "checkpoints" / name) for name in names(folder)]
    for checkpoint in saved:
        with checkpoint.open() as opened:
            for array in checkpoint.manifest.arrays.values():
                read_part(opened, array, (0,) * len(array.shape), array.shape)
    return max((checkpoint.manifest.step for checkpoint in saved), default=-1)


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
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


def disturbed(rng: random.Random, expected: dict[str, np.ndarray], kills: int) -> tuple[list[Kill], float]:
    """Return a training's kills, and its largest difference from the undisturbed one, relative to each array's maximum.

    AssertionError: a checkpoint was lost, or a launch failed without a kill; DataError: a checkpoint is damaged.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, planned_kills, last = Path(name), list[Kill](), -1
        forms = [rng.choice(FORMS)]
        while len(forms) <= kills:
            forms.append(rng.choice([form for form in FORMS if form != forms[-1]]))
        for form in forms[:-1]:
            planned_kills.append(killed(folder, rng, form))
            assert planned_kills[-1].newest >= last, f"{planned_kills}: step {last} was there"
            last = planned_kills[-1].newest
        code = train(folder, *forms[-1])
        assert code == 0, f"{planned_kills}, then {forms[-1]}: exit code {code}: {(folder / 'err.txt').read_text()}"
        result = outcome(folder)
        assert result.keys() == expected.keys()
        differences = [
            float(np.abs(result[key] - array).max() / max(np.abs(array).max(), 1e-300))
            for key, array in expected.items()
        ]
        return planned_kills, max(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    report = Report()
    report.add("# Kills and resumes on other meshes", "", machine_line(), f"- {versions(['numpy', 'mpi4py', 'mpich'])}")
    report.add(f"- `python benchmarks/mesh_kills.py --kills {options.kills} --seed {options.seed}`", "")
    expected, rng = undisturbed(), random.Random(options.seed)
    all_kills, most, trainings = list[Kill](), 0.0, 0
    while sum(kill.hit for kill in all_kills) < options.kills:
        kills, difference = disturbed(rng, expected, rng.randint(1, MOST))
        all_kills, most, trainings = all_kills + kills, max(most, difference), trainings + 1
        print(f"{sum(kill.hit for kill in all_kills)} kills, {most:.1e}", file=sys.stderr, flush=True)
    hits = Counter((kill.ranks, kill.form or "data parallel", kill.kind) for kill in all_kills if kill.hit)
    kinds = ("a step", "a save", "all")
    report.add("| ranks | form | one rank at a step | one rank in a save | all ranks |", "|---|---|---|---|---|")
    for ranks, form in sorted({key[:2] for key in hits}):
        report.add(f"| {ranks} | {form} | {' | '.join(str(hits[ranks, form, kind]) for kind in kinds)} |")
    total = sum(hits.values())
    early = sum(kill.newest < 0 for kill in all_kills if kill.hit)
    report.add(
        "",
        f"{total} kills of {trainings} trainings, {early} of them before the first checkpoint was there; "
        f"{len(all_kills) - total} launches ended before their kill. No checkpoint was lost or damaged. Weights, slots "
        f"and counts at the end differ from those of an undisturbed training on one rank by at most {most:.1e}.",
    )
    if options.output:
        report.save(options.output)
    return int(most > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
