"""Steps of a model as programs on this rank's device, traced and prepared at first use."""

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Executable, amount
from dptrain.batches.feed import BatchRows
from dptrain.batches.sampling import Shard
from dptrain.batches.structure import BatchSpec
from dptrain.comm.base import Communicator
from dptrain.comm.mesh import BATCH
from dptrain.comm.node_sum import TreeSum
from dptrain.errors import ConfigError, DeviceError, DeviceMemoryError
from dptrain.metrics import Metric
from dptrain.ops.indexing import take_rows
from dptrain.optimizers.base import Optimizer
from dptrain.program import shapes
from dptrain.program.additive import sums_over_samples
from dptrain.program.body import with_steps
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.passes import rewritten
from dptrain.program.pipeline.schedule import PipelineSchedule, microbatches_of, schedule_of
from dptrain.program.pipeline.stage_assignment import cut_into_stages
from dptrain.program.program import ROWS, Program, trace
from dptrain.program.schedule.clock import Clock
from dptrain.program.sharding import messages
from dptrain.program.sharding.local import localized
from dptrain.program.sharding.mesh import ALL_REDUCE, OWN_PART, REDUCE_SCATTER, PlacedProgram
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, Variable, placeholder, watching
from dptrain.program.turns import MAKING, TURNS
from dptrain.registry.reads import Reads
from dptrain.runtime.failure import phase
from dptrain.runtime.garbage import uncollected
from dptrain.runtime.signals import abandoned_after
from dptrain.runtime.storage.cache import compiling
from dptrain.train.chunking import with_chunked_logits
from dptrain.train.pipeline import PipelineExecutable
from dptrain.train.sharding import Sharding

Array = npt.NDArray[Any]

# The most cached prepared and placed programs: a user's batches may all differ in size. Small placed programs, such as
# those of many lengths of sequences, are kept beyond 64, up to so many tensors in all, of about 3 kB each.
_MAX_PREPARED, _MAX_PLACED, _MAX_SMALL, _MAX_TENSORS = 32, 64, 512, 100_000


@dataclass(frozen=True, eq=False)
class Step:
    """A function of a batch that is traced into a program."""

    name: str  # "train", "test" or "predict"
    # takes the batch's data, returns outputs by name; may read and assign variables
    function: Callable[[Any], Mapping[str, Any]]
    version: Any = None  # a change is traced anew
    totals: Collection[Variable] = ()  # each rank may keep a summand of them, see `place`
    eager: bool = False  # op by op, without a trace on one rank
    rows: int | None = None  # of every batch, or None
    # attributes that its traces took as constants; a change needs another step
    reads: Reads = field(default_factory=Reads)


class Trained(Protocol):
    """The model that a training needs; callbacks set the `stop_...` flags."""

    stop_training: bool  # set by callbacks to end the training
    stop_evaluating: bool  # likewise an evaluation
    stop_predicting: bool  # likewise a prediction

    @property
    def _compiled_optimizer(self) -> Optimizer:
        """Optimizer it was compiled with."""

    @property
    def variables(self) -> list[Variable]:
        """Weights and other state."""

    @property
    def weights(self) -> list[Variable]:
        """All weights."""

    @property
    def trainable_weights(self) -> list[Variable]:
        """Weights that are trained."""

    @property
    def metrics(self) -> list[Metric]:
        """Metrics, reset with every epoch and evaluation."""

    @property
    def _has_custom_steps(self) -> bool:
        """Whether a user wrote how it is trained."""

    @property
    def _skipped_steps(self) -> int | None:
        """Steps that the current training has skipped; None if it skips none."""

    def _make_step(self, name: str) -> Step:
        """Return the step "train", "test" or "predict"."""

    def _variables_on_device(self) -> list[Variable]:
        """Return all variables that a step may read or write."""

    def reset_metrics(self) -> None:
        """Start new means of loss and metrics."""

    def _finalize_weights(self) -> None:
        """Set the weights that a training ends with."""

    def _as_outputs(self, outputs: Mapping[str, Array]) -> Any:
        """Return a prediction's outputs, nested as the model's."""


class Programs:
    """Runs the steps of one model; `bucket_mb` bounds the 10^6 bytes of a message, gradients travel as `comm_dtype`."""

    def __init__(
        self,
        backend: Backend,
        comm: Communicator,
        bucket_mb: float | None = None,
        comm_dtype: str | None = None,
        sharding: Sharding | None = None,
        microbatches: int | None = None,
        *,
        variables: Callable[[], Iterable[Variable]] = tuple,
    ) -> None:
        self.backend, self.comm, self.sharding = backend, comm, sharding
        self._variables = variables
        self._microbatches, self._sums = microbatches, dict[Variable, None]()
        self._comm_dtype = comm_dtype if comm.size > 1 else None
        # Ranks prepare programs together, in one thread each.
        self._making: AbstractContextManager[None] = MAKING if comm.size == 1 else nullcontext()
        self._bucket_bytes = None if bucket_mb is None else max(int(bucket_mb * 1e6), 1)
        self._placed: OrderedDict[Any, PlacedProgram] = OrderedDict()
        self._any_size_cache: OrderedDict[Any, tuple[PlacedProgram, _Traced]] = OrderedDict()
        self._accessed: dict[Variable, None] = {}  # read or written variables
        self._traced: dict[Program, _Traced] = {}
        self._arenas: dict[tuple[Program, int], int] = {}  # by program and rows
        self.clock: Clock | None = None  # measures the next training steps
        self.preparing_seconds = 0.0  # that steps have been traced and compiled in
        self._prepared: OrderedDict[Any, _Prepared] = OrderedDict()
        self._halves: dict[Program, _Halves] = {}
        self._last: dict[str, tuple[PlacedProgram | None, Mapping[str, Array]]] = {}

    def placed(self, step: Step, batch: BatchSpec, batch_rows: int, *, whole: bool = False) -> PlacedProgram:
        """Return a step's program for global batches of `batch_rows` rows; `whole` ignores sharding."""
        if self.comm.size == 1:  # else ranks, of which one has a row more, would trace at different times
            batch = batch.rounded
        any_size = (step.name, step.version, bool(step.totals), batch.key, whole)
        key = (*any_size, batch_rows)
        placed = self._placed.get(key)
        if placed is None:
            with self._making, uncollected():
                return self._placed.get(key) or self._place(step, batch, batch_rows, any_size, whole)
        with suppress(KeyError):  # another thread has dropped it meanwhile
            self._placed.move_to_end(key)
        return placed

    def _place(self, step: Step, batch: BatchSpec, batch_rows: int, any_size: Any, whole: bool) -> PlacedProgram:
        """Place a step's program, in one thread at a time."""
        key = (*any_size, batch_rows)
        if any_size in self._any_size_cache:
            self._any_size_cache.move_to_end(any_size)
            of_another, traced = self._any_size_cache[any_size]
            placed = of_another.for_rows(batch_rows)
        else:
            begun = time.perf_counter()
            program, names = self._trace(step, batch, batch_rows)
            if self.sharding is None:
                program = with_chunked_logits(program, self.comm.replicas)
            self.preparing_seconds += time.perf_counter() - begun
            self._assign_stages(program, batch_rows)
            sent: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "comm_dtype": self._comm_dtype}
            placed = place(program, step.totals, **sent) if whole else self._of_rank(program, step.totals, sent)
            if self._has_stages:
                self._schedule(placed, self.comm.replicas == 1)  # now, so that all ranks share its errors
            depends = self._has_stages or _depends_on_batches(program, placed, step.totals)
            traced = _Traced(names, depends)
            if not placed.shape_specialised:
                self._any_size_cache[any_size] = placed, traced
            self._accessed |= dict.fromkeys(program.state)
        self._traced[placed] = traced
        self._placed[key] = placed
        self._drop_old()
        return placed

    def _of_rank(self, program: Program, totals: Collection[Variable], sent: Mapping[str, Any]) -> PlacedProgram:
        layouts = {} if self.sharding is None else self.sharding.layouts(program.state)
        slots = self.sharding.slots() if self.sharding is not None and layouts else {}
        placed = place(program, totals, layouts=layouts, slots=slots, alone=self.comm.size == 1, **sent)
        if self.sharding is None or not layouts:
            return placed
        return localized(placed, self.sharding.place, self.sharding.parts(layouts))

    # Pipelines

    @property
    def _has_stages(self) -> bool:
        return self.sharding is not None and self.sharding.stages > 1

    def _assign_stages(self, program: Program, batch_rows: int) -> None:
        """Assign layers to stages by the first program."""
        sharding = self.sharding
        if sharding is None or sharding.stages == 1 or sharding.has_stages:
            return
        rows = -(-batch_rows // self.comm.replicas)
        arguments = (sharding.weights, sharding.slots(), sharding.stages, rows)
        sharding.assign(cut_into_stages(program, *arguments, self._microbatches_of(batch_rows)))

    def _microbatches_of(self, batch_rows: int) -> int:
        assert self.sharding is not None
        return microbatches_of(batch_rows // self.comm.replicas, self.sharding.stages, self._microbatches)

    def _pipeline_executable(
        self, program: PlacedProgram, arrays: Mapping[str, Any], comm: Communicator | None, rows: int, first_row: int
    ) -> Executable:
        sharding, alone = self.sharding, comm is None or comm.replicas == 1
        assert sharding is not None
        schedule, parts = self._schedule(program, alone), sharding.parts(sharding.owners(program.state))
        self._sums |= dict.fromkeys(schedule.accumulators)
        place: dict[str, Any] = {"rows": rows, "first_row": first_row, "alone": alone, "parts": parts}
        return PipelineExecutable(schedule, program, self.backend, arrays, comm=sharding.comm, **place)

    def _schedule(self, program: PlacedProgram, alone: bool) -> PipelineSchedule:
        assert self.sharding is not None
        microbatches = self._microbatches_of(program.rows) if program.weight_gradients else 1
        key = "pipeline", microbatches, alone
        if key not in program.lowered:
            owners = self.sharding.owners(program.state)
            program.lowered[key] = schedule_of(program, owners, self.sharding.stages, microbatches, alone=alone)
        schedule: PipelineSchedule = program.lowered[key]
        if schedule.why_undivided and self._microbatches is not None:
            raise ConfigError(
                f"microbatches = {self._microbatches}: {schedule.why_undivided}; leave microbatches out, or choose 1"
            )
        return schedule

    def local(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return this rank's variables in memory: the parts of the sharded ones."""
        return list(variables) if self.sharding is None else self.sharding.local(variables)

    @staticmethod
    def _trace(step: Step, batch: BatchSpec, batch_rows: int) -> tuple[Program, list[str]]:
        """Return a step's program for `batch_rows` rows, and the names of its outputs in order."""
        inputs: dict[str, tuple[shapes.Shape, npt.DTypeLike]]
        inputs = {ROWS: ((Dim.rows(batch_rows),), np.int64)}
        inputs |= {name: spec for name, *spec in zip(batch.names, batch.shapes, batch.dtypes, strict=True)}  # type: ignore[misc]
        names: list[str] = []

        def traced(rows: Tensor, *stored: Tensor) -> Mapping[str, Any]:
            outputs = step.function(batch.filled([take_rows(array, rows) for array in stored]))
            names.extend(outputs)
            return outputs

        return trace(traced, inputs), names

    def computes_rows(self, step: Step, batch: BatchSpec, batch_rows: int) -> bool:
        """Return whether each row of a step's outputs depends on that row of the batch alone."""
        if step.eager or step.rows is not None:
            return False
        placed, traced = self._placed_and_traced(step, batch, batch_rows)
        if traced.by_row is None:
            traced.by_row = _computes_rows(placed) and not placed.shape_specialised
        return traced.by_row

    def depends_on_batches(self, step: Step, batch: BatchSpec, batch_rows: int) -> bool:
        """Return whether the results depend on how samples are cut into batches: ranks must then run together."""
        if step.rows is not None or (step.eager and self.comm.size == 1):  # which is not traced
            return True
        return self._placed_and_traced(step, batch, batch_rows)[1].depends_on_batches

    def _placed_and_traced(self, step: Step, batch: BatchSpec, batch_rows: int) -> "tuple[PlacedProgram, _Traced]":
        """Return a step's program and its `_Traced` record."""
        while True:
            placed = self.placed(step, batch, batch_rows)
            traced = self._traced.get(placed)
            if traced is not None:  # else another thread has dropped it meanwhile
                return placed, traced

    def turn(self, step: Step, batch: BatchSpec, batch_rows: int) -> AbstractContextManager[None]:
        """Keep other threads from changing what a step reads, if the step itself changes nothing."""
        if step.eager:  # its changes are unknown
            return TURNS.of(writes=self._eager_writes())
        placed = self.placed(step, batch, batch_rows)
        return TURNS.of(frozenset() if placed.writes else placed.reads)

    def run(
        self, step: Step, batch: BatchSpec, rows: BatchRows, steps: Sequence[Sequence[Shard]], *, alone: bool = False
    ) -> Mapping[str, Array]:
        """Run a step for each list of shards, of equal sizes; return the last one's outputs. Collective unless `alone`.

        Outputs that can be derived from the state are not among them. Threads may run steps, each with its own rows.
        """
        with compiling(f"the {step.name} step for batches of {steps[0][0].batch_rows:,} rows"):
            placed, outputs = self._run(step, batch, rows, steps, alone)
        self._last[step.name] = placed, outputs
        return outputs

    def _run(
        self, step: Step, batch: BatchSpec, rows: BatchRows, steps: Sequence[Sequence[Shard]], alone: bool
    ) -> tuple[PlacedProgram | None, Mapping[str, Array]]:
        """Run a step; also return its program."""
        comm = None if alone or self.comm.size == 1 else self.comm
        clock = self.clock if step.name == "train" and self.clock is not None and not self.clock.is_full else None
        if clock is not None and (step.eager or self._has_stages or steps[0][0].of is not None):
            raise ConfigError(
                "not supported: Profiler (--profile) with run_eagerly, stages or a fixed number of shards "
                "(--reproducible, shards_per_batch); leave out one of them"
            )
        if self._has_stages and (step.eager or steps[0][0].of is not None):
            what = "run_eagerly" if step.eager else "a fixed number of shards (--reproducible, shards_per_batch)"
            raise ConfigError(f"not supported: {what} with stages; leave out one of them")
        if step.eager:
            if steps[0][0].of is not None:
                raise ConfigError("not supported: run_eagerly with a fixed number of shards")
            with TURNS.of(writes=self._eager_writes()):
                return self._run_eagerly(step, batch, rows, steps, comm)
        if steps[0][0].of is not None:
            return self._run_shards(step, batch, rows, steps, comm)
        placed = self.placed(step, batch, steps[0][0].batch_rows)
        executable = self._executable(placed, batch, rows, steps[0][0], comm, clock)
        executable.run(rows.starts)
        return placed, executable.outputs

    def evaluate_alone(
        self, step: Step, batch: BatchSpec, arrays: Mapping[str, Array], numbers: Array, shard: Shard
    ) -> None:
        """Execute a step op by op on this rank's rows, without changing anything: for `watching`."""
        self._evaluated(self.placed(step, batch, shard.batch_rows), arrays, numbers, shard, None)

    def note(self, step: Step, batch: BatchSpec) -> None:
        """Make a step that this rank did not run the last one for `summed` and `logs`."""
        self._last[step.name] = self.placed(step, batch, step.rows or 1), {}

    def summed(self, step: Step) -> list[Variable]:
        """Return the totals of a step's last run that each rank has a summand of."""
        placed = self._last.get(step.name, (None, {}))[0]
        return [] if placed is None else [variable for variable in step.totals if variable in placed.summed]

    def logs(self, step: str) -> dict[str, float]:
        """Return a step's current outputs as numbers by name; waits for the device."""
        placed, outputs = self._last.get(step, (None, {}))
        values: dict[str, Any] = dict(outputs)
        if placed is not None and placed.derived is not None:
            values |= evaluate(placed.derived, {})[0]
        names = values if placed is None else self._traced[placed].names
        return {name: _number(step, name, values[name]) for name in names if name in values}

    def adopt(self, model: Trained, *, trains: bool) -> None:
        """Move a model's weights to the device; if it `trains`, its other state and the optimizer's slots as well."""
        if trains and model.trainable_weights:
            model._compiled_optimizer.build(model.trainable_weights)
        variables = self.local(model._variables_on_device() if trains else model.weights)
        try:
            self.backend.adopt(variables)
        except DeviceMemoryError as error:
            needed = sum(shapes.size(variable.shape) * variable.dtype.itemsize for variable in variables)
            raise DeviceError(f"{error}; the model alone takes {amount(needed)}: make it smaller") from error

    def arena_bytes(self, step: Step, batch: BatchSpec, shards: Sequence[Shard], *, alone: bool = False) -> int:
        """Estimate a step's device memory beside the state, and begin to prepare it on the device."""
        if step.eager:  # on the host
            return 0
        placed, rows = self.placed(step, batch, shards[0].batch_rows), max(shard.rows for shard in shards)
        if (placed, rows) not in self._arenas:
            if shards[0].of is None and not self._has_stages:  # stages split it into other programs
                alone = alone or self.comm.size == 1
                with compiling(f"the {step.name} step for batches of {shards[0].batch_rows:,} rows"):
                    self.backend.prepare(placed, shards[0].rows, shards[0].first_row, alone=alone)
            # Beside them are results, constants, and messages to other ranks.
            self._arenas[placed, rows] = int(1.25 * self.backend.planned_bytes(placed, rows))
        return self._arenas[placed, rows]

    def settle(self, steps: Iterable[tuple[Step, BatchSpec, Sequence[Shard]]]) -> None:
        """Let the device measure its choices for steps of batches like these. Collective."""
        if not self.backend.measures:
            return
        traced = [(step, batch, shards) for step, batch, shards in steps if shards and not step.eager]
        measured = [
            (self.placed(step, batch, shards[0].batch_rows), max(shard.rows for shard in shards))
            for step, batch, shards in traced
        ]
        self.backend.settle(measured, self.comm)

    @property
    def variables(self) -> list[Variable]:
        """Variables that steps have read or written so far, a user's own included."""
        return list(self._accessed)

    @property
    def nbytes(self) -> int:
        """Device memory of prepared programs, without their state."""
        return sum(prepared.executable.nbytes for prepared in list(self._prepared.values()))

    def forget(self) -> None:
        """Release prepared programs."""
        self._placed.clear()
        self._any_size_cache.clear()
        self._accessed.clear()
        self._traced.clear()
        self._arenas.clear()
        while self._halves:
            self._halves.popitem()[1].close()
        self._drop_prepared()
        self.backend.release(self._sums)
        self._sums.clear()
        if self.sharding is not None:
            self.backend.release(self.sharding.forget_copies())

    def _drop_old(self) -> None:
        """Drop the programs that were not used for the longest time, and their records."""
        while _are_too_many([placed for placed, _ in self._any_size_cache.values()]):
            self._any_size_cache.popitem(last=False)
        while _are_too_many(list(self._placed.values())):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        in_use = {placed for placed, _ in list(self._last.values())}
        key, old = next((key, candidate) for key, candidate in self._placed.items() if candidate not in in_use)
        halves = self._halves.pop(old, None)
        dropped = {old, *([] if halves is None else [halves.before])}
        for prepared in [prepared_key for prepared_key in list(self._prepared) if prepared_key[0] in dropped]:
            self._prepared.pop(prepared).executable.close()
        if halves is not None:
            halves.close()
        self._arenas = {arena: size for arena, size in self._arenas.items() if arena[0] is not old}
        del self._traced[old], self._placed[key]

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._prepared.popitem()[1].executable.close()

    def _executable(
        self,
        program: Program,
        batch: BatchSpec,
        rows: BatchRows,
        shard: Shard,
        comm: Communicator | None,
        clock: Clock | None = None,
    ) -> Executable:
        key = (program, shard.rows, shard.first_row, id(rows.order), *map(id, rows.arrays), comm is None, clock)
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.is_valid:
            with self._making:
                prepared = self._prepare(key, program, batch, rows, shard, comm, clock)
        with suppress(KeyError):  # another thread has dropped it meanwhile
            self._prepared.move_to_end(key)
        prepared.executable.samples = rows.samples
        return prepared.executable

    def _prepare(
        self,
        key: Any,
        program: Program,
        batch: BatchSpec,
        rows: BatchRows,
        shard: Shard,
        comm: Communicator | None,
        clock: Clock | None,
    ) -> "_Prepared":
        """Prepare an executable, in one thread at a time."""
        if key in self._prepared:  # its variables have moved with another model that shares them
            self._prepared.pop(key).executable.close()
        arrays = {ROWS: rows.order} | dict(zip(batch.names, rows.arrays, strict=True))
        place: dict[str, Any] = {"rows": shard.rows, "first_row": shard.first_row, "comm": comm}
        place |= {} if clock is None else {"clock": clock}
        begun = time.perf_counter()
        try:
            with phase.during("compilation"):
                together = self._prepare_together(program, comm)
                executable = self._beside_others(program, arrays, place) if self._prepared or together else None
                if together and comm is not None and not all(comm.allgather(executable is not None)):
                    if executable is not None:
                        executable.close()
                    executable = None
                if executable is None:
                    self._drop_prepared()  # programs of other batches, prepared again when needed
                    executable = self._build_executable(program, arrays, place)
        except (DeviceMemoryError, MemoryError) as error:
            raise DeviceError(f"{error}; {_what_fits(program, shard.rows, error, self.backend)}") from error
        self.preparing_seconds += time.perf_counter() - begun
        moves = {variable: variable.moves for variable in program.state}
        prepared = self._prepared[key] = _Prepared(executable, rows, moves)
        if len(self._prepared) > _MAX_PREPARED:
            self._prepared.popitem(last=False)[1].executable.close()
        return prepared

    def _prepare_together(self, program: Program, comm: Communicator | None) -> bool:
        """Return whether ranks must prepare a program together: they record graphs of messages between GPUs."""
        if comm is None or comm.size == 1 or self.backend.transport != "nccl" or not isinstance(program, PlacedProgram):
            return False
        return self._has_stages or messages.count(program) > 0

    def _beside_others(
        self, program: Program, arrays: Mapping[str, Any], place: Mapping[str, Any]
    ) -> Executable | None:
        """Prepare a program, or return None if the device's memory is full."""
        with suppress(DeviceMemoryError):
            return self._build_executable(program, arrays, place)
        return None

    def _build_executable(self, program: Program, arrays: Mapping[str, Any], place: Mapping[str, Any]) -> Executable:
        if self._has_stages and isinstance(program, PlacedProgram):
            return self._pipeline_executable(program, arrays, **place)
        return self.backend.executable(program, arrays, **place)

    def _run_shards(
        self, step: Step, batch: BatchSpec, rows: BatchRows, steps: Sequence[Sequence[Shard]], comm: Communicator | None
    ) -> tuple[PlacedProgram, Mapping[str, Array]]:
        """Run a step for each of a batch's fixed shards, and add their sums in a tree that depends on their number."""
        step = replace(step, totals=())  # ranks' summands would depend on their shards
        placed = self.placed(step, batch, steps[0][0].batch_rows, whole=True)
        if placed not in self._halves:
            with phase.during("compilation"):
                cut = partial(_cut, placed, self.sharding)
                halved = cut() if comm is None else comm.agree("fit", cut)
                self._halves[placed] = _Halves(halved, self.backend, self.sharding)
        halves = self._halves[placed]
        before, names = halves.before, list(halves.before.outputs)
        starts = iter(rows.starts)
        for shards in steps:
            halves.gather()
            tree = TreeSum(shards[0].number)
            for shard in shards:
                executable = self._executable(before, batch, rows, shard, None)
                executable.run([next(starts)])
                tree.add([executable.outputs[name] for name in names])
            replicas = None if comm is None else comm.along(BATCH)
            sums = messages.tree_reduced(tree, shards[0].of or 1, replicas)
            outputs = halves.finish(dict(zip(names, sums, strict=True)))
        return placed, outputs

    def _eager_writes(self) -> frozenset[Variable]:
        return frozenset(self._variables())

    def _run_eagerly(
        self, step: Step, batch: BatchSpec, rows: BatchRows, steps: Sequence[Sequence[Shard]], comm: Communicator | None
    ) -> tuple[PlacedProgram | None, Mapping[str, Array]]:
        placed: PlacedProgram | None = None
        outputs: Mapping[str, Array] = {}
        order = self.backend.download(rows.order)
        arrays = [self.backend.download(array) for array in rows.arrays]
        for number, (shards, start) in enumerate(zip(steps, rows.starts, strict=True)):
            (shard,) = shards
            chosen = order[start : start + shard.rows]
            batch_arrays = [array[chosen] for array in arrays]
            with watching(), np.errstate(all="ignore"):
                if self.comm.size == 1:
                    # Marked rows, as in a trace: what depends on them (random numbers, say) is then the same.
                    counted = [(Dim.rows(len(array)), *array.shape[1:]) for array in batch_arrays]
                    data = [
                        Tensor(None, (), {}, shape, array.dtype, array)
                        for shape, array in zip(counted, batch_arrays, strict=True)
                    ]
                    with abandoned_after(number):
                        results = step.function(batch.filled(data))
                    outputs = {name: np.asarray(value) for name, value in results.items()}
                else:
                    placed = self.placed(step, batch, shard.batch_rows)
                    named = dict(zip(batch.names, arrays, strict=True))
                    with abandoned_after(number):
                        outputs, updates = self._evaluated(placed, named, chosen, shard, comm)
                    for variable, value in updates.items():
                        variable.assign(value)
        return placed, outputs

    @staticmethod
    def _evaluated(
        placed: PlacedProgram, arrays: Mapping[str, Array], numbers: Array, shard: Shard, comm: Communicator | None
    ) -> tuple[Mapping[str, Array], Mapping[Variable, Array]]:
        return evaluate(placed, {ROWS: numbers, **arrays}, rows=shard.rows, first_row=shard.first_row, comm=comm)


def _are_too_many(programs: Collection[PlacedProgram]) -> bool:
    """Whether one of the cached programs must be dropped."""
    count = len(programs)
    return count > _MAX_PLACED and (count > _MAX_SMALL or sum(len(p.tensors) for p in programs) > _MAX_TENSORS)


@dataclass(frozen=True, eq=False)
class _Prepared:
    executable: Executable
    rows: BatchRows  # kept so that ids stay unique
    moves: Mapping[Variable, int]  # of its variables when it was made

    @property
    def is_valid(self) -> bool:
        return all([variable.moves == moves for variable, moves in self.moves.items()])


@dataclass
class _Traced:
    names: list[str]  # outputs in order
    depends_on_batches: bool  # on how samples are cut into batches
    by_row: bool | None = None  # see `Programs.computes_rows`; None before the first call


def _depends_on_batches(program: Program, placed: PlacedProgram, totals: Collection[Variable]) -> bool:
    """Return whether a step's results depend on how samples are cut into batches."""
    counts_batches = bool(placed.updates.keys() - placed.summed)
    draws = any(tensor.op is not None and tensor.op.by_row for tensor in with_steps(placed.tensors))
    return (
        placed.shape_specialised
        or counts_batches
        or draws
        or messages.count(placed) > 0
        or not sums_over_samples(program, totals)
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """A step cut in two at its one sync point with the other ranks.

    The first half reads whole copies of sharded variables, gathered before each step; the second makes its parts of new
    values from the sums. So no sum depends on the mesh.
    """

    before: Program  # its outputs are the summands
    after: Program  # its inputs are the sums
    copies: Mapping[Variable, Variable]  # of sharded variables, for whole values


def _cut(placed: PlacedProgram, sharding: Sharding | None) -> _Cut:
    """Cut a step in two, placed as if no variable were sharded."""
    before, after = messages.split(placed)
    layouts = {} if sharding is None else sharding.layouts(placed.state)
    if sharding is None or not layouts:
        return _Cut(before, after, {})
    read = dict.fromkeys(tensor.variable for tensor in before.tensors if tensor.variable is not None)
    copies = {variable: sharding.copy(variable) for variable in read if variable in layouts}
    before = _reading(before, copies)
    used = {tensor.variable for tensor in before.tensors}
    before = replace(before, state={variable: tensor for variable, tensor in before.state.items() if variable in used})
    laid = place(_reading(after, copies), layouts=layouts)
    added_up = [tensor.inputs[0] for tensor in laid.tensors if tensor.op in (ALL_REDUCE, REDUCE_SCATTER)]
    if added_up:
        name = added_up[0].name if added_up[0].op is None else added_up[0].op.name
        raise ConfigError(
            f"the optimizer's {name} over sharded variables depends on the mesh: not supported with a fixed number of "
            "shards; leave out train.shards_per_batch and --reproducible, or do not shard variables"
        )
    return _Cut(before, localized(laid, sharding.place, sharding.parts(layouts)), copies)


class _Halves:
    """A step cut in two, with the second half prepared. Collective."""

    def __init__(self, cut: _Cut, backend: Backend, sharding: Sharding | None) -> None:
        self.before, self._copies = cut.before, cut.copies
        self._backend, self._sharding = backend, sharding
        inputs = cut.after.inputs
        self._sums = {
            name: backend.empty(tuple(map(int, tensor.shape)), tensor.dtype) for name, tensor in inputs.items()
        }
        self._after = backend.executable(cut.after, self._sums, comm=None if sharding is None else sharding.comm)

    def gather(self) -> None:
        """Gather whole copies of the sharded variables. Collective."""
        for variable, copy in self._copies.items():
            assert self._sharding is not None
            copy.assign(self._sharding.read(variable))

    def finish(self, sums: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute the second half with the sums over all shards; return its outputs."""
        for name, value in sums.items():
            self._backend.write(self._sums[name], value)
        self._after.run()
        return self._after.outputs

    def close(self) -> None:
        self._after.close()


def _reading(program: Program, copies: Mapping[Variable, Variable]) -> Program:
    """Return a program that reads copies of some variables; its updates stay."""
    read = {variable: copy for variable, copy in copies.items() if variable in program.state}
    replacements = {
        program.state[variable]: placeholder(copy.shape, copy.dtype, copy._path, copy)
        for variable, copy in read.items()
    }
    state = {**program.state, **{copy: replacements[program.state[variable]] for variable, copy in read.items()}}
    return replace(rewritten(program, lambda tensor: replacements.get(tensor, tensor)), state=state)


def _computes_rows(placed: PlacedProgram) -> bool:
    """Return whether each row of the outputs is made of the same row of the batch and nothing else."""
    if placed.updates or messages.count(placed):
        return False
    tensors = with_steps(placed.tensors)
    if any(
        tensor.counts_rows or (tensor.op is not None and (tensor.op.by_row or tensor.op is OWN_PART))
        for tensor in tensors
    ):
        return False
    leading = [output.shape[0] if output.shape else 0 for output in placed.outputs.values()]
    return all(isinstance(n, Dim) and n.scale == 1 for n in leading)


def _what_fits(program: Program, rows: int, error: BaseException, backend: Backend) -> str:
    """Return how many rows would fit in memory, or that only a smaller model helps."""
    state = sum(shapes.size(variable.shape) * variable.dtype.itemsize for variable in program.state)
    beside = f"the model alone takes {amount(state)}"
    if not isinstance(error, DeviceMemoryError):
        results = amount(backend.planned_bytes(program, rows))
        return f"{beside}, and {rows} rows of a batch {results}: use a smaller batch_size"
    usable = 0.95 * error.free  # drivers round allocations up
    planned = partial(backend.planned_bytes, program)
    fitting = bisect.bisect_right(range(rows), usable, lo=1, key=planned) - 1
    if fitting >= 1:
        return f"a batch of about {fitting} rows per rank would fit instead of {rows}"
    return f"{beside}: make it smaller, or use less data"


def _number(step: str, name: str, value: Any) -> float:
    if np.size(value) != 1:
        raise ConfigError(f"{step}_step: log {name!r} has shape {np.shape(value)}: expected a single number")
    return float(np.reshape(value, ()))
