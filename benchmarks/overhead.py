"""What safety costs: heartbeats, digests and checkpoints, and the same bits on any number of ranks.

    python benchmarks/overhead.py --output benchmarks/results/overhead_HARDWARE_DATE.md

Whole trainings by `python -m dptrain` of 784-512-10 at batch 128, on one process with all cores and on two ranks, take
turns: with nothing of it, with one of them each, with all, and with `--reproducible`. Compared are the epochs after the
first, of each round by itself: on a machine that others use as well, the ratio says more than the time. A digest every
100 steps cannot be seen that way: it is made more often, and the time of one is given. How long a save holds the
training up is measured where the training loop calls it; that includes the wait for the save before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, numbers, spread, versions

# Steps between checkpoints, between digests (their default), and between those that are timed.
SAVES, DIGESTS, TIMED = 50, 100, 2
SAMPLES = 60_000  # of the built-in data set
OFF = ("--checkpoint-every", "none", "--digest-every", "0")
# By variant: options beside those that turn all off, and whether ranks watch each other. Where there is one option,
# something happens once in so many steps.
VARIANTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "nothing": ((), False),
    "heartbeats": ((), True),
    "digests": (("--digest-every", str(DIGESTS)), False),
    f"digests every {TIMED}": (("--digest-every", str(TIMED)), False),
    "checkpoints": (("--checkpoint-every", str(SAVES)), False),
    "all three": (("--digest-every", str(DIGESTS), "--checkpoint-every", str(SAVES)), True),
    "--reproducible": (("--reproducible",), False),
}


def work(folder: Path, variant: str, arguments: list[str]) -> int:
    """Be one rank of a training; leave in the folder how long each save held it up."""
    from dptrain.callbacks.checkpointing import Checkpointing
    from dptrain.cli.main import main
    from dptrain.runtime.watch.watchdog import Watchdog

    if not VARIANTS[variant][1]:
        Watchdog._watch = lambda self: None  # type: ignore[method-assign]
    saves: list[tuple[float, float]] = []
    save = Checkpointing.save

    def timed(self: Checkpointing, *arguments: Any) -> None:
        begin = time.perf_counter()
        save(self, *arguments)
        saves.append((begin, time.perf_counter()))

    Checkpointing.save = timed  # type: ignore[method-assign]
    code = main([*arguments, "--out", str(folder / "run")])
    (folder / f"saves-{os.getpid()}.json").write_text(json.dumps(saves))
    return int(code or 0)


def train(variant: str, ranks: int, epochs: int, hidden: int, batch: int) -> tuple[list[float], list[float]]:
    """Return the seconds of epochs, the first left out, and the parts of the time that the saves of each rank took."""
    options, _ = VARIANTS[variant]
    off = [word for pair in zip(OFF[::2], OFF[1::2], strict=True) if pair[0] not in options for word in pair]
    arguments = [
        *off,
        *options,
        "--hidden",
        str(hidden),
        "--batch-size",
        str(batch),
        "--epochs",
        str(epochs),
        "--seed",
        "0",
    ]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--work", name, variant, *arguments]
        if ranks > 1:
            command = ["mpirun", "-n", str(ranks), *command]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if process.returncode:
            sys.exit(f"{variant} on {ranks} ranks: exit code {process.returncode}: {process.stderr[-500:]}")
        lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines][1:]
        stalls = []
        for file in Path(name).glob("saves-*.json"):
            saves = json.loads(file.read_text())[2:]  # of the first, code is read from the disk
            if len(saves) > 1:
                stalled = sum(end - begin for begin, end in saves[:-1])
                stalls.append(stalled / (saves[-1][0] - saves[0][0]))
    return seconds, stalls


def main() -> None:
    """Print tables."""
    if sys.argv[1:2] == ["--work"]:
        sys.exit(work(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=5, help="of each training; the first does not count")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--variants", help="names separated by commas; the first is what the others are compared with")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    chosen = args.variants.split(",") if args.variants else list(VARIANTS)
    report = Report()
    report.add("# What safety costs", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(['dptrain', 'numpy', 'mpich'])}")
    report.add(
        f"- 784-{args.hidden}-10 at batch {args.batch_size}, {args.rounds} rounds of {args.epochs} epochs each; a "
        f"checkpoint every {SAVES} steps, digests every {DIGESTS}"
    )
    for ranks in args.ranks:
        times: dict[str, list[float]] = {name: [] for name in chosen}
        stalls: dict[str, list[float]] = {name: [] for name in chosen}
        for number in range(args.rounds):
            for name in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
                seconds, stalled = train(name, ranks, args.epochs, args.hidden, args.batch_size)
                times[name].append(statistics.median(seconds))
                stalls[name] += stalled
        report.add("", f"## {ranks} rank{'s' * (ranks > 1)}", "")
        report.add(
            f"| variant | seconds an epoch: median (range) | of {chosen[0]!r} | ms of each | of the time in saves |"
        )
        report.add("|---|---|---|---|---|")
        for name in chosen:
            ratios = [seconds / base for seconds, base in zip(times[name], times[chosen[0]], strict=True)]
            options = VARIANTS[name][0]
            often = SAMPLES / args.batch_size / float(options[1]) if len(options) == 2 else 0
            more = (statistics.median(ratios) - 1) * statistics.median(times[chosen[0]]) * 1000
            each = f"{more / often:.2f}" if often else ""
            held_up = spread([100 * part for part in stalls[name]], ".2f") + " %" if stalls[name] else ""
            report.add(f"| {name} | {spread(times[name], '.3f')} | {spread(ratios, '.3f')} | {each} | {held_up} |")
    if args.output:
        report.save(args.output)


if __name__ == "__main__":
    main()
