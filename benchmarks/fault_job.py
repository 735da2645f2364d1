"""What is planted, and the job in which it is: a script with checkpoints, two trainings, a file and an evaluation.

`faults.py` starts it on each rank: `python fault_job.py FAULT`, the fault as JSON. dptrain is imported where a script
would import it: some faults come before.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Seconds: the stall timeout of the jobs, and after which a job is hung. What is not training has four times the former.
STALL, LIMIT = 2, 60
# Of the jobs: samples of a batch, which 2, 3 and 4 divide; steps of an epoch, and between digests and checkpoints.
BATCH, STEPS, EVERY = 24, 8, 3
# Of a training by the command line.
SMALL = ("--epochs", "6", "--batch-size", "16", "--hidden", "16", "--dropout", "0.2", "--verbose", "2")

BEFORE = "before the import"
IN_FIT = ("a step", "the end of an epoch", "a checkpoint")
IN_SCRIPT = ("start-up", "before fit", *IN_FIT, "a save", "between fits")
ALWAYS = (*IN_SCRIPT, "the end")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    weight: int  # how often it is drawn
    moments: Sequence[str]  # when it may happen
    codes: Sequence[int] = ()  # allowed exit codes, none for any but 0; with 0 it is harmless


# MPICH's mpirun adds the 9 of ranks that it kills to a rank's 1. A rank that loops or calls os._exit(0) at the end of
# its script keeps nobody from anything, and may.
FAULTS = {
    "SIGSTOP": Kind(5, (BEFORE, *ALWAYS), [77]),
    "endless loop": Kind(3, IN_SCRIPT, [77]),
    "loop with Python's lock": Kind(2, IN_SCRIPT, [77]),
    "sleep": Kind(3, (BEFORE, *IN_SCRIPT), [77]),
    "return": Kind(4, ("start-up", "before fit", "between fits"), [77]),
    "sys.exit(0)": Kind(4, (BEFORE, *IN_SCRIPT), [77]),
    "sys.exit(3)": Kind(3, (BEFORE, *IN_SCRIPT), [3, 77]),
    "sys.exit(256)": Kind(3, (*IN_SCRIPT, "the end"), [1, 77]),
    "os._exit(0)": Kind(4, IN_SCRIPT, [77]),
    "os._exit(256)": Kind(2, ALWAYS, [1, 9, 77]),
    "C's _exit(0)": Kind(4, (BEFORE, *ALWAYS), [77]),
    "C's _exit(0) on all ranks": Kind(3, (*IN_FIT[:2], "between fits", "the end"), [77]),
    "MPI_Abort(0)": Kind(3, (*IN_FIT, "a save", "between fits", "the end"), [1]),
    "exception": Kind(2, ALWAYS, [1, 70]),
    "exception before the import": Kind(3, (BEFORE,), [1, 77]),
    "exception with an excepthook of its own": Kind(3, ALWAYS, [1, 70, 77]),
    "return with its streams closed": Kind(2, ("before fit", "between fits"), [1, 77]),
    "forks that leave": Kind(3, ("before fit", *IN_FIT, "between fits", "the end"), [0]),
    "a program of its own": Kind(2, ("before fit", "between fits", "the end"), [0]),
    "kill -9": Kind(3, (BEFORE, *ALWAYS)),
    "--help": Kind(1, ("start-up",), [77]),
    "another call": Kind(2, ("before fit", "a step", "the end of an epoch", "between fits"), [2, 77]),
    # In samples that all ranks have and this one trains with; in the same place, but on this rank alone.
    "NaN in its rows": Kind(2, ("before fit",), [76]),
    "NaN in its copy": Kind(1, ("before fit",), [2]),
    "flipped bit in a weight": Kind(2, ("a step", "the end of an epoch"), [76]),
    "flipped bit in a slot": Kind(2, ("a step", "the end of an epoch"), [76]),
    "learning rate": Kind(1, ("a step", "the end of an epoch"), [76]),
    "SIGTERM": Kind(2, ("start-up", *IN_FIT), [75]),
    "SIGUSR1": Kind(2, ("start-up", *IN_FIT), [75]),
    "SIGINT": Kind(2, ("start-up", *IN_FIT), [130]),
    "SIGTERM to mpirun": Kind(2, ("start-up", *IN_FIT), [75]),
    "SIGUSR1 to mpirun": Kind(2, ("start-up", *IN_FIT), [75]),
    "SIGINT to mpirun": Kind(2, ("start-up", *IN_FIT), [130]),
}
# Drawn with `--ends` alone: a rank that does not end, files that fail under a training, errors that are hard to see.
ENDS = {
    "sleep at the end": Kind(2, ("the end",), [77]),
    "thread that stays": Kind(2, ("before fit", "a step", "between fits", "the end"), [77]),
    "atexit function that stays": Kind(2, ("before fit", "a step", "between fits", "the end"), [77]),
    "mapped file cut short": Kind(4, IN_FIT[:2], [65]),
    "full disk": Kind(2, ("a checkpoint",), [74]),
    "full disk under a sharded checkpoint": Kind(4, IN_FIT[:2], [74]),
    "exception without sys.stderr": Kind(2, ALWAYS, [1, 70]),
    "error in a collective that is caught": Kind(3, IN_FIT[:2], [1, 70, 77]),
    "fork that goes on": Kind(2, ("between fits",), [0]),
    "unknown MPLBACKEND": Kind(1, ("start-up",), [0]),
}
FAULTS |= ENDS


@dataclass(frozen=True)
class Fault:
    """A planted fault."""

    kind: str
    moment: str
    rank: int
    ranks: int
    step: int  # from 0, for the moment "a step"
    epoch: int  # of the first training, from 0
    nodes: int = 1  # that MPICH assigns the ranks to in turn

    def __str__(self) -> str:
        """Return what is planted, in words."""
        when = f"step {self.step + 1} of epoch {self.epoch + 1}" if self.moment == "a step" else self.moment
        return f"{self.kind} at {when} on rank {self.rank} of {self.ranks}{' on two nodes' if self.nodes > 1 else ''}"

    @property
    def everywhere(self) -> bool:
        """Whether it happens on all ranks."""
        return self.kind.endswith("on all ranks")

    @property
    def is_harmless(self) -> bool:
        """Whether the job is to go on."""
        return FAULTS[self.kind].codes == [0]

    @property
    def is_signal(self) -> bool:
        """Whether the job is to save and stop."""
        return self.kind.split()[0] in ("SIGTERM", "SIGUSR1", "SIGINT")

    @property
    def in_command_line(self) -> bool:
        """Whether the job is `python -m dptrain`: a script obeys signals in `fit` alone."""
        return self.kind in ("--help", "unknown MPLBACKEND") or (self.is_signal and self.moment == "start-up")


def draw(seed: int, number: int, ends: bool = False) -> Fault:
    """Return a fault, the same for the same arguments, of those in `ENDS` or of the others."""
    rng = random.Random(f"{seed}:{number}")
    kinds = ENDS if ends else {name: kind for name, kind in FAULTS.items() if name not in ENDS}
    kind = rng.choices(list(kinds), [fault.weight for fault in kinds.values()])[0]
    moment = rng.choice(FAULTS[kind].moments)
    ranks = rng.choice([2, 2, 3, 4])
    rank = rng.randrange(ranks)
    if moment == "a checkpoint" and kind != "full disk under a sharded checkpoint":  # which rank 0 writes
        rank = 0
    step, epoch = rng.randrange(STEPS), rng.randrange(2)
    return Fault(kind, moment, rank, ranks, step, epoch, nodes=rng.choice([1, 2]) if ranks > 2 else 1)


# The job: this file, started by mpirun


def note() -> None:
    """Write down when the fault happens, and in which process."""
    # A fault on all ranks is written down by each.
    path = Path(f"planted.{os.getpid()}")
    path.write_text(json.dumps([os.getpid(), time.time()]))
    path.replace("planted")


class Return(Exception):  # noqa: N818
    """What takes a rank out of its script as a `return` would."""


def happen(fault: Fault, model: Any = None) -> None:
    """Do what the fault is, after writing down when and in which process."""
    note()
    kind, _, to_mpirun = fault.kind.partition(" to ")
    if fault.is_signal:
        os.kill(int(Path("mpirun.pid").read_text()) if to_mpirun else os.getpid(), getattr(signal, kind))
        time.sleep(0.5 if to_mpirun else 0)  # until it has come back
    elif kind in ("SIGSTOP", "kill -9"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)
    elif kind == "endless loop":
        while True:
            pass
    elif kind == "loop with Python's lock":
        sum(range(10**13))  # one call of C
    elif kind in ("sleep", "sleep at the end"):
        time.sleep(10 * LIMIT)
    elif kind == "thread that stays":
        threading.Thread(target=time.sleep, args=(10 * LIMIT,)).start()
    elif kind == "atexit function that stays":
        atexit.register(time.sleep, 10 * LIMIT)
    elif kind == "mapped file cut short":
        os.truncate(f"x-{fault.rank}.npy", 0)
    elif kind.startswith("full disk"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    elif kind.startswith("return"):
        raise Return
    elif kind.startswith("sys.exit"):
        sys.exit(int(kind[9:-1]))
    elif kind.startswith("os._exit"):
        os._exit(int(kind[9:-1]))
    elif kind.startswith("C's _exit(0)"):
        ctypes.CDLL(None)._exit(0)
    elif kind == "MPI_Abort(0)":
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort()
    elif kind == "exception without sys.stderr":
        sys.stderr = None  # type: ignore[assignment]
        raise RuntimeError("planted")
    elif kind == "error in a collective that is caught":
        from dptrain.comm import current

        class Unsendable:
            def __reduce__(self) -> Any:
                raise RuntimeError("planted")

        with contextlib.suppress(RuntimeError):
            current().allgather(Unsendable())
    elif kind.startswith("exception"):
        raise RuntimeError("planted")
    elif kind == "forks that leave":
        for leave in (sys.exit, lambda: os._exit(0), lambda: 1 / 0):
            child = os.fork()
            if not child:
                leave()
            os.waitpid(child, 0)
    elif kind == "a program of its own":
        alone = "from dptrain.comm import current; assert current().size == 1"
        words = ["-m", "dptrain", "doctor", "--device", "cpu"] if fault.moment == "the end" else ["-c", alone]
        subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=LIMIT)
    elif kind == "another call":
        model.evaluate(*data(), verbose=0)
    elif kind == "learning rate":
        model.optimizer.learning_rate = 0.5
    elif kind.startswith("flipped bit"):
        import numpy as np

        slots = [variable for variable in model.optimizer.variables if variable.path.endswith("kernel_velocity")]
        variable = (model.weights if kind.endswith("weight") else slots)[0]
        value = variable.numpy()
        value.view(np.uint32).reshape(-1)[17 + fault.step] ^= 1 << 12
        variable.assign(value)


def data() -> tuple[Any, Any]:
    """Return what the jobs train with: `STEPS` batches."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def job(fault: Fault) -> int:
    """Run the script in which the fault is planted."""
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    mine = fault.rank == rank or fault.everywhere
    if mine and fault.moment == BEFORE:
        happen(fault)
    if mine and fault.kind.endswith("its streams closed"):
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None  # type: ignore[misc]
    if fault.in_command_line:
        from dptrain.__main__ import main

        if mine and fault.kind == "--help":
            note()
            return main(["--help"])
        if fault.kind == "unknown MPLBACKEND":
            os.environ["MPLBACKEND"] = "unknown"
        if mine:
            happen(fault)
        return main([*SMALL, "--data", os.environ["FAULTS_DATA"], "--out", "out"])

    import numpy as np

    import dptrain as dp

    if mine and fault.kind.endswith("excepthook of its own"):
        sys.excepthook = sys.__excepthook__
    planted = False

    def at(moment: str) -> None:
        nonlocal planted
        if mine and fault.moment == moment and not planted:
            planted = True
            happen(fault, model)

    class Hook(dp.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.now = epoch == fault.epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.now and batch == fault.step:
                at("a step")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if self.now:
                at("the end of an epoch")

        def state_dict(self) -> dict[str, Any]:
            at("a checkpoint")
            return {}

    class Net(dp.Sequential):
        def get_config(self) -> dict[str, Any]:  # on rank 0, which writes
            at("a save")
            return super().get_config()

    model: Any = None
    at("start-up")
    model = Net([dp.layers.Dense(8, "relu", input_shape=(6,)), dp.layers.Dense(2, "softmax")], seed=1)
    sharded = fault.kind == "full disk under a sharded checkpoint"
    loss = "sparse_categorical_crossentropy"
    model.compile(dp.optimizers.Adam(1e-3), loss, metrics=["accuracy"], shard_optimizer=sharded)
    at("before fit")
    keeper = dp.callbacks.BackupAndRestore("backup", save_freq=EVERY, delete_checkpoint=False)
    x, y = data()
    if fault.kind == "mapped file cut short":
        np.save(f"x-{rank}.npy", x)
        x = np.load(f"x-{rank}.npy", mmap_mode="r")
    if fault.kind == "NaN in its rows" or (mine and fault.kind == "NaN in its copy"):
        x[BATCH * fault.step + BATCH * fault.rank // fault.ranks] = float("nan")
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, shuffle=False, callbacks=[Hook(), keeper])
    at("between fits")
    if fault.kind == "fork that goes on":

        def batches() -> Iterator[Any]:  # drawn in a thread, which is all that the fork has
            for number in range(STEPS):
                if number == 1 and mine:
                    os.fork()
                yield tuple(array[number * BATCH : (number + 1) * BATCH] for array in data())

        model.fit(batches(), epochs=1, steps_per_epoch=STEPS, verbose=0, shuffle=False)
    else:
        model.fit(*data(), batch_size=BATCH, epochs=1, verbose=0)
    if fault.rank != 0:
        at("a save")
    model.save("model.keras")
    model.evaluate(*data(), verbose=0)
    at("the end")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(Return):
        sys.exit(job(Fault(**json.loads(sys.argv[1]))))
