"""Sweeps that never ran, for tests of what is made of their results."""

from collections.abc import Mapping, Sequence

from dptrain.sweeps.records import Ending, Run, Status, Trial

# Texts that a setting may hold, and that are not to be drawn as anything but text.
NASTY = ("$x$", "$", "\\frac{$$", "a\nb\0c\ud800", "\u4e2d\u6587 \U0001f600", "x" * 500, "_hidden", "%s{}", "")


def trials(number: int) -> list[Trial]:
    return [Trial(n, {"learning_rate": 10.0 ** -(n % 5), "model.hidden": [64 * (n + 1)]}) for n in range(number)]


def ending(trial: int, seed: int, value: float | None = None, status: Status = Status.DONE, epochs: int = 5) -> Ending:
    """Return the ending of a run of a sweep of at most 100 seeds, which took 2 seconds."""
    went_wrong = not status.is_success
    return Ending(
        run=Run(trial * 100 + seed, trial, seed),
        status=status,
        epochs=epochs,
        seconds=2.0,
        metrics={} if went_wrong else {"loss": 1.0, "val_accuracy": value},
        reason="loss is nan at step 7" if went_wrong else "",
        exit_code=76 if went_wrong else 0,
    )


def endings(values: Mapping[int, Sequence[float]]) -> list[Ending]:
    """Return the endings of runs that are all done: trial -> values over seeds 0, 1, ..."""
    return [ending(trial, seed, value) for trial, row in values.items() for seed, value in enumerate(row)]


def logs(ended: Sequence[Ending]) -> list[dict]:
    """Return what results.jsonl could hold of these runs: curves that rise to their values."""
    return [
        {
            "trial": e.run.trial,
            "run": e.run.number,
            "seed": e.run.seed,
            "epoch": epoch,
            "val_accuracy": e.metrics["val_accuracy"] * epoch / e.epochs if e.metrics else None,
        }
        for e in ended
        for epoch in range(1, e.epochs + 1)
    ]
