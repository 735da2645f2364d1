"""`python -m dptrain sweep`: trains every setting of a plan with every seed."""

import argparse
import dataclasses
import itertools
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dptrain.batches.fingerprint import fingerprint
from dptrain.callbacks import Callback, Logs
from dptrain.cli.best import early_stopping, monitored
from dptrain.cli.building import (
    Splits,
    build_model,
    describe_samples,
    fit_arguments,
    load_data,
    run_name,
    schedule_steps,
    splits_of,
    standardize,
    steps_of,
)
from dptrain.cli.options.config import (
    Config,
    Leaf,
    epochs_of,
    follows_training,
    leaves,
    remove_fields,
    resolve,
    to_dict,
    to_yaml,
    verbosity,
    without_later,
)
from dptrain.cli.options.loggers import refuse_in_a_sweep
from dptrain.cli.options.model_function import load_function
from dptrain.cli.options.pruning import settled
from dptrain.cli.options.words import suggest
from dptrain.cli.ranks import show_ranks
from dptrain.cli.run_directory import stamped_name
from dptrain.cli.streams import StreamSplit
from dptrain.comm import Communicator, SoloCommunicator, independent
from dptrain.data.loading import LoadedData
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.runtime.checked import NotValidError, checked
from dptrain.runtime.failure import phase
from dptrain.runtime.launch.launcher import usable_cores
from dptrain.runtime.output.terminal import NO_BREAK, say
from dptrain.runtime.storage.yaml_files import read_mapping
from dptrain.runtime.text import counted, short
from dptrain.saving.run_folder import MODELS
from dptrain.sweeps.analysis.pareto import mean_column, objectives_of
from dptrain.sweeps.driver import Request, execute, gather, make_request, prepare, spread
from dptrain.sweeps.keeping import keeps_models
from dptrain.sweeps.options import SweepOptions
from dptrain.sweeps.records import Run, Setting
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.result import RESERVED, SweepResult
from dptrain.sweeps.scheduling.capacity import Capacity, measure
from dptrain.sweeps.scheduling.training import Recipe
from dptrain.sweeps.space import Space, label, parse_grid, parse_random
from dptrain.train.trainer import StepIterator

# Parameters of the user's function by name.
_ARGUMENTS = "model.arguments"
# Forms that --random takes and a grid does not.
_RANGE = re.compile(r"[^=]+=\s*(log:)?[-+.\deE]+\.\.[-+.\deE]+")
_DEFAULT_METRIC = {"multiclass": "val_accuracy", "binary": "val_accuracy", "regression": "val_mae"}
# Trials that a dry run times, and those that it names; trials and seeds of a fast dev run.
_TIMED, _NAMED, _DEV = 8, 20, 2


@dataclasses.dataclass(frozen=True)
class Plan(SweepOptions):
    """A sweep's plan: the keys of a plan file."""

    grid: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    random: dict[str, Any] = dataclasses.field(default_factory=dict)


def plan_of(parsed: argparse.Namespace) -> Plan:
    """Return the plan file's plan, overridden by the command line."""
    options = {key.removeprefix("sweep."): value for key, value in vars(parsed).items() if key.startswith("sweep.")}
    options.pop("dry_run", None)
    plan = options.pop("plan", None)
    names = [field.name for field in dataclasses.fields(Plan)]
    tree: dict[str, Any] = {} if plan is None else read_mapping(Path(plan), "--plan")
    for key in tree:
        if key not in names:
            raise ConfigError(f"--plan {plan}: unknown {key!r}{suggest(str(key), names)}")
    if "grid" in options:
        for text in options["grid"]:
            if _RANGE.fullmatch(text):
                raise ConfigError(
                    f"--grid {text}: a grid takes values, such as 0.1,0.2; --random 20 {text} draws from a range"
                )
        tree["grid"] = _once("--grid", [parse_grid(text) for text in options.pop("grid")])
    typed = set(options)
    if "random" in options:
        words = [word for group in options.pop("random") for word in group]
        counts = [word for word in words if "=" not in word]
        if len(counts) > 1 or not all(word.isdecimal() for word in counts):
            raise ConfigError(
                f"--random {' '.join(words)}: expected one number and FIELD=FROM, such as 20 dropout=0..0.5"
            )
        if counts:
            tree["samples"] = counts[0]
            typed.add("samples")
        drawn = _once("--random", [parse_random(word) for word in words if "=" in word])
        tree["random"] = {name: distribution.describe() for name, distribution in drawn.items()}
    tree |= options
    try:
        return checked(Plan, tree)
    except NotValidError as error:
        name = ".".join(part for part in error.place if isinstance(part, str))
        where = "on the command line" if name in typed else f"in {plan}"
        raise ConfigError(f"{name} = {short(error.value)}, set {where}: {error}") from None


def _once(flag: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for name in (names := [name for name, _ in pairs]):
        if names.count(name) > 1:
            raise ConfigError(f"{flag} {name}=...: appears twice")
    return dict(pairs)


def _read(config: Config, parsed: argparse.Namespace) -> tuple[Request, dict[str, str]]:
    """Return the sweep that is requested, and the dotted path of each swept field by its name."""
    plan = plan_of(parsed)
    refuse_in_a_sweep(config)
    if plan.folds is not None and config.train.validation_split:
        raise ConfigError("--folds and --validation-split: each selects the validation samples; leave one out")
    if config.train.fold is not None:
        raise ConfigError(
            "--fold is for a single run; use --folds K, which trains every trial and seed on each of K folds"
        )
    space = space_of(plan)
    if config.fast_dev_run and not plan.adaptive:
        space = Space(grid=_first(space.grid), random=space.random, samples=min(space.samples, _DEV), seed=space.seed)
    function = None if config.model.function is None else load_function(config.model.function)
    fields = {name: field_path(name, config) for name in space.fields}
    if len(set(fields.values())) < len(fields):
        raise ConfigError(f"swept {', '.join(fields)}: two of them name the same field")
    if config.data.sharding != "global":
        raise ConfigError("--sharding static: not supported in a sweep, where every run has all samples; leave it out")
    if plan.halving is not None and (
        config.train.early_stopping is not None or "train.early_stopping" in fields.values()
    ):
        raise ConfigError("--halving and --early-stopping: each decides when a run stops; leave one out")
    metric, epochs = _DEFAULT_METRIC["multiclass"], epochs_of(config)
    requested = make_request(plan, space, epochs, default=metric, sweeps_epochs="train.epochs" in fields.values())
    if not plan.adaptive:
        for setting in space.settings():
            run_config = _config(config, setting, fields, requested.seeds[0])
            monitored(run_config)
            if function is not None:
                function.arguments(run_config.model.arguments)
    return requested, fields


def _refuse_stream(data: LoadedData) -> None:
    if isinstance(data.train, StreamSplit):
        raise ConfigError("--data: sweeps over streams of shards are not supported; train their runs one by one")


def sweep(config: Config, ranks: Communicator, parsed: argparse.Namespace) -> int:
    """Train every setting with every seed; return 0 if all runs succeeded. Collective."""
    requested, fields = ranks.agree("configuration", lambda: _read(config, parsed))
    ranks.require_same("the ranks sweep differently", {"sweep": dataclasses.asdict(requested.options)})
    keep, why_not = ranks.agree("configuration", lambda: keeps_models(requested.options.keep))
    notes = [why_not] if why_not else []
    phase.enter("data")
    data = load_data(config, ranks)
    ranks.agree("configuration", lambda: _refuse_stream(data))
    recipe = ranks.agree("configuration", lambda: ConfigRecipe(config, data, fields, requested.folds))
    if requested.options.metric is None:
        requested = dataclasses.replace(requested, objectives=_objectives(config, data, fields, requested))
    validated = [metric for metric in requested.objectives if metric.startswith("val_")]
    if not recipe.has_test and validated:
        notes.append(
            f"Trials were chosen by {formatting.listed(validated)} on the test part of the data set, so the best value "
            "is too good for new samples; --validation-split or --folds keeps the test part separate."
        )
    requested = dataclasses.replace(
        requested,
        seeds=requested.seeds[:_DEV] if config.fast_dev_run else requested.seeds,
        keep=keep,
        notes=notes,
        further={
            "epochs": requested.epochs,
            "config": _deciding(config, fields.values()),
            "data": ranks.agree("data", lambda: [fingerprint(split.x, split.y) for split in (data.train, data.test)]),
        },
    )
    if ranks.rank == 0 and config.verbose != 0:
        say(f"measuring memory and speed of a run{' on every rank' if ranks.size > 1 else ''}")
    capacity = prepare(ranks, recipe, requested)
    capacities = gather(ranks, capacity)
    dry = getattr(parsed, "sweep.dry_run", False)
    if dry or config.verbose != 0:
        _show_plan(ranks, config, data, recipe, requested, capacities)
    if dry:
        ranks.agree("plan", lambda: _show_time(ranks, recipe, requested, capacities))
        return 0
    with ExitStack() as stack:
        out = ranks.agree("output", lambda: _place(ranks, config, data, stack))
        is_kept = config.out is not None or not config.fast_dev_run
        if ranks.rank == 0 and config.verbose != 0 and is_kept:
            say(f"results go to {out}; a killed sweep resumes with --out {out}")
        result = execute(
            ranks,
            recipe,
            requested,
            capacity,
            out,
            verbose=verbosity(config),
            facts={"command": f"python -m dptrain {shlex.join(sys.argv[1:])}", "data": data.name},
            repeat=lambda setting, run: _repeat(out, recipe, setting, run, capacity),
            files={"config.yaml": to_yaml(dataclasses.replace(config, out=None))},
            writes_report=config.report,
        )
        if ranks.rank == 0 and config.verbose != 0:
            _show_result(result, requested.space, str(out) if is_kept else None, has_report=config.report)
    return result.exit_code


def _objectives(config: Config, data: LoadedData, fields: Mapping[str, str], requested: Request) -> dict[str, str]:
    """Return the default objectives: the task's metric, and sparsity beside it."""
    metrics, modes = [_DEFAULT_METRIC[data.task]], list(requested.options.mode)
    prunes = config.pruning.sparsity is not None or "pruning.sparsity" in fields.values()
    if prunes and len(modes) == 1 and requested.options.halving is None and not requested.options.adaptive:
        metrics, modes = [*metrics, "sparsity"], [*modes, "auto"]
    return objectives_of(metrics, modes)


class ConfigRecipe(Recipe):
    """Makes models from a configuration and each run's swept fields; `fields` maps names to dotted paths."""

    def __init__(self, config: Config, data: LoadedData, fields: Mapping[str, str], folds: int = 1) -> None:
        self._config, self._data, self.fields = config, data, fields
        # Without folds the same for all runs.
        self._splits = splits_of(_folded(config, Run(0, 0, config.seed, 0, folds)), data)
        self.has_test = self._splits.test is not None
        self.samples = describe_samples(data, self._splits)
        self.test_samples = None if self._splits.test is None else len(self._splits.test)
        held_out = len(self._splits.validation)
        self.validation_samples = held_out if folds == 1 else held_out + len(self._splits.train)
        self.function = config.model.function

    def build(self, setting: Setting, seed: int, run: Run | None = None) -> Model:
        """Build the configured network."""
        config = _config(self._config, setting, self.fields, seed)
        steps = None
        if run is not None and (config.optimizer.schedule is not None or config.pruning.sparsity is not None):
            steps = schedule_steps(config, steps_of(config, self._splits_of(config, run), SoloCommunicator()))
        model = build_model(config, self._data, self._splits.train.rows, steps)
        if config.train.early_stopping is not None:
            monitored(config, model)
        return model

    def train(self, model: Model, setting: Setting, callbacks: Sequence[Callback], run: Run) -> StepIterator[None]:
        """Train as `python -m dptrain` does."""
        config = _config(self._config, setting, self.fields, model.seed)
        splits = self._splits_of(config, run)
        steps = steps_of(config, splits, SoloCommunicator())
        stopping = early_stopping(config, first=settled(config, schedule_steps(config, steps)))
        standardize(model, self._data, splits.train.rows)
        stoppers = [] if stopping is None else [stopping]
        return model._fit_in_steps(**fit_arguments(config, splits, steps), verbose=0, callbacks=[*stoppers, *callbacks])

    def test(self, model: Model) -> Logs:
        """Evaluate a model on the test part."""
        assert self._splits.test is not None
        metrics = model.evaluate(self._splits.test, verbose=0, return_dict=True)
        assert isinstance(metrics, dict)
        return metrics

    def test_arrays(self) -> tuple[Any, Any]:
        """Return the test part."""
        assert self._splits.test is not None
        test = self._splits.test.selected()
        return test.x, test.y

    def _splits_of(self, config: Config, run: Run) -> Splits:
        return self._splits if run.folds == 1 else splits_of(_folded(config, run), self._data)


def _folded(config: Config, run: Run) -> Config:
    if run.folds == 1:
        return config
    train = dataclasses.replace(config.train, fold=f"{run.fold + 1}/{run.folds}")
    return dataclasses.replace(config, train=train)


def space_of(options: Plan) -> Space:
    """Return the plan's search space."""
    if options.adaptive and (options.grid or options.samples):
        raise ConfigError(
            "--adaptive: expected a range to draw from for every field (--random FIELD=FROM, without a number), and "
            "no grid"
        )
    if options.adaptive and not options.random:
        raise ConfigError("--adaptive: name the fields to choose, such as --random dropout=0..0.5")
    if options.random and not options.samples and not options.adaptive:
        raise ConfigError("--random: give the number of settings to draw, such as --random 20 dropout=0..0.5")
    return Space(
        grid=options.grid,
        random=options.random,
        samples=options.adaptive or options.samples,
        seed=options.search_seed,
    )


def field_path(name: str, config: Config) -> str:
    """Return the dotted path of a field that a sweep may vary, given its path, flag or last part.

    Parameters of the user's function take precedence; a field of the same name needs its path.
    """
    parameters = {} if config.model.function is None else load_function(config.model.function).types
    if (parameter := name.removeprefix(f"{_ARGUMENTS}.")) in parameters:
        if parameter in RESERVED:
            raise ConfigError(f"swept {name!r}: results already have a column of that name; rename it")
        return f"{_ARGUMENTS}.{parameter}"
    all_leaves = list(leaves())
    matches = [leaf for leaf in all_leaves if name in (leaf.path, (leaf.flag or "").replace("-", "_"))]
    matches = matches or [leaf for leaf in all_leaves if _short(leaf) == name]
    if not matches:
        get = (lambda leaf: leaf.path) if "." in name else _short
        names = {get(leaf) for leaf in all_leaves if leaf.sweeps_refuse is None}
        raise ConfigError(f"unknown field {name!r}{suggest(name, [*parameters, *sorted(names)])}")
    if len(matches) > 1:
        raise ConfigError(f"field {name!r}: write {' or '.join(leaf.path for leaf in matches)}")
    if matches[0].sweeps_refuse is not None:
        raise ConfigError(f"field {name!r} cannot be swept: {matches[0].sweeps_refuse}")
    return matches[0].path


def _short(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _config(config: Config, setting: Setting, fields: Mapping[str, str], seed: int) -> Config:
    overrides = {fields[name]: value for name, value in setting.items()} | {"seed": seed}
    return resolve(to_dict(config), "the configuration", overrides, "in the sweep")


def _first(grid: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return a grid cut to the settings of a fast dev run."""
    left, result = _DEV, {}
    for name, values in grid.items():
        result[name] = values[:left]
        left = max(1, left // len(result[name]))
    return result


def _deciding(config: Config, swept: Collection[str]) -> dict[str, Any]:
    # Apart from what is compared separately. All sweeps have the fields outside of sections.
    ignored = [*(leaf.path for leaf in leaves() if leaf.sweep_ignores), "train.epochs"]
    tree = remove_fields(without_later(to_dict(config)), ignored)
    stops = config.train.early_stopping is not None or "train.early_stopping" in swept
    if stops or follows_training(config) or {"optimizer.schedule", "pruning.sparsity"} & set(swept):
        tree["train"]["epochs"] = config.train.epochs  # a larger number would change the earlier epochs
    return tree


def _place(ranks: Communicator, config: Config, data: LoadedData, stack: ExitStack) -> Path:
    if ranks.rank != 0:
        return Path()
    if config.out is not None:
        return Path(config.out)
    if config.fast_dev_run:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-"))) / "sweep"
    stamped = stamped_name(run_name(config, data))
    paths = (Path("sweeps") / f"{stamped}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def _repeat(out: Path, recipe: ConfigRecipe, setting: Setting, run: Run, capacity: Capacity) -> str:
    """Return the command that repeats one run bit for bit; BLAS needs the same number of threads."""
    threads = "" if capacity.threads is None else f"OPENBLAS_NUM_THREADS={capacity.threads} "
    words = ["python", "-m", "dptrain", "--config", str(out / "config.yaml"), "--seed", str(run.seed)]
    if recipe.function is not None:
        words.append(f"--model={recipe.function}")
    words += [_option(path, setting[name]) for name, path in recipe.fields.items()]
    if run.folds > 1:
        words.append(f"--fold={run.fold + 1}/{run.folds}")
    return threads + shlex.join(words)


def _option(path: str, value: Any) -> str:
    section, _, name = path.rpartition(".")
    return f"--model-arg={label({name: value}, exact=True)}" if section == _ARGUMENTS else f"--{path}={_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# Output


def _show_plan(
    ranks: Communicator,
    config: Config,
    data: LoadedData,
    recipe: ConfigRecipe,
    requested: Request,
    capacities: Sequence[Capacity],
) -> None:
    rows = ranks.allgather([ranks.rank, ranks.host, os.getpid(), capacities[ranks.rank].device])
    seeds = counted(len(requested.seeds), "seed") + (f" x {requested.folds} folds" if requested.folds > 1 else "")
    if ranks.rank != 0:
        return
    show_ranks(rows)
    for note in data.notes:
        say(note)
    say(f"{data.name}: {recipe.samples}")
    how = f", chosen by Optuna from {', '.join(requested.space.fields)}" if requested.options.adaptive else ""
    say(
        f"{counted(requested.trials, 'trial')}{how} x {seeds} = "
        f"{counted(requested.runs, 'run')} of {counted(epochs_of(config), 'epoch')}; "
        f"compared by {next(iter(requested.objectives))}"
    )
    if len(requested.objectives) > 1:
        say(f"Pareto front of {formatting.listed([*requested.objectives])}")
    if requested.rungs:
        at = formatting.listed([str(rung) for rung in requested.rungs])
        say(
            f"stopping early: one trial in {requested.options.halving} continues after {at} epochs, by the mean over "
            "its seeds"
        )
    for rank, capacity in enumerate(capacities):
        memory = f"{capacity.run_bytes / 1e6:.1f} MB a run"
        if capacity.free_bytes is not None:
            memory += f", {capacity.free_bytes / 1e6:,.0f} MB free in addition to the data"
        divided = f" in {capacity.packs} packs" if capacity.packs > 1 else ""
        say(f"rank {rank}: {counted(capacity.places, 'run')} at a time{divided}, {memory}")
    alone = capacities[0].threads is not None and capacities[0].at_once == 1
    if ranks.size == 1 and alone and (cores := usable_cores()) > 1:
        say(f"one run at a time: mpirun -n {cores} would train runs side by side on {cores} cores")


def _show_time(
    ranks: Communicator,
    recipe: Recipe,
    requested: Request,
    capacities: Sequence[Capacity],
) -> None:
    """Print the settings and, after timing some of them, the expected duration."""
    if ranks.rank != 0:
        return
    if not requested.options.adaptive:
        settings = requested.space.settings()
        for number, setting in enumerate(settings[:_NAMED]):
            say(f"  trial {number}: {label(setting)}", indent=4)
        if len(settings) > _NAMED:
            say(f"  and {len(settings) - _NAMED} more")
    timed = spread(requested.settings_to_try(), _TIMED)
    places = capacities[0].places
    seconds = []
    for number, setting in enumerate(timed, 1):
        say(f"timing some steps of a run, {number} of {len(timed)}: {label(setting) or 'as configured'}", indent=4)
        run = Run(0, 0, requested.seeds[0], 0, requested.folds)
        with independent():
            duration_of_run = measure(recipe, [setting], run, [*requested.objectives], places, places).seconds
        if duration_of_run is not None:
            seconds.append(duration_of_run)
    if not seconds:
        say("duration unknown: the number of steps per run is not known")
        return
    each = math.fsum(seconds) / len(seconds)
    say(
        f"about {duration(each * requested.runs / ranks.size)} in all on {counted(ranks.size, 'rank')}, "
        f"without evaluation: {each:.3g} s per run, from some steps of {counted(len(timed), 'trial')}"
    )


def _show_result(result: SweepResult, space: Space, out: str | None, *, has_report: bool) -> None:
    shown, others = result.ranking[:10], [*result.modes][1:]
    for place, number in enumerate(shown, 1):
        trial = result.trials[number]
        mean = "no value" if trial["mean"] is None else formatting.number(trial["mean"])
        interval = "" if trial["ci_low"] is None else f" [{trial['ci_low']:.4f}, {trial['ci_high']:.4f}]"
        setting = label({name: trial[name] for name in space.fields})
        further = "".join(f", {metric} {formatting.number(trial[mean_column(metric)])}" for metric in others)
        value = f"{mean}{interval}, n = {trial['n']}{further}".replace(" ", NO_BREAK)
        say(f"{place:3}. trial {number} ({setting or 'as configured'}): {value}", indent=5)
    if len(result.ranking) > len(shown):
        say(f"     and {len(result.ranking) - len(shown)} more")
    for sentence in result.findings:
        say(sentence)
    where = "Fast dev run: everything works (results written and removed)" if out is None else f"Results in {out}"
    models = f", {len(result.models)} in {MODELS}/" if result.models else ""
    report = "report.html, " if has_report else ""
    say(where if out is None else f"{where}: {report}trials.csv, results.jsonl{models}")
    if result.stopped and out is not None:
        say(f"stopped ({result.stopped}): start again with --out {out} to continue")


def duration(seconds: float) -> str:
    """Format a time: "1 h 02 min", "3 min 20 s", "12 s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{max(whole, 1)} s"
