"""The options of `python -m dptrain sweep` beside those of its runs."""

import argparse
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep to those of its runs."""
    group = parser.add_argument_group("sweep")

    def add(flag: str, text: str, **more: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        group.add_argument(flag, dest=f"sweep.{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **more)

    add("--plan", "read these options from a YAML file: seeds, grid, random, samples, metric, ...", metavar="FILE")
    add("--seeds", "of each trial's runs, such as 0-15 or 1,2,5 (default: 0-4)")
    add(
        "--grid",
        "FIELD=VALUE,...: every combination of these values; can be repeated",
        metavar="FIELD=VALUES",
        action="append",
    )
    add(
        "--random",
        "[N] FIELD=FROM ...: N settings drawn from log:1e-5..1e-1, 0.1..0.5, 16..512 (integers) or a,b,c",
        metavar="WORD",
        nargs="+",
        action="append",
    )
    add(
        "--adaptive",
        "let Optuna choose N settings from what --random says, by the means of earlier trials",
        metavar="N",
    )
    add("--search-seed", "of what is drawn or chosen (default: 0)", metavar="SEED")
    add(
        "--metric",
        "key of the logs that trials are compared by, or parameters, or seconds (default: val_accuracy); can be "
        "repeated: the first ranks, and the Pareto front of all is shown",
        metavar="KEY",
        action="append",
    )
    add(
        "--mode",
        "what is better (default: auto); with several metrics repeated in their order",
        metavar="auto|max|min",
        action="append",
    )
    add(
        "--halving",
        "stop trials early (ASHA): one in ETA goes on from a rung, judged by its seeds' mean",
        metavar="ETA",
    )
    add("--min-epochs", "the first rung; the next are ETA times as long (default: 1)", metavar="N")
    add("--runs-per-device", "runs that a rank trains at once (default: measured)", metavar="N")
    add(
        "--packing",
        "on a GPU, runs that differ in numbers alone share launches, as a pack; N: as so many packs, which compute "
        "beside each other; off: a stream a run (default: on, their number is measured)",
        metavar="on|off|N",
    )
    add(
        "--folds",
        "cross-validation: every trial and seed on each of K folds of the training samples; the test part is left "
        "for the best trial, in the end",
        metavar="K",
    )
    add("--keep", "whose models stay as files (default: best, the best trial's)", metavar="best|all|none")
    add(
        "--max-time",
        "stop after 90s, 30m or 2h, say; the same command goes on",
        metavar="TIME",
    )
    add("--dry-run", "show the plan, memory and expected time, and train nothing", action="store_true")
