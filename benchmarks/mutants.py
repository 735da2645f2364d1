"""Mutation testing of what generates code, shards programs over ranks, and of the kernels: are planted bugs noticed?

    pip install -e '.[test]' 'pytest>=9' cosmic-ray coverage    # the last two nothing but this uses
    python benchmarks/mutants.py --count 500 --work FOLDER --output benchmarks/results/mutants_HARDWARE_DATE.md
    python benchmarks/mutants.py --count 500 --work FOLDER --journal FILE    # goes on where one with it was stopped
    python benchmarks/mutants.py --only 17 --work FOLDER     # mutant 17 of this seed alone, with what its judges print
    python benchmarks/mutants.py --list         # draws, and judges none
    python benchmarks/mutants.py --work FOLDER --files dptrain/ops/scan.py kernels/attention.cuh    # of these alone

A mutant is the repository with one change: in Python an operator, a number, a condition or a loop (cosmic-ray's
operators), in kernels and headers a bound, a fence, an index, a sign, a type or a barrier. `--seed` and a mutant's
number draw it: a file by its length, then a place in it. What no result can depend on is not drawn (`mutant_draw.py`
says why).

Judges are random programs, the corpus and tests, as every run of the tests has them (`mutant_trial.DEVICES`). Once,
without a mutant, each is run by itself, and which lines and definitions of headers it reaches is kept in the folder
`--work`. A mutant is judged by those alone that reach it, in a fork of a warm process for each device
(`mutant_judge.py`): first what has noticed a mutant of this file most often, then what takes least, until one fails,
crashes or hangs, or the device's CPU seconds are spent. What cannot be imported, or a compiler refuses in a header,
makes no sense, and another is drawn instead. A mutant that nothing reaches survives at once.

Mutants are tried in a copy of the repository as git lists it, uncommitted changes included. Survivors are listed with
their difference, to be judged by hand, and with what they change in all that has been run (`mutant_trial.EFFECTS`).
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import mutant_draw
from common import Report, command_line, machine_line, versions
from mutant_draw import Mutant, draw, files
from mutant_trial import Copy, Units, Verdict


class Journal:
    """Verdicts in a file, one a line, so that a stopped run can resume; without a path it forgets."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path, self._seed = path, seed
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._verdicts = {(line["seed"], line["number"], line["difference"]): line for line in map(json.loads, lines)}

    def find(self, mutant: Mutant) -> Verdict | None:
        """Return what became of a mutant before; None of a new one, such as the same number of another commit."""
        line = self._verdicts.get((self._seed, mutant.number, mutant.difference()))
        return None if line is None else Verdict(mutant, **{name: line[name] for name in _NOTED})

    def add(self, verdict: Verdict) -> None:
        """Note a verdict."""
        if self._path is None or self.find(verdict.mutant) is not None:
            return
        facts = {name: getattr(verdict, name) for name in _NOTED}
        mutant = {"number": verdict.mutant.number, "difference": verdict.mutant.difference()}
        with self._path.open("a") as file:
            file.write(json.dumps({"seed": self._seed, **mutant, **facts}) + "\n")


_NOTED = ("killer", "is_senseless", "seconds", "printed", "effect", "run", "reached")


def judged(
    seed: int, count: int, minutes: float, journal: Journal, copy: Copy, units: Units, chosen: Sequence[str] = ()
) -> Iterator[Verdict]:
    """Yield verdicts of `count` mutants, of chosen files or of all, that make sense, and of the others in between."""
    end = time.monotonic() + 60 * minutes
    number, sensible, drawn = 0, 0, set()
    while sensible < count and time.monotonic() < end:
        mutant = draw(seed, number, chosen)
        number += 1
        if (mutant.file, mutant.text) in drawn:
            continue
        drawn.add((mutant.file, mutant.text))
        verdict = journal.find(mutant)
        if verdict is None:
            verdict = copy.judge(mutant, units)
            journal.add(verdict)
        elif verdict.killer:
            units.has_killed(mutant.file, None, verdict.killer)
        sensible += not verdict.is_senseless
        yield verdict


# The report


def report(chosen: argparse.Namespace, copy: Copy) -> int:
    """Judge mutants, print and write what became of them; return 1 where fewer than 90 % are killed."""
    verdicts = []
    journal = Journal(chosen.journal, chosen.seed)
    units = copy.units()
    copy.check(units)
    for verdict in judged(chosen.seed, chosen.count, chosen.minutes, journal, copy, units, chosen.files):
        verdicts.append(verdict)
        alive = f"SURVIVED, changes {verdict.effect}, {verdict.run} of {verdict.reached} judges"
        what = "makes no sense" if verdict.is_senseless else f"killed by {verdict.killer}" if verdict.killer else alive
        print(
            f"{verdict.mutant.number}: {verdict.mutant.file}: {what} ({verdict.seconds:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    sensible = [verdict for verdict in verdicts if not verdict.is_senseless]
    killed = [verdict for verdict in sensible if verdict.killer]
    lines = Report()
    lines.add("# Mutants", "", command_line(), machine_line())
    lines.add(f"- Versions: {versions(('dptrain', 'numpy', 'cosmic-ray', 'coverage', 'pytest', 'hypothesis'))}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=mutant_draw.ROOT, capture_output=True, text=True, check=True
    )
    lines.add(f"- Commit: {commit.stdout.strip()}, of which seed and number draw a mutant")
    spent = [verdict.seconds for verdict in sensible] or [0.0]
    lines.add(f"- CPU seconds of a mutant: median {statistics.median(spent):.1f}, sum {sum(spent):.0f}", "")
    lines.add("| file | mutants | killed | survived |", "|---|---|---|---|")
    for file in files(chosen.files):
        here = [verdict for verdict in sensible if verdict.mutant.file == file]
        if here:
            alive = sum(not verdict.killer for verdict in here)
            lines.add(f"| {file} | {len(here)} | {len(here) - alive} | {alive} |")
    lines.add("", "| killed by | mutants |", "|---|---|")
    by = Counter(_kind(verdict.killer) for verdict in killed)
    lines.add(*(f"| {kind} | {count} |" for kind, count in by.most_common()), "")
    repeats = f"`--seed {chosen.seed} --only NUMBER` repeats one, with the same `--files`"
    lines.add(f"{len(killed)} of {len(sensible)} killed ({chosen.count} wanted). Survivors ({repeats}):", "")
    for verdict in sensible:
        if not verdict.killer:
            description = f"{verdict.mutant.kind}; changes {verdict.effect}, {verdict.run} of {verdict.reached} judges"
            lines.add(f"- {verdict.mutant.number}, `{verdict.mutant.file}`: {description}", "", "  ```diff")
            lines.add(*(f"  {line}" for line in verdict.mutant.difference().splitlines()[1:]), "  ```", "")
    if chosen.output:
        lines.save(chosen.output)
    return int(10 * len(killed) < 9 * len(sensible))


def _kind(unit: str) -> str:
    """Return what a unit is one of."""
    name = {"cpu": "in C++ and NumPy", "mesh": "on meshes", "cuda": "on the emulated CUDA driver"}
    if "::" in unit:
        return unit.partition("::")[0]
    device, _, rest = unit.partition(" ")
    place = name.get(device.removesuffix(":"), "")
    return f"{'the corpus' if device.endswith(':') else 'random programs'} {place}" if place and rest else "its end"


def main() -> int:
    """Run what the options say; return 1 where too many mutants survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="mutants that make sense (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--minutes", type=float, default=600, help="after which no more are begun (default: 600)")
    parser.add_argument(
        "--journal", type=Path, help="file with verdicts: those of this run are added, and not made again"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the copy and what judges reach: a new one where code has changed"
    )
    parser.add_argument("--files", nargs="+", default=(), metavar="FILE", help="of these alone (default: of all)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one mutant alone")
    parser.add_argument("--list", action="store_true", help="print mutants, and judge none")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    chosen = parser.parse_args()
    if chosen.list:
        for number in range(chosen.count):
            mutant = draw(chosen.seed, number, chosen.files)
            print(f"{number}: {mutant.file}, {mutant.kind}:\n{mutant.difference()}")
        return 0
    with tempfile.TemporaryDirectory(prefix="dptrain-mutants-") as name, contextlib.ExitStack() as stack:
        copy = Copy(Path(name) if chosen.work is None else chosen.work.resolve(), chosen.files)
        stack.callback(copy.close)
        if chosen.only is None:
            return report(chosen, copy)
        mutant = draw(chosen.seed, chosen.only, chosen.files)
        print(mutant.difference())
        verdict = copy.judge(mutant, copy.units(), print)
        print(verdict.printed)
        print(f"killed by {verdict.killer}" if verdict.killer else f"survived, changes {verdict.effect}")
        return int(not verdict.killer)


if __name__ == "__main__":
    sys.exit(main())
