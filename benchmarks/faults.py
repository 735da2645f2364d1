"""Planted faults: does every job end, with an exit code that says so and a line that names the culprit?

    python benchmarks/faults.py --count 300 --output benchmarks/results/faults_HARDWARE_DATE.md
    python benchmarks/faults.py --count 200 --ends       # ranks that do not end, files that fail, hidden errors
    python benchmarks/faults.py --only 17                # fault 17 of this seed alone, with all that its job prints
    python benchmarks/faults.py --count 0 --kills 200    # kills with resume alone
    python benchmarks/faults.py --count 0 --sweep-kills 100

Each fault is drawn from `--seed` and its number: what happens (`FAULTS`, by weight), when, on which rank, and how many
ranks there are; with `--ends` one of `ENDS`. The job is a small script with checkpoints, two trainings, a file that is
saved and an evaluation; one with `--help` on one rank and signals before the first step are `python -m dptrain`. Every
job has a time limit, after which it counts as hung and is killed. The file that is saved needs the extra keras-files.

A kill is `kill -9` of all processes of a `python -m dptrain --out DIR` on 1 or 2 ranks at a random moment, start-up and
resume included. The same command is started again until it ends; weights and metrics are then compared, bit for bit,
with those of a training that nobody disturbed. `--sweep-kills` does so with `python -m dptrain sweep`, several runs at
once in threads or in packs: epochs, the table of trials, the models that are kept and what they make of the test set
must be the same, and no line of the journal may be lost. Where several runs at once are halved, who goes on from a rung
depends on who gets there first: then all that is trained must be as in a sweep that trains everything to the end.
"""

import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from common import Report, command_line, end_tree, machine_line, versions
from fault_job import BEFORE, EVERY, FAULTS, LIMIT, SMALL, STALL, Fault, draw

from dptrain.runtime.launch.mpirun import Launcher, find_launcher, start_command

# What dptrain says where it has killed an mpirun (Open MPI's) that hung after its ranks, and the exit code of that.
MPIRUN_HUNG, KILLED = "dptrain: warning: mpirun ", 128 + signal.SIGKILL

# MPICH's ranks are then in turn on two nodes, as far as MPI and so dptrain can tell.
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_LOG_LEVEL": "error"}

# What starts the jobs


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    fault: Fault
    number: int
    code: int | None  # mpirun's; None where the job hung
    named: str  # who named the culprit: "dptrain", "launcher" or ""
    seconds: float  # from the fault to the end
    said: str  # dptrain's last line on standard error
    printed: str
    wrong: str  # what is not as it should be


def environment(more: dict[str, str]) -> dict[str, str]:
    """Return that of all jobs."""
    fixed = {
        "DPTRAIN_STALL_TIMEOUT": str(STALL),
        "DPTRAIN_STALL_WARNING": "0",
        "DPTRAIN_DIGEST_EVERY": str(EVERY),
        "OPENBLAS_NUM_THREADS": "1",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # MPICH: with more ranks than cores those that wait sleep for moments
    }
    return {**os.environ, **fixed, **more}


def end_group(process: "subprocess.Popen[str]") -> None:
    """Kill what is left of a job: it has a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def run_fault(launcher: Launcher, seed: int, number: int, data_file: Path, ends: bool) -> Ended:
    """Run the job of one fault, and judge how it ended."""
    fault = draw(seed, number, ends)
    # A rank that is being killed may still write.
    with tempfile.TemporaryDirectory(prefix="dptrain-faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        words = [sys.executable, str(Path(__file__).with_name("fault_job.py")), json.dumps(asdict(fault))]
        process = subprocess.Popen(
            start_command(launcher, fault.ranks, {}, words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env=environment({"FAULTS_DATA": str(data_file)} | (TWO_NODES if fault.nodes > 1 else {})),
            start_new_session=True,
        )
        (folder / "mpirun.pid").write_text(str(process.pid))
        code: int | None = None
        try:
            out, err = process.communicate(timeout=LIMIT)
            code = process.returncode
        except subprocess.TimeoutExpired:
            end_tree(process.pid)  # Open MPI's ranks have groups of their own
            out, err = process.communicate()
        ended = time.time()
        end_group(process)
        planted = (folder / "planted").exists()
        pid, begun = json.loads((folder / "planted").read_text()) if planted else (0, ended)
        saved = [path for path in folder.rglob("manifest.json") if "-step-" in path.parent.name]
    # What a guard says of an mpirun that hangs by itself comes after what was said of the rank.
    lines = [line for line in err.splitlines() if line.startswith("dptrain: ") and not line.startswith(MPIRUN_HUNG)]
    message = lines[-1] if lines else ""
    named = who_named(fault, pid, message, out + err)
    if code == -signal.SIGKILL and MPIRUN_HUNG in err:
        code = KILLED
    wrong = complaint(fault, code, planted, named, bool(saved))
    return Ended(fault, number, code, named, ended - begun, message, out + err, wrong)


def who_named(fault: Fault, pid: int, message: str, printed: str) -> str:
    """Return who named the culprit: "dptrain", "launcher" or ""."""
    if fault.is_signal:
        signal_name = fault.kind.split()[0]
        return "dptrain" if ("interrupted" if signal_name == "SIGINT" else signal_name) in message else ""
    if fault.is_harmless:
        return "nobody"
    host = os.uname().nodename
    if fault.kind in ("another call", "NaN in its copy"):  # who is right is for the script's author to say
        return "dptrain" if re.search(rf"differ.*\brank {fault.rank}\b", message) else ""
    if fault.moment == BEFORE or fault.everywhere:  # a process that has ended before anybody looked; any of them
        number = r"\d" if fault.everywhere else fault.rank
        if re.search(rf"^dptrain: rank {number}/{fault.ranks} host {host} ", printed, re.MULTILINE):
            return "dptrain"
    if fault.everywhere and "exited due to process rank" in printed:
        return "launcher"  # Open MPI's, which names the first
    alone = f"rank {fault.rank}/{fault.ranks} host {host} pid {pid} "
    agreed = rf"\b{fault.rank}( \(|, )host {host}, pid {pid}\b"
    if alone in message or re.search(agreed, message):
        return "dptrain"
    if re.search(rf"Process name: \[\S+@1,{fault.rank}\]\s+Exit code:", printed):
        return "launcher"  # Open MPI's, which has ended the others before they could say more
    return "launcher" if re.search(rf"\bPID {pid}\b", printed) else ""


def complaint(fault: Fault, code: int | None, planted: bool, named: str, saved: bool) -> str:
    """Return what is wrong with an end, or ""."""
    codes = FAULTS[fault.kind].codes
    complaints = []
    if not planted:
        complaints.append("the fault's moment has not come")
    if code is None:
        complaints.append(f"hung for {LIMIT} s")
    elif fault.is_harmless:
        complaints += [f"exit code {code}"] if code else []
    elif code == 0:
        complaints.append("exit code 0")
    elif codes and code not in (*codes, KILLED) and named != "launcher":  # which has a code of its own
        complaints.append(f"exit code {code} instead of {' or '.join(map(str, codes))}")
    if not named:
        complaints.append("no word of the signal" if fault.is_signal else "the culprit is not named")
    if fault.is_signal and fault.moment != "start-up" and not saved:
        complaints.append("no checkpoint")
    return ", ".join(complaints)


def table_of_faults(ends: Sequence[Ended]) -> list[str]:
    """Return the rows by kind, and the totals."""
    rows = [
        "| fault | jobs | ended | exit codes | named | by the launcher | seconds to the end: median | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in FAULTS:
        some = [end for end in ends if end.fault.kind == kind]
        if not some:
            continue
        codes = Counter(end.code for end in some if end.code is not None)
        shown = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        names = Counter(end.named for end in some)
        seconds = [end.seconds for end in some]
        rows.append(
            f"| {kind} | {len(some)} | {sum(codes.values())} | {shown} | {names['dptrain']} | {names['launcher']} |"
            f" {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
        )
    hung = sum(end.code is None for end in ends)
    nobody = [end for end in ends if not end.named]
    killed = sum(end.fault.kind == "kill -9" for end in nobody)
    zero = sum(end.code == 0 and not end.fault.is_harmless for end in ends)
    wrong = sum(bool(end.wrong) for end in ends)
    return [
        *rows,
        "",
        f"{len(ends)} faults: {hung} hung, {len(nobody)} without a culprit ({killed} of them by kill -9), {zero} with"
        f" exit code 0; {wrong} not as they should be.",
    ]


# Kills with resume

# Seconds after which a job is hung that is no longer killed; sweeps under the emulated driver are slow.
PATIENCE = 5 * LIMIT
# Kills of a job.
MOST = 6
TRAINING = (*SMALL, "--checkpoint-every", "7,epoch")
# Trials whose epochs take different times, and a test set that is kept for the best.
SWEEP_EPOCHS = 6
SWEEP = (
    *("sweep", "--seeds", "0-1", "--grid", "hidden=8,48", "--grid", "learning_rate=1e-3,1e-2", "--dropout", "0.2"),
    *("--epochs", str(SWEEP_EPOCHS), "--batch-size", "16", "--validation-split", "0.2", "--verbose", "2"),
    *("--device", "cpu"),
)
SWEEP_ON_CUDA = (*SWEEP, "--epochs", "3", "--batch-size", "64", "--device", "cuda", "--runs-per-device", "3")
EMULATOR = Path(__file__).resolve().parents[1] / "tests" / "emulator"

# What a job has left, by what it is: what must be the same, by name.
Results = dict[str, dict[Any, Any]]


def training_results(out: Path) -> Results:
    """Return a training's weights, and the metrics of its epochs but for times."""
    epochs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    values = {epoch["epoch"]: {key: value for key, value in epoch.items() if "second" not in key} for epoch in epochs}
    return {"weights": {"": (out / "model.safetensors").read_bytes()}, "metrics": values}


def sweep_results(out: Path) -> Results:
    """Return a sweep's epochs, its trials but for times, its models' arrays and what they make of the test set."""
    epochs = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    with open(out / "trials.csv", newline="") as file:
        trials = [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]
    return {
        "epochs": {(epoch["run"], epoch["epoch"]): epoch for epoch in epochs} | {"lines": len(epochs)},
        "trials": {row["trial"]: row for row in trials},
        "models": {file.name: arrays(file) if file.suffix == ".keras" else {} for file in (out / "models").iterdir()},
        "tests": {event["run"]: event["metrics"] for event in events if event["kind"] == "test"},
    }


def arrays(file: Path) -> dict[str, bytes]:
    """Return the bytes of the arrays in a .keras file."""
    import h5py

    contents: dict[str, bytes] = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            contents[name] = item[()].tobytes()

    with zipfile.ZipFile(file) as content, h5py.File(io.BytesIO(content.read("model.weights.h5"))) as weights:
        weights.visititems(take)
    return contents


def halved_results(out: Path) -> Results:
    """Return of a sweep's results those that do not depend on who was judged when: not who goes on from a rung."""
    results = sweep_results(out)
    whole = {number: row for number, row in results["trials"].items() if row["epochs_trained"] == str(SWEEP_EPOCHS)}
    del results["epochs"]["lines"]
    return {"epochs": results["epochs"], "trials": whole, "models": results["models"]}


@dataclass(frozen=True)
class Job:
    """A job that is killed and restarted until it ends."""

    name: str
    words: Sequence[str]  # after `python -m dptrain`
    ranks: int
    results: Callable[[Path], Results]  # reads what it left
    weight: int = 1  # how often it is drawn
    last: str = ""  # file that marks its end; "" where the same command can be restarted then
    journal: str = ""  # file whose lines no kill may take back; "" for none
    whole: Sequence[str] | None = None  # arguments of the undisturbed job, if its results may be a superset
    emulated: bool = False  # on the emulated CUDA driver

    def start(self, launcher: Launcher, data_file: Path, out: Path, words: Sequence[str]) -> "subprocess.Popen[str]":
        """Start it, or what it is compared with."""
        command = [sys.executable, "-m", "dptrain", *words, "--data", str(data_file), "--out", str(out)]
        if self.ranks > 1:
            command = start_command(launcher, self.ranks, {}, command)
        # Two threads, where a rank trains runs in threads.
        more = {"DPTRAIN_STALL_TIMEOUT": str(PATIENCE), "OPENBLAS_NUM_THREADS": "2" if "sweep" in words else "1"}
        if self.emulated:
            # A mask of this machine's GPUs is not one of the emulator's.
            command = ["env", "-u", "CUDA_VISIBLE_DEVICES", sys.executable, str(EMULATOR / "run"), *command]
            more |= {"EMULATOR_DEVICES": str(self.ranks), "EMULATOR_MEMORY": "32G"}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(more),
            start_new_session=True,
        )

    def differences(self, results: Results, whole: Results) -> str:
        """Return what is not as where nobody has killed, in words, or ""."""
        if self.whole is None:
            return ", ".join(what for what in whole if results[what] != whole[what])
        return ", ".join(
            what
            for what in whole
            if not results[what] or any(whole[what].get(name) != value for name, value in results[what].items())
        )


TRAININGS = [
    Job(f"{ranks} rank{'s' if ranks > 1 else ''}", TRAINING, ranks, training_results, last="summary.json")
    for ranks in (1, 2)
]


def sweeps() -> list[Job]:
    """Return the sweeps; those on the emulated driver where it can be built."""
    sys.path.insert(0, str(EMULATOR))
    from build import missing

    halving = (*SWEEP, "--halving", "3")
    jobs = [
        Job("1 rank", SWEEP, 1, sweep_results, 3),
        Job("2 ranks", SWEEP, 2, sweep_results, 3),
        # One run at a time: who goes on from a rung depends on nothing else.
        Job("1 rank, halving, one run at a time", (*halving, "--runs-per-device", "1"), 1, sweep_results, 2),
        Job("1 rank, halving", halving, 1, halved_results, 2, whole=(*SWEEP, "--keep", "all")),
        Job("2 ranks, halving", halving, 2, halved_results, 2, whole=(*SWEEP, "--keep", "all")),
    ]
    if reason := missing():
        print(f"without the emulated driver: {reason}", file=sys.stderr)
    else:
        jobs += [
            Job(f"{count}, packs on the emulated CUDA driver", SWEEP_ON_CUDA, ranks, sweep_results, emulated=True)
            for ranks, count in ((1, "1 rank"), (2, "2 ranks"))
        ]
    return [replace(job, journal="journal.jsonl") for job in jobs]


def write_data(path: Path) -> None:
    """Write a small data set, whose sizes no number of ranks divides."""
    import numpy as np

    from dptrain.data.strokes import generate

    names = ("x_train", "y_train", "x_test", "y_test")
    np.savez(path, **dict(zip(names, generate(1003, 201), strict=True)))


def wait(process: "subprocess.Popen[str]", seconds: float) -> tuple[int | None, str]:
    """Return exit code and standard error; None where the job was killed after so many seconds."""
    try:
        _, err = process.communicate(timeout=seconds)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        _, err = process.communicate()
        code = None
    end_group(process)
    return code, err


def journal_lines(path: Path) -> list[bytes]:
    """Return the lines that were written wholly."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


@dataclass
class Disturbed:
    """How a job ended that was killed."""

    kills: int = 0  # those that came before its end
    code: int | None = None  # of the last start; None where it hung
    wrong: str = ""  # what is not as it should be


def disturb(
    job: Job, start: Callable[[], "subprocess.Popen[str]"], out: Path, moments: Sequence[float], whole: Results
) -> Disturbed:
    """Start a job and kill it after so many seconds, again and again; let it end, and judge what it comes to."""
    outcome, err = Disturbed(), ""
    written: list[bytes] = []
    # The last is not killed, unless it hangs.
    for seconds in (*moments, PATIENCE):
        outcome.code, err = wait(start(), seconds)
        before, written = written, journal_lines(out / job.journal)
        if written[: len(before)] != before:
            outcome.wrong = "a line of the journal is lost"
            return outcome
        if outcome.code is None and job.last and (out / job.last).exists():  # it had come to its end
            outcome.kills += 1
            outcome.code = 0
        if outcome.code is not None:
            break
        outcome.kills += seconds < PATIENCE
    if outcome.code != 0:
        outcome.wrong = (
            f"hung for {PATIENCE} s" if outcome.code is None else f"ended with {outcome.code}: {err.strip()}"
        )
    elif differences := job.differences(job.results(out), whole):
        outcome.wrong = f"other {differences}"
    return outcome


def kills_with_resume(
    launcher: Launcher, jobs: Sequence[Job], options: argparse.Namespace, kills: int, until: float, data_file: Path
) -> list[str]:
    """Kill jobs that many times, or until then, and return a table of what became of them."""
    rows = [Counter[str]() for _ in jobs]
    complaints: list[str] = []
    left, lock, numbers = kills, Lock(), itertools.count()
    with tempfile.TemporaryDirectory(prefix="dptrain-faults-") as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)

        def undisturbed(job: Job) -> tuple[float, Results]:
            begun, out = 0.0, folder
            for which in ("first", "whole"):  # the first compiles what the others find
                begun, out = time.monotonic(), folder / f"{which}-{jobs.index(job)}"
                code, err = wait(job.start(launcher, data_file, out, job.whole or job.words), PATIENCE)
                if code != 0:
                    raise RuntimeError(f"{job.name}: the one that nobody kills ended with {code}: {err}")
            return time.monotonic() - begun, job.results(out)

        whole = list(pool.map(undisturbed, jobs))

        def go_on(_: int) -> None:
            nonlocal left
            while time.monotonic() < until:
                with lock:
                    number = next(numbers)
                    rng = random.Random(f"{options.seed}: kills {number}")
                    [place] = rng.choices(range(len(jobs)), [job.weight for job in jobs])
                    planned = min(left, rng.randint(1, MOST))
                    left -= planned
                if not planned:
                    return
                job, out, (lasts, results) = jobs[place], folder / f"killed-{number}", whole[place]
                moments = [rng.uniform(0, lasts) for _ in range(planned)]
                start = partial(job.start, launcher, data_file, out, job.words)
                outcome = disturb(job, start, out, moments, results)
                shown = f"job {number}, {job.name}: {outcome.kills} kills; {outcome.wrong or 'all the same'}"
                if outcome.wrong:
                    if out.exists():
                        copy = tempfile.mkdtemp(prefix="dptrain-faults-kept-")
                        shown += f"; see {shutil.copytree(out, copy, dirs_exist_ok=True)}"
                    complaints.append(f"- kills, {shown}")
                print(shown, file=sys.stderr, flush=True)
                with lock:
                    left += planned - outcome.kills
                    ended = {"ended": int(outcome.code == 0), "same": int(not outcome.wrong)}
                    rows[place].update({"jobs": 1, "kills": outcome.kills, **ended})

        list(pool.map(go_on, range(options.jobs)))
    return [
        "| job | jobs | kills | ended well | lost | all the same bit for bit |",
        "|---|---|---|---|---|---|",
        *(
            f"| {job.name} | {row['jobs']} | {row['kills']} | {row['ended']} | {row['jobs'] - row['ended']} |"
            f" {row['same']} |"
            for job, row in zip(jobs, rows, strict=True)
        ),
        *(["", *complaints] if complaints else []),
    ]


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, help="faults, the first ones of the seed")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="begin with this fault")
    parser.add_argument("--kills", type=int, default=0, help="kills of trainings with resume")
    parser.add_argument("--sweep-kills", type=int, default=0, help="kills of sweeps with resume")
    parser.add_argument("--seed", type=int, default=0, help="what the draws follow from")
    parser.add_argument("--ends", action="store_true", help="faults of `ENDS` in place of the others")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this fault alone, with all that its job prints")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time; they wait for the most part")
    parser.add_argument("--minutes", type=float, default=60, help="no new job begins after so many")
    parser.add_argument("--mpirun", help="a launcher, with options of its own; by default the one beside this Python")
    parser.add_argument("--output", type=Path, help="a file for the report")
    return parser.parse_args()


def main() -> int:
    """Return 1 where anything is not as it should be."""
    options = parse()
    launcher = find_launcher(options.mpirun)
    with tempfile.TemporaryDirectory(prefix="dptrain-faults-") as name:
        data_file = Path(name) / "data.npz"
        write_data(data_file)
        if options.only is not None:
            end = run_fault(launcher, options.seed, options.only, data_file, options.ends)
            print(end.printed)
            print(f"{end.fault}: exit code {end.code} after {end.seconds:.1f} s; {end.wrong or 'as it should be'}")
            return bool(end.wrong)
        return survey(launcher, options, data_file)


def survey(launcher: Launcher, options: argparse.Namespace, data_file: Path) -> int:
    """Run all faults and kills, report, and return 1 where anything is not as it should be."""
    until = time.monotonic() + 60 * options.minutes
    report = Report()
    report.add("# Planted faults", "", command_line(), machine_line())
    packages = ("dptrain", "numpy", "mpi4py", "mpich", "openmpi")
    report.add(
        f"- Versions: {versions(packages)}; {launcher.family}'s mpirun",
        f"- Seed {options.seed}; 2 to 4 ranks; stall timeout {STALL} s, four times as much outside of training; digests"
        f" every {EVERY} steps; a job that has not ended after {LIMIT} s is hung."
        " Open MPI's mpirun kills its ranks 0.2 s after SIGTERM and SIGINT: these are not sent to it.",
    )

    left_out = ("SIGTERM to mpirun", "SIGINT to mpirun") if launcher.family == "Open MPI" else ()

    def run_numbered(number: int) -> Ended | None:
        if time.monotonic() > until or draw(options.seed, number, options.ends).kind in left_out:
            return None
        ended = run_fault(launcher, options.seed, number, data_file, options.ends)
        shown = f"{number}: {ended.fault}: {ended.code} after {ended.seconds:.1f} s"
        print(f"{shown}; {ended.wrong}" if ended.wrong else shown, file=sys.stderr, flush=True)
        return ended

    with ThreadPoolExecutor(options.jobs) as pool:
        ends = [ended for ended in pool.map(run_numbered, range(options.first, options.count)) if ended is not None]
    wrong = [ended for ended in ends if ended.wrong]
    if ends:
        report.add(
            "",
            "## Faults",
            "",
            "Named: dptrain's last line on standard error has the culprit's rank, host and PID; where a call or"
            " data are not those of the others, which rank has what; after a signal, which one. Some ends are"
            " the launcher's to report, with the PID (Open MPI's: rank and exit code of one that leaves with an"
            " error before MPI starts): a column of its own. So is `kill -9`, of which MPICH's mpirun names at"
            " times a rank that it has itself killed. Signals must end with 75, SIGINT with 130, and from the"
            " first step on with a checkpoint. Seconds count from the fault.",
            "",
            *table_of_faults(ends),
        )
    if wrong:
        report.add("", f"Not as they should be (`--seed {options.seed} --only NUMBER` repeats one):", "")
        report.add(*(f"- {ended.number}: {ended.fault}: {ended.wrong}; last line: {ended.said!r}" for ended in wrong))
    rows: list[str] = []
    for title, jobs, kills in (
        ("Kills with resume", TRAININGS, options.kills),
        ("Kills of sweeps with resume", sweeps() if options.sweep_kills else [], options.sweep_kills),
    ):
        if kills:
            lines = kills_with_resume(launcher, jobs, options, kills, until, data_file)
            report.add(
                "",
                f"## {title}",
                "",
                f"At most {MOST} of a job, at moments drawn from the time that it takes where nobody kills; one that is"
                f" then not killed is hung after {PATIENCE} s.",
                "",
                *lines,
            )
            rows += lines
    if options.output:
        report.save(options.output)
    return bool(wrong) or any(row.startswith("- kills") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
