"""A model's device: what trains it there, how ranks divide it, and what they agree on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy.typing as npt

from dptrain.backend.base import Backend
from dptrain.comm import Communicator, Same
from dptrain.comm.mesh import BATCH, MeshCommunicator
from dptrain.errors import AgreedError, ConfigError, DeviceError, DeviceMemoryError
from dptrain.models.compiled import Compiled
from dptrain.models.structure import Structure
from dptrain.optimizers import Optimizer
from dptrain.program.tensor import Variable
from dptrain.program.turns import MAKING
from dptrain.runtime.failure import end_job, phase
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.saving.parts import Part
from dptrain.train.devices import open_backend
from dptrain.train.guard import StepGuard
from dptrain.train.programs import Programs, Trained
from dptrain.train.sharding import Sharding
from dptrain.train.trainer import Trainer
from dptrain.train.transports import choose_transport

T = TypeVar("T")
Array = npt.NDArray[Any]


class OnDevice(Structure):
    """Moves a model to its device and back, and connects it with the other ranks."""

    _compiled: Compiled | None
    _guard: StepGuard | None  # of the current training
    _backend: Backend | None = None  # the model's device
    _programs: Programs | None = None
    _fit_trainer: Trainer | None = None
    _trained_with: Communicator | None = None

    @property
    def _device_options(self) -> dict[str, Any]:
        """Keywords of `dptrain.train.devices.open_backend`, from `compile`."""
        return dict(self._compiled.device) if self._compiled else {}

    def _put_on(self, backend: Backend | None) -> None:
        """Move the model and its state to an open backend, or to its own (None)."""
        self._leave_device()
        self._backend = backend

    def _open_device(self, comm: Communicator) -> Backend:
        """Return the model's device, opened at the first call. Collective."""
        if self._backend is None:
            options = self._device_options or {"dtype": self.dtype_policy.name}
            self._backend = open_backend(comm, **options)
        return self._backend

    def _describe_device(self, comm: Communicator) -> str:
        backend = self._open_device(comm)
        if self._sharding(comm) is None:
            self._agreed(comm, "device", lambda: backend.adopt(self.weights))
        return backend.description

    def _open_trainer(self, comm: Communicator) -> Trainer:
        """Return the trainer on the model's device. Collective at the first call."""
        trainer = self._fit_trainer
        if comm.size == 1 and trainer is not None and self._trained_with is comm:
            return trainer
        with MAKING if comm.size == 1 else nullcontext():
            return self._make_trainer(comm)

    def _make_trainer(self, comm: Communicator) -> Trainer:
        """Make the trainer; in one thread at a time."""
        sharded = self._programs is not None and self._programs.sharding is not None
        if self._trained_with is not comm and (sharded or isinstance(comm, MeshCommunicator)):  # another mesh
            self._leave_device()
        if self._fit_trainer is None:
            self._trained_with = comm
            backend, compiled = self._open_device(comm), self._compiled
            comm.require_same("the ranks have compiled the model differently", self._describe_computing())
            choose_transport(backend, comm, "host" if compiled is None else compiled.comm)
            sent = {} if compiled is None else compiled.marked("of_programs")
            sharding = self._sharding(comm)
            ranks = comm if sharding is None else sharding.comm
            self._programs = Programs(backend, ranks, **sent, sharding=sharding, variables=self._variables_on_device)
            steps = None if compiled is None else compiled.steps_per_execution
            data_mb = None if compiled is None else compiled.device_mb
            self._fit_trainer = Trainer(
                cast(Trained, self),  # as its subclasses are
                self._programs,
                steps_per_execution=steps,
                data_bytes=None if data_mb is None else int(data_mb * 1e6),
            )
        return self._fit_trainer

    def _sharding(self, comm: Communicator) -> Sharding | None:
        """Return how ranks divide variables; None if each has all of them. Collective."""
        shards = None if self._compiled is None else self._compiled.shards
        if comm.size == 1 or (shards is None and not isinstance(comm, MeshCommunicator)):
            return None
        mesh = comm if isinstance(comm, MeshCommunicator) else MeshCommunicator(comm, {BATCH: comm.size})
        return Sharding(mesh, self, shards)

    @property
    def _all_optimizers(self) -> list[Optimizer]:
        """The optimizer of `compile`, and those of custom steps."""
        optimizers: list[Any] = self._attributes(Optimizer)
        return list(
            {
                id(optimizer): optimizer
                for optimizer in [*optimizers, *([self._compiled.optimizer] if self._compiled else [])]
            }.values()
        )

    def _part_of(self, variable: Variable, comm: Communicator) -> Part:
        """Return this rank's part of a variable, and the ranks with the same. Collective."""
        sharding = None if self._programs is None else self._programs.sharding
        if sharding is not None:
            return sharding.part(variable)
        whole = tuple(map(int, variable.shape))
        return Part(variable, (0,) * len(whole), whole, comm)

    def _local_weights(self) -> list[Array]:
        return [variable.numpy() for variable in self._local(self.weights)]

    def _set_local_weights(self, values: Sequence[Array]) -> None:
        weights = self.weights
        if len(values) != len(weights):
            raise ConfigError(f"{self._display_name}: found values of {len(values)} weights, expected {len(weights)}")
        for weight, local, value in zip(weights, self._local(weights), values, strict=True):
            (local if value.shape == local.shape else weight).assign(value)

    @contextmanager
    def _readable_on(self, rank: int = 0) -> Iterator[None]:
        """Gather sharded variables on a rank within this context. Collective."""
        sharding = None if self._programs is None else self._programs.sharding
        with nullcontext() if sharding is None else sharding.fetched(self._variables_on_device, rank):
            yield

    def _describe_computing(self) -> dict[str, Any]:
        """Return what all ranks must have compiled alike, by name."""
        layers = [layer for layer in self._flatten_layers()[1:] if layer.dtype_policy != self.dtype_policy]
        policies = [
            self.dtype_policy.name,
            *(f"{layer._display_name} in {layer.dtype_policy.name}" for layer in layers),
        ]
        facts: dict[str, Any] = {"dtype": ", ".join(policies)}
        if self._compiled is not None:
            compiled, optimizer = self._compiled, self._compiled.optimizer
            facts["optimizer and loss_scale_factor"] = [type(optimizer).__name__, optimizer.loss_scale_factor]
            facts |= compiled.marked("agreed")
        return facts

    def _release_device(self) -> None:
        """Free the device's memory at once; weights and the optimizer's state are lost."""
        if self._programs is not None:
            self._programs.forget()
        if self._backend is not None:
            self._backend.release(self._on_device())
        self._backend = self._programs = self._fit_trainer = None

    def _leave_device(self) -> None:
        """Move everything back to the host."""
        if self._backend is not None:
            variables = self._on_device()
            for variable in self._variables_on_device():
                variable._move(None)
            self._backend.release(variables)
        self._release_device()

    def _on_device(self) -> list[Variable]:
        return self._local(self._variables_on_device())

    def _local(self, variables: list[Variable]) -> list[Variable]:
        return variables if self._programs is None else self._programs.local(variables)

    def _variables_on_device(self) -> list[Variable]:
        """Return all that a step may read or write: weights, random numbers, optimizers, metrics."""
        variables = list(self.variables)
        for optimizer in self._all_optimizers:
            variables += optimizer.variables
        for metric in self.metrics:
            variables += metric.variables
        variables += [] if self._guard is None else self._guard.variables
        variables += [] if self._programs is None else self._programs.variables
        return list({id(variable): variable for variable in variables}.values())

    @property
    def _skipped_steps(self) -> int | None:
        """Number of skipped steps of the current training; None if none can be skipped."""
        return None if self._guard is None else int(self._guard.skipped)

    # Together with the other ranks

    def _agreed(self, comm: Communicator, where: str, action: Callable[[], T], same: Same[T] | None = None) -> T:
        """Run an action that may raise: alone it raises as in Keras, with several ranks it raises on all."""
        return action() if comm.size == 1 else comm.agree(where, action, same)

    @contextmanager
    def _collective(self, comm: Communicator) -> Iterator[None]:
        """End the job if an error of this rank alone would leave the others waiting."""
        try:
            try:
                yield
            except DeviceMemoryError as error:
                raise DeviceError(str(error)) from error
            phase.enter("user code")
        except AgreedError:
            phase.fail()
            raise
        except BaseException as error:
            if comm.size > 1 and detect_launch() is not None:  # else a forked process, which may leave alone
                end_job(error)
            raise
