"""`--prune 0.9`: the configured sparse training."""

import dataclasses

from dptrain.cli.options.config import Config, PruningConfig, epochs_of
from dptrain.cli.options.schedule import parse_length
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.pruning import ConstantSparsity, PolynomialDecay, PruningSchedule, prune_low_magnitude

# Default interval of mask updates: small steps, yet rarely enough to cost little.
_UPDATES = 100


def prune(model: Model, config: Config, epoch_steps: int | None) -> None:
    """Set a compiled model up for the configured pruning, if any."""
    chosen = config.pruning
    if chosen.sparsity is None:
        return
    m, _, n = str(chosen.sparsity).partition(":")
    rows, _, columns = (chosen.block or "1x1").partition("x")
    prune_low_magnitude(
        model,
        _schedule(config, epoch_steps),
        (int(rows), int(columns)),
        sparsity_m_by_n=(int(m), int(n)) if n else None,
        global_unstructured=chosen.scope == "global" and not n,
        regrowth=chosen.regrow or None,
        layers=chosen.layers or None,
    )


def refuse_unused(config: Config) -> None:
    """Refuse pruning settings where nothing is pruned."""
    for field in dataclasses.fields(PruningConfig):
        value = getattr(config.pruning, field.name)
        if config.pruning.sparsity is None and value != field.default:
            raise ConfigError(f"pruning.{field.name} = {value}: nothing is pruned; add --prune 0.9, for example")


def settled(config: Config, epoch_steps: int | None) -> int:
    """Return the first epoch, from 0, that ends with full sparsity; earlier models are not compared with it."""
    if config.pruning.sparsity is None or epoch_steps is None:
        return 0
    _, end = _steps(config, epoch_steps)
    return max(-(-end * (config.optimizer.gradient_accumulation_steps or 1) // epoch_steps) - 1, 0)


def _schedule(config: Config, epoch_steps: int | None) -> PruningSchedule:
    chosen = config.pruning
    begin, end = _steps(config, epoch_steps)
    if end < begin:
        raise ConfigError(f"pruning.begin = {chosen.begin} (step {begin}) is after pruning.end = {chosen.end} ({end})")
    frequency = chosen.frequency or max((end - begin) // _UPDATES, 1)
    if isinstance(chosen.sparsity, str):  # m:n says itself how many
        return ConstantSparsity(0.5, begin, end, frequency)
    sparsity = chosen.sparsity or 0.0
    if chosen.schedule == "constant" or begin == end:
        return ConstantSparsity(sparsity, begin, end, frequency)
    return PolynomialDecay(0.0, sparsity, begin, end, frequency=frequency)


def _steps(config: Config, epoch_steps: int | None) -> tuple[int, int]:
    if epoch_steps is None:
        return 0, 1
    every, total = config.optimizer.gradient_accumulation_steps or 1, epoch_steps * epochs_of(config)
    begin, end = (parse_length(text) for text in (config.pruning.begin, config.pruning.end))
    return begin.steps(total, epoch_steps) // every, end.steps(total, epoch_steps) // every
