"""Options of `python -m dptrain sweep` besides those of its runs."""

import argparse
from collections.abc import Callable
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sweep's options."""
    group = parser.add_argument_group("sweep")

    def add(flag: str, text: str, **options: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        help_text = text.replace("%", "%%")
        group.add_argument(flag, dest=f"sweep.{name}", default=argparse.SUPPRESS, help=help_text, **options)

    _add_search(add)
    _add_execution(add)


def _add_search(add: Callable[..., None]) -> None:
    add("--plan", "read these options from a YAML file: seeds, grid, random, samples, metric, ...", metavar="FILE")
    add("--seeds", "seeds of each trial's runs, such as 0-15 or 1,2,5 (default: 0-4)")
    add(
        "--grid",
        "FIELD=VALUE,...: try every combination of these values; repeat it for more fields",
        metavar="FIELD=VALUES",
        action="append",
    )
    add(
        "--random",
        "[N] FIELD=FROM ...: draw N settings from log:1e-5..1e-1, 0.1..0.5, 16..512 (integers) or a,b,c",
        metavar="WORD",
        nargs="+",
        action="append",
    )
    add(
        "--adaptive",
        "let Optuna choose N settings from the ranges of --random, by the means of earlier trials",
        metavar="N",
    )
    add("--search-seed", "seed of the draws and of Optuna (default: 0)", metavar="SEED")
    add(
        "--metric",
        "key of the logs to compare trials by, or parameters, or seconds (default: val_accuracy, of numbers "
        "val_mae); repeat it for several: the first one ranks, and the report shows the Pareto front",
        metavar="KEY",
        action="append",
    )
    add(
        "--mode",
        "whether more or less is better (default: auto); repeat it for several metrics, in their order",
        metavar="auto|max|min",
        action="append",
    )
    add(
        "--halving",
        "stop trials early (ASHA): one in ETA continues from each rung, judged by the mean of its seeds",
        metavar="ETA",
    )
    add("--min-epochs", "epochs of the first rung; each next one is ETA times as long (default: 1)", metavar="N")


def _add_execution(add: Callable[..., None]) -> None:
    add("--runs-per-device", "runs to train at once on each rank (default: measured)", metavar="N")
    add(
        "--packing",
        "on a GPU, let runs that differ only in numbers share launches, as a pack; N: as N packs side by side; "
        "off: one stream per run (default: on, the number of packs is measured)",
        metavar="on|off|N",
    )
    add(
        "--folds",
        "cross-validation: train every trial and seed on each of K folds of the training samples; only the best "
        "trial sees the test part, at the end",
        metavar="K",
    )
    add("--keep", "whose models to keep as files (default: best, those of the best trial)", metavar="best|all|none")
    add(
        "--max-time",
        "stop after a time such as 90s, 30m or 2h; the same command resumes",
        metavar="TIME",
    )
    add("--dry-run", "show the plan, memory and expected time without training", action="store_true")
