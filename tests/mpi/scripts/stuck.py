"""Leaves the other ranks waiting on one rank, in one of many ways. Arguments: way rank."""

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

way, bad = sys.argv[1], int(sys.argv[2])
mine = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == bad
if mine and way.startswith("before: "):  # dptrain is imported
    if way == "before: stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "before: sleep":
        time.sleep(60)
    raise ValueError("early")


def sleep_early() -> None:
    time.sleep(60)


if mine and way == "early hook":  # called after dptrain's own, at the very end
    atexit.register(sleep_early)


class WithDestructor:
    """Destroyed when Python ends: after all exit handlers, when no other thread runs."""

    def __init__(self, deed: Callable[[], object]) -> None:
        self._deed = deed

    def __del__(self) -> None:
        self._deed()


import numpy as np  # noqa: E402

import dptrain as dp  # noqa: E402
from dptrain.backend.cpu.node_sums import NodeSums  # noqa: E402
from dptrain.cli.main import main  # noqa: E402
from dptrain.comm import Communicator, current  # noqa: E402
from dptrain.comm.mesh import MeshCommunicator  # noqa: E402
from dptrain.runtime.failure import phase  # noqa: E402
from dptrain.runtime.watch import watchdog  # noqa: E402
from dptrain.train.pipeline import PipelineExecutable  # noqa: E402

x = np.random.default_rng(0).integers(0, 256, (64, 4), np.uint8)
y = (x[:, 0] // 128).astype(np.int64)


def until_seen() -> None:
    """Wait until the others can have seen where this rank is, which the watchdog's thread says now and then."""
    while not watchdog.record().place:
        time.sleep(0.01)


def until_others_wait() -> None:
    """Wait until this rank knows that all others are in the collective after its last one."""
    dog = watchdog._watchdog
    while any(position <= dog.record.position for position in dog.positions().values()):
        time.sleep(0.01)


def on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    while True:
        pass


def hold_pythons_lock() -> None:
    ctypes.PyDLL(None).sleep(60)  # one call of C


kept: list[object] = []
DEEDS = {
    "stop": stop,
    "loop": loop,
    "lock": hold_pythons_lock,
    "sleep": lambda: time.sleep(60),
    "slow": lambda: time.sleep(3),
    "thread": lambda: threading.Thread(target=lambda: time.sleep(60), name="loader").start(),
    "hook": lambda: atexit.register(lambda: time.sleep(60)),
    "destructor sleeps": lambda: kept.append(WithDestructor(functools.partial(time.sleep, 60))),
    "destructor meets": lambda: kept.append(WithDestructor(current().barrier)),
    "finalizer sleeps": lambda: weakref.finalize(current, time.sleep, 60),
    "finalizer meets": lambda: weakref.finalize(current, current().barrier),
    "thread hook sleeps": lambda: threading._register_atexit(time.sleep, 60),  # type: ignore[attr-defined]
    "thread hook meets": lambda: threading._register_atexit(current().barrier),  # type: ignore[attr-defined]
    "thread hook raises": lambda: threading._register_atexit(lambda: [][0]),  # type: ignore[attr-defined]
    "exit 0": lambda: sys.exit(0),
    "exit 3": lambda: sys.exit(3),
    "os exit 0": lambda: os._exit(0),
    "exit of C": lambda: ctypes.CDLL(None)._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "other call": lambda: current().node_barrier(),
    "other sum": lambda: current().allreduce_sum(np.zeros(100)),
    "raise": lambda: [][0],
    "other counts": lambda: gather(group, [7000, 3000]),
    "scatter": lambda: scatter(group),
    "other size": lambda: add(8),
    "other elements": lambda: current().allreduce_sum(np.zeros(99_999, np.float32)),
}


def gather(comm: Communicator, counts: list[int]) -> None:
    comm.all_gather(np.zeros(counts[comm.rank]), np.zeros(10_000), counts)


def scatter(comm: Communicator) -> None:
    comm.reduce_scatter(np.zeros(10_000), np.zeros(5000), [5000, 5000])


@functools.cache
def sums_of(size: int) -> NodeSums:
    message = group.node_messages([(size, np.dtype(np.float32))])
    assert message is not None
    return NodeSums(message)


def add(size: int) -> None:
    part, total = sums_of(size).memory(0)
    part[:] = 1
    sums_of(size).sum(0)
    assert (total == group.size).all()


MEETINGS = {
    "sum": lambda: add(9),
    "gather": lambda: gather(group, [3000, 7000]),
    "scatter": lambda: scatter(group),
    "exchange": lambda: group.all_to_all(np.zeros(6), [3, 3], np.zeros(6), [3, 3]),
    "split": lambda: current().group([current().rank]),
    "nodes": lambda: current().allreduce_sum(np.zeros(100_000, np.float32)),
}
when, _, deed = way.partition(": ")


class Hook(dp.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs=None) -> None:
        if batch == 2 and mine:
            until_seen()
            DEEDS[deed]()


class Net(dp.Sequential):
    def get_config(self) -> dict:
        if when == "save" and mine:
            DEEDS[deed]()
        return super().get_config()


class SweepHook(dp.callbacks.Callback):
    """Not where a sweep tries some steps first, while the other ranks wait."""

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        if epoch == 1 and mine and watchdog.record().rounds:
            until_seen()
            DEEDS[deed]()


def build(units: int) -> dp.Sequential:
    model = dp.Sequential([dp.layers.Dense(units, input_shape=(4,)), dp.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


if when == "sweep":
    arguments = {"x": x, "y": y, "epochs": 2, "verbose": 0, "callbacks": lambda: [SweepHook()]}
    dp.sweep(build, {"units": [2, 3]}, seeds=[1, 2], **arguments)
    print("swept", flush=True)
    sys.exit()
if when == "stage":  # in the middle of a step
    execute = PipelineExecutable._execute

    def execute_or_not(self, turn, *arguments):
        if mine and phase.step == 3 and turn.microbatch == 2:
            until_seen()
            DEEDS[deed]()
        execute(self, turn, *arguments)

    PipelineExecutable._execute = execute_or_not
    stack = [dp.layers.Dense(4, "relu") for _ in range(current().size)]
    net = dp.Sequential([dp.Input((4,)), *stack, dp.layers.Dense(2, "softmax")])
    net.compile("sgd", "sparse_categorical_crossentropy", stages=current().size, steps_per_execution=1)
    net.fit(x, y, batch_size=8, verbose=0)
    sys.exit()
if when in MEETINGS:  # of groups of two ranks, or of all where they are on nodes
    lengths = {"batch": current().size} if when == "nodes" else {"batch": current().size // 2, "model": 2}
    mesh = MeshCommunicator(current(), lengths)
    group = mesh.along(list(lengths)[-1])
    phase.enter("training")
    if when == "sum":
        sums_of(9), sums_of(8)
    for step in range(1, 5):
        phase.epoch, phase.step = 1, step
        if step == 3 and mine:
            until_seen()
            DEEDS[deed]()
        MEETINGS[when]()
    mesh.barrier()
    sys.exit()
if when == "caught":  # an error inside a collective's own Python, which somebody takes for a small thing
    comm = current()
    comm.barrier()
    if mine:
        until_others_wait()
        sys.modules["dptrain.comm.mpi"].bytearray = lambda size: [][size] if on_main_thread() else bytearray(size)
    with contextlib.suppress(IndexError):
        comm.allgather("a fact")
    if mine:
        DEEDS[deed]()
    comm.barrier()
    sys.exit()
if when == "help":
    sys.exit(main(["--help"] if mine else ["--fast-dev-run"]))
if when == "start" and mine:
    DEEDS[deed]()
model = Net([dp.layers.Dense(2, "softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy")
if when == "never" and mine:
    sys.exit()
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Hook()] if when == "hook" else [])
print("trained", flush=True)
if when == "between" and mine:
    DEEDS[deed]()
if when == "save":
    model.save("model.keras")
if when != "end":
    model.evaluate(x, y, verbose=0)
elif mine:
    until_seen()
    DEEDS[deed]()
