"""Several ranks in one process: a thread each, which meet at every all-reduce."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.comm.node_sum import tree_sum
from dptrain.program import tree
from dptrain.program.body import with_steps
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import BATCH, PlacedProgram
from dptrain.program.sharding.placement import place
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh, spread


class VirtualRanks:
    """What the ranks share: the parts of the sum at hand."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=90), [np.zeros(0)] * size


class VirtualComm:
    """The communicator of one rank, as far as programs need it; `messages` counts them."""

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self._ranks, self.rank, self.size, self.messages = ranks, rank, len(ranks.parts), 0

    def along(self, axis: str) -> "VirtualComm":
        return self

    def allreduce_sum(self, buffer: np.ndarray) -> None:
        self.messages += 1
        self._ranks.parts[self.rank] = buffer.copy()
        self._ranks.barrier.wait()
        total = tree_sum(self._ranks.parts)
        self._ranks.barrier.wait()
        buffer[...] = total

    def node_messages(self, like: Any) -> None:
        """They share no memory that code writes by itself."""

    def sums_in_a_tree(self, nbytes: int) -> bool:
        return self.size <= 2

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        self._ranks.parts[self.rank] = np.frombuffer(message, np.uint8)
        self._ranks.barrier.wait()
        received = [part.tobytes() for part in self._ranks.parts]
        self._ranks.barrier.wait()
        return received


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Return what `work` returns for the communicator of each rank."""
    ranks, results = VirtualRanks(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(VirtualComm(ranks, rank))
        except BaseException as error:
            results[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


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
    starts = np.cumsum([0, *shards])

    def work(comm: Any) -> tuple[Any, int]:
        inputs = {
            name: value if axes.get(name) is None else np.split(value, starts[1:-1], axes[name])[comm.rank]
            for name, value in values.items()
        }
        place = {"rows": shards[comm.rank], "first_row": int(starts[comm.rank])}
        return evaluate(program, inputs, **place, comm=comm), comm.messages

    by_rank = on_ranks(len(shards), work)
    return [results for results, _ in by_rank], by_rank[0][1]


def assert_rows_are_dims(placed: PlacedProgram) -> None:
    """Assert that a length is a dim if and only if the axis is sharded by rows."""
    for tensor in with_steps(placed.tensors):
        axes = placed.placements[tensor].axes
        for n, mesh in zip(tensor.shape, axes, strict=True):
            is_row = mesh == BATCH and (isinstance(n, Dim) or not placed.layouts)
            assert isinstance(n, Dim) == is_row, f"{tensor}: {tensor.shape} {axes}"


def assert_step_is_the_same_on_ranks(step: Any, data: Any, shards: list[int]) -> dict[str, Any]:
    """Run a model's step in float64 on one rank, on several, and with its state spread over a mesh; return its logs.

    Args:
        step: of a model that is built.
        data: what the step takes, nested arrays.
        shards: rows of each rank.
    """
    values = {f"data {number}": leaf for number, leaf in enumerate(tree.leaves(data))}
    inputs = {name: ((Dim.rows(len(value)), *value.shape[1:]), value.dtype) for name, value in values.items()}
    program = trace(lambda *leaves: step.function(tree.refilled(data, iter(leaves))), inputs)
    logs, updates = evaluate(program, values)
    placed = place(program)
    assert_rows_are_dims(placed)
    for outputs, updated in run_on_ranks(placed, values, shards, dict.fromkeys(values, 0))[0]:
        for name, value in logs.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12, atol=1e-14, err_msg=name)
        for variable, value in updates.items():
            np.testing.assert_allclose(updated[variable], value, rtol=1e-9, atol=1e-12, err_msg=variable.path)
    assert_same_on_mesh(program, values, spread(program), VirtualMesh(shards, model=2), rtol=1e-9)
    return logs
