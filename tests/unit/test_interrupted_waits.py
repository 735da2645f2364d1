"""An exception at every acquire that may block, such as Ctrl-C: afterwards the object equals a fresh one.

The acquires are found in the syntax trees: a function that has one stands in a scenario below, or in a list of
exceptions with the reason.
"""

import gc
import io
import itertools
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import filelock
import numpy as np
import pytest

import dptrain as dp
from dptrain import random
from dptrain.batches import feed as feeds
from dptrain.data.shards.order import BlockOrder, MixOrder
from dptrain.data.shards.shard_set import Shard, ShardOptions, ShardSet
from dptrain.errors import DataError
from dptrain.program import turns as turns_module
from dptrain.program.codegen import memory as memory_module
from dptrain.program.turns import DRAWING, MAKING, REPLACING, TURNS, SharedLock, Turns
from dptrain.registry import reads
from dptrain.runtime import garbage, python_lock, signals
from dptrain.runtime.output.log_stream import LogStream
from dptrain.runtime.storage import locks
from dptrain.runtime.watch import thread_order
from dptrain.saving.background import Background
from tests.unit import blocking

# The main thread may be interrupted here by any signal whose handler raises.
ERRORS = (KeyboardInterrupt, MemoryError)


class Bell:
    """A lock, or an event, at whose n-th wait in the main thread an exception is raised."""

    def __init__(self, plan: "Plan", real: Any) -> None:
        self._plan, self._real = plan, real

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        if arguments[:1] != (False,) and named.get("blocking", True):
            self._plan.ring()
        return self._real.acquire(*arguments, **named)

    def wait(self, *arguments: Any) -> bool:
        self._plan.ring()
        return self._real.wait(*arguments)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self._real.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Plan:
    """At which wait, from 1, which exception is raised; counts them."""

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.count = at, error, 0

    def ring(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.count += 1
            if self.count == self.at:
                raise self.error

    def lock(self) -> Bell:
        return Bell(self, threading.Lock())


@contextmanager
def other_thread(hold: Callable[[], Any]) -> Iterator[threading.Event]:
    """Let another thread hold something until an event; wait until it does."""
    ends, holds = threading.Event(), threading.Event()

    def work() -> None:
        with hold():
            holds.set()
            ends.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert holds.wait(60)
    try:
        yield ends
    finally:
        ends.set()
        thread.join(60)
        assert not thread.is_alive()


# Scenarios: each returns what is done, and what must be as before when that has been interrupted.
Scenario = Callable[[Plan, pytest.MonkeyPatch, Any], tuple[Callable[[], object], Callable[[], object]]]


def with_turns(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    turns = Turns()
    turns._lock = plan.lock()
    patch.setattr(turns_module, "threading", SimpleNamespace(Lock=plan.lock, get_ident=threading.get_ident))

    def use() -> None:
        with turns.of({"w"}), turns.eager(), turns.reading("v"):
            pass
        with other_thread(lambda: turns.of(writes={"w"})) as ends:
            threading.Timer(0.02, ends.set).start()
            with turns.writing("w"), turns.reading("w"):
                pass

    return use, lambda: (turns._running, turns._waiting, turns.eager_turn)


def with_shared_lock(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    shared = SharedLock()
    shared._lock = Bell(plan, threading.RLock())

    def use() -> None:
        with shared, shared:
            pass

    return use, lambda: is_free(shared)


def is_free(shared: SharedLock) -> bool:
    """Whether another thread gets a lock."""
    got = []

    def attempt() -> None:
        if shared._lock.acquire(timeout=5):
            shared._lock.release()
            got.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(60)
    return got == [True]


def with_pythons_lock(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(python_lock, "_lock", plan.lock())

    def use() -> None:
        with python_lock.acquired():
            with python_lock.released():
                pass
            with python_lock.released():
                pass

    return use, lambda: (python_lock._lock.locked(), getattr(python_lock._local, "holds", False))


def with_garbage(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(garbage, "_lock", plan.lock())

    def use() -> None:
        with garbage.uncollected(), garbage.uncollected():
            pass

    return use, lambda: (garbage._pauses, gc.isenabled())


def with_reads(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(reads, "_changing", plan.lock())

    def use() -> None:
        noted = reads.Reads()
        noted._lock = plan.lock() if hasattr(noted, "_lock") else None
        with reads.noting(noted):
            pass

    return use, lambda: (reads._readers, "__getattribute__" in vars(reads.Readable), reads._current.get())


def with_handlers(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(signals, "_handlers_lock", plan.lock())
    before = signal.getsignal(signal.SIGTERM)

    def use() -> None:
        with signals.catching((signal.SIGTERM,)):
            pass

    return use, lambda: (signals._handlers_lock.locked(), signal.getsignal(signal.SIGTERM) is before)


def with_arena(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    arena = memory_module.Arena()
    arena._lock = plan.lock()

    def use() -> None:
        with arena.lent(64) as first, arena.lent(128) as second:
            assert len(first) >= 64
            assert len(second) >= 128

    return use, lambda: (arena._lock.locked(), all(len(memory) == arena._size for memory in arena._free))


def with_feeds(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    pool = feeds.FeedPool(SimpleNamespace())
    pool._lock = plan.lock()
    patch.setattr(feeds, "PooledFeed", lambda *arguments: SimpleNamespace(read=lambda arrays: arguments))
    arrays = [np.zeros((3, 2), np.float32)]

    def use() -> None:
        *_, give_back = pool.feed(arrays, 3, None)
        give_back("feed")

    return use, lambda: (pool._lock.locked(), set(map(len, pool._free.values())) <= {0, 1})


def with_meeting(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(thread_order, "_lock", plan.lock())

    def use() -> None:
        with thread_order.meeting("fit"), thread_order.meeting("evaluate"):
            pass

    return use, lambda: thread_order._meeting


def with_files(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    real = filelock.FileLock.acquire

    def acquire(self: Any, *arguments: Any, **named: Any) -> Any:
        plan.ring()
        result = real(self, *arguments, **named)
        plan.ring()  # it is held now
        return result

    patch.setattr(filelock.FileLock, "acquire", acquire)

    def use() -> None:
        with locks.held(folder / "file.lock", 5, "compiles"), locks.locked(folder, "training", "choose another"):
            pass

    def state() -> object:
        left = sorted(path.name for path in folder.iterdir() if path.name == locks.HOLDER)
        found = []
        for name in ("file.lock", locks.LOCK):
            lock = filelock.FileLock(folder / name)
            real(lock, timeout=0)
            found.append(lock.is_locked)
            lock.release()
        return found, left

    return use, state


def with_background(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    background = Background()
    background._idle = Bell(plan, background._idle)
    done = []

    def use() -> None:
        background.start(lambda: done.append(1))
        background.wait()

    def state() -> object:
        assert background._idle._real.wait(60)
        return background.has_failed, background.is_idle

    return use, state


def with_log(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    stream = io.StringIO()
    log = LogStream(stream, "stdout", 0, "text")
    log._lock = Bell(plan, log._lock)  # type: ignore[assignment]

    def use() -> None:
        expected = ["first", "second", "third", "last"]
        try:
            log.write("first\nsec")
            log.write("ond\n")
            log.write_record("third", {"loss": 1.0})
            log.write("last")
            log.flush()
            found = re.findall("first|second|third|last", stream.getvalue())
            assert found == expected
        except BaseException:
            found = re.findall("first|second|third|last", stream.getvalue())
            assert found == expected[: len(found)], "no line is lost, and none is there twice"
            log._begun = ""
            raise
        finally:
            stream.seek(0)
            stream.truncate()

    return use, lambda: (log._begun, log._lock._is_owned())


def with_seeds(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    patch.setattr(random, "_lock", plan.lock())
    patch.setattr(random, "_streams", SimpleNamespace(models=0, alike=True, seed=7))

    def use() -> None:
        before = random._streams.models
        try:
            random.next_model_seed()
        except BaseException:
            assert random._streams.models == before, "the next model has the seed that this one would have had"
            raise

    return use, lambda: random._lock.locked()


def with_orders(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    block, mix = BlockOrder([3, 4, 2], 1, 2), MixOrder([2.0, 1.0], 1)
    expected = BlockOrder([3, 4, 2], 1, 2).locate(1, np.arange(9)), MixOrder([2.0, 1.0], 1).locate(np.arange(9))
    block._lock, mix._lock = plan.lock(), plan.lock()

    def use() -> None:
        np.testing.assert_array_equal((block.locate(1, np.arange(9)), mix.locate(np.arange(9))), expected)

    return use, lambda: (block._lock.locked(), mix._lock.locked())


def with_shards(plan: Plan, patch: pytest.MonkeyPatch, folder: Any) -> Any:
    """Of three shards memory holds one, and the last cannot be read."""

    def opened(path: Any, file: Any, *options: Any) -> Any:
        if file.url == "bad":
            raise DataError("bad: no shard")
        return SimpleNamespace(length=3, nbytes=10, read=lambda rows: [f"{file.url}{row}" for row in rows])

    shards = [Shard(SimpleNamespace(url=url, shown=url, is_local=True), 3, "") for url in ("a", "b", "bad")]
    options = ShardOptions(SimpleNamespace(max_bytes=15), "skip", 1, folder)
    shard_set = ShardSet(SimpleNamespace(converts=False, open=opened), shards, "", [], None, options)
    shard_set._lock = plan.lock()

    def use() -> None:
        assert [shard_set.read(shard, [0, 2]) for shard in (0, 1, 0)] == [["a0", "a2"], ["b0", "b2"], ["a0", "a2"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says once that a shard is left out
            assert not shard_set.is_readable(2)
        assert list(map(str, shard_set._bad.values())) == shard_set.skipped == ["bad: no shard"]
        assert len(shard_set._readers) == 1

    def state() -> object:
        waits = [shard for shard, future in shard_set._readers.items() if not future.done()]
        return shard_set._lock.locked(), waits, 2 in shard_set._readers

    return use, state


MODEL = {
    "backend/cpu/compiled.py:CompiledExecutable._compiled",
    "backend/cpu/compiled.py:lowered",
    "layers/base.py:Layer.__call__",
    "models/base.py:BaseModel._find_outputs",
    "models/structure.py:Structure._building",
    "ops/random.py:SeedGenerator._turn",
    "ops/random.py:_bits_for_seed",
    "program/execute.py:HostMemory.adopt",
    "program/tensor.py:Variable._at_hand",
    "program/tensor.py:Variable._move",
    "program/tensor.py:Variable._store",
}
SCENARIOS: dict[Scenario, set[str]] = {
    with_turns: {f"program/turns.py:Turns.{name}" for name in ("begin", "end", "reading")},
    with_shared_lock: {"program/turns.py:SharedLock.__enter__"},
    with_pythons_lock: {"runtime/python_lock.py:acquired", "runtime/python_lock.py:released"},
    with_garbage: {"runtime/garbage.py:uncollected"},
    with_handlers: {"runtime/signals.py:catching"},
    with_reads: {"registry/reads.py:noting", "registry/reads.py:Reads.add"},
    with_arena: {"program/codegen/memory.py:Arena.lent", "program/codegen/memory.py:Arena.reserve"},
    with_feeds: {"batches/feed.py:FeedPool.feed", "batches/feed.py:FeedPool._give_back"},
    with_meeting: {"runtime/watch/thread_order.py:meeting"},
    with_files: {"runtime/storage/locks.py:held", "runtime/storage/locks.py:locked"},
    with_seeds: {"random.py:next_model_seed"},
    with_background: {"saving/background.py:Background.wait"},
    with_log: {f"runtime/output/log_stream.py:LogStream.{name}" for name in ("flush", "write", "write_record")},
    with_orders: {
        "data/shards/order.py:BlockOrder._pass",
        "data/shards/order.py:BlockOrder._permutation",
        "data/shards/order.py:MixOrder._period",
    },
    with_shards: {f"data/shards/shard_set.py:ShardSet.{name}" for name in ("_close_others", "_reader", "_skip")},
}
EXCEPTIONS = {
    "batches/workers.py:Workers._run": "in a daemon thread of its own",
    "cli/run_records.py:_is_locked": "asks without waiting (LOCK_NB)",
    "cli/server/log.py:Log._write": "in a daemon thread of its own",
    "comm/__init__.py:current": "all ranks start MPI there: an error ends the job",
    "comm/nccl.py:NcclCommunicator._abort": "the job ends",
    "comm/nccl.py:NcclCommunicator.close": "the process ends",
    "models/exported.py:ExportedProgram._run": "what is not given back is made anew",
    "models/exported.py:ExportedProgram._take": "what is not given back is made anew",
    "runtime/launch/launcher.py:start_mpi": "all ranks start MPI there: an error ends the job",
    "runtime/launch/supervisor.py:_Outputs._pass_on": "in a daemon thread of its own",
    "runtime/undisturbed.py:acquire": "goes on waiting, and raises in the end",
    "runtime/undisturbed.py:undisturbed": "goes on waiting, and raises in the end",
    "runtime/watch/watchdog.py:Watchdog._sleep": "in a daemon thread of its own",
    "sweeps/arguments.py:Builder.build": "the seeds in it are restored by the context within",
    "train/step_deadline.py:StepDeadline._wait": "in a daemon thread of its own",
    "runtime/signals.py:abandon_step": "in a daemon thread of its own",
}


def test_every_function_that_waits_is_in_a_scenario_or_an_exception():
    listed = [MODEL, *SCENARIOS.values(), set(EXCEPTIONS)]
    assert set.union(*listed) == blocking.sites()
    assert sum(map(len, listed)) == len(set.union(*listed))


def counted(scenario: Scenario, folder: Any) -> int:
    """Return how often the main thread may wait in a scenario."""
    plan = Plan()
    with pytest.MonkeyPatch.context() as patch:
        use, _ = scenario(plan, patch, folder)
        use()
    return plan.count


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_after_an_exception_at_any_wait_the_object_equals_a_fresh_one(scenario, error, tmp_path):
    number = counted(scenario, tmp_path)
    assert number
    for at in range(1, number + 1):
        plan = Plan(at, error)
        with pytest.MonkeyPatch.context() as patch:
            use, state = scenario(plan, patch, tmp_path)
            fresh = repr(state())
            with pytest.raises(error):
                use()
            assert repr(state()) == fresh, at
            use()
            assert repr(state()) == fresh, at


def trained(seed: int) -> list[Any]:
    """Build, train and ask a small model with random numbers; return what it says."""
    layers = [dp.layers.Dense(3, "relu"), dp.layers.Dropout(0.5), dp.layers.Dense(1)]
    model = dp.Sequential([dp.layers.Input((2,)), *layers], seed=seed)
    model.compile("sgd", "mse", jit_compile=False)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    noise = dp.random.uniform((2,), seed=seed)
    return [model.predict(x, verbose=0).tolist(), np.asarray(noise).tolist()]


def test_after_an_exception_in_a_training_another_one_is_as_ever(monkeypatch):
    expected, plan = trained(3), Plan()
    for shared in (MAKING, REPLACING, DRAWING, TURNS):
        monkeypatch.setattr(shared, "_lock", Bell(plan, shared._lock))
    trained(3)
    total, plan.count = plan.count, 0
    assert total > 50
    for at in itertools.chain(range(1, 10), range(10, total, max(total // 25, 1))):
        plan.at, plan.count = at, 0
        with suppress(KeyboardInterrupt):
            trained(3)
        assert plan.count >= at
        plan.at = 0
        assert (TURNS._running, TURNS._waiting, TURNS.eager_turn) == ([], [], None), at
        assert all(map(is_free, (MAKING, REPLACING, DRAWING))), at
        assert trained(3) == expected, at
