"""Messages between the ranks of a sweep: records to JSON and back."""

import dataclasses
from enum import StrEnum
from typing import Any

from dptrain.sweeps.records import Ending, Run, Segment, Status


class Tag(StrEnum):
    """The kind of a message."""

    # To a rank: train this segment; everything is done.
    TRAIN = "train"
    FINISH = "finish"
    # To rank 0: an epoch's logs; how a segment ended; a segment that did not fit beside the others; a signal that asks
    # to end; an error that ends the rank.
    EPOCH = "epoch"
    ENDING = "ending"
    RETURNED = "returned"
    SIGNAL = "signal"
    BROKEN = "broken"


def run_fact(run: Run) -> list[int]:
    """Return a run as JSON."""
    return [run.number, run.trial, run.seed, run.fold, run.folds]


def to_run(fact: list[int]) -> Run:
    """Return the run of a `run_fact`."""
    return Run(*fact)


def segment_fact(segment: Segment) -> dict[str, Any]:
    """Return a segment as JSON."""
    return {"run": run_fact(segment.run), "begin": segment.begin, "end": segment.end, "keep": segment.keep}


def to_segment(fact: dict[str, Any]) -> Segment:
    """Return the segment of a `segment_fact`."""
    return Segment(**fact | {"run": to_run(fact["run"])})


def ending_fact(ending: Ending) -> dict[str, Any]:
    """Return an ending as JSON."""
    return dataclasses.asdict(ending) | {"run": run_fact(ending.run), "status": str(ending.status)}


def to_ending(fact: dict[str, Any]) -> Ending:
    """Return the ending of an `ending_fact`."""
    return Ending(**fact | {"run": to_run(fact["run"]), "status": Status(fact["status"])})
