"""Several ranks in one process: a thread each, which meet at every all-reduce."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from dptrain.program.evaluate import evaluate
from dptrain.program.placement import PlacedProgram


def run_on_ranks(
    program: PlacedProgram, values: dict[str, Any], shards: list[int], axes: dict[str, int | None]
) -> tuple[list[tuple[dict, dict]], int]:
    """Return what `evaluate` returns on each of `len(shards)` ranks, which have so many rows; and the messages of one.

    Args:
        program: what every rank executes.
        values: of its inputs, whole.
        shards: rows of each rank.
        axes: along which inputs are cut, by name; those without stay whole.
    """
    ranks, starts = len(shards), np.cumsum([0, *shards])
    barrier, parts = threading.Barrier(ranks, timeout=30), [np.zeros(0)] * ranks
    found: list[Any] = [None] * ranks
    messages = [0] * ranks

    def run(rank: int) -> None:
        def allreduce_sum(buffer: np.ndarray) -> None:
            messages[rank] += 1
            parts[rank] = buffer.copy()
            barrier.wait()
            total = np.sum(parts, axis=0)
            barrier.wait()
            buffer[...] = total

        comm: Any = SimpleNamespace(rank=rank, size=ranks, allreduce_sum=allreduce_sum)
        own = {
            name: value if axes.get(name) is None else np.split(value, starts[1:-1], axes[name])[rank]
            for name, value in values.items()
        }
        try:
            found[rank] = evaluate(program, own, rows=shards[rank], first_row=int(starts[rank]), comm=comm)
        except BaseException as error:
            found[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, threading.BrokenBarrierError):
            raise one
    return found, messages[0]
