"""What all tests share: one BLAS thread, a cache of their own, the CPU unless they are about GPUs, the real MNIST."""

import compileall
import fcntl
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before NumPy is imported: machines have few cores and tests start several ranks at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import Phase, settings

from tests.sample import SAMPLED, mark_long
from tests.times import Times

# Also where PYTHONDONTWRITEBYTECODE is set: pytest rewrites the assertions of all test modules, in half the time of
# collecting them, and processes that tests start collect some of them again.
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parents[1]
MNIST = Path(os.environ.get("DPTRAIN_TEST_MNIST") or ROOT.parent / "shared" / "data" / "mnist")
WITHOUT_PICTURES = ROOT / "tests" / "without_pictures"
# Folders whose tests start many short processes, which are left to NumPy: compiled programs take minutes of all tests
# there. Those that are about compiled steps ask for them.
BY_NUMPY = ("e2e", "mpi")
# Folders whose tests train many small models to see something else than numbers: a run of samples leaves these to NumPy
# as well, but for files about how steps are executed.
BY_NUMPY_IN_SAMPLES = ("guides", "unit/batches", "unit/callbacks", "unit/models", "unit/saving", "unit/train")
ABOUT_EXECUTION = {
    f"test_{name}.py"
    for name in ("custom", "exported", "health", "ids", "program_loops", "sample_numbers", "threads", "unknown_lengths")
}
# What in tests/unit is about compiled code itself; the others', and that of tests/ops, is compiled in half the time. It
# has the same bits however it is compiled (tests/unit/backend/cpu/test_compilers.py).
ABOUT_COMPILED_CODE = {"backend", "test_random_programs.py"}
# What of it a run of samples compiles as users do as well; the rest, little optimized, in half the time.
ABOUT_OPTIMIZED_CODE = {"test_compiled.py", "test_compilers.py"}
# -O3 where a run of samples is to compile all of it so, as in continuous integration.
LEVEL = "DPTRAIN_TEST_LEVEL"
# Files whose tests draw pictures in this process; in those of the others no run and no sweep draws any.
ABOUT_PICTURES = {
    *(f"unit/sweeps/reporting/test_{name}.py" for name in ("drawing", "field_pictures", "page", "pictures", "report")),
    "unit/sweeps/analysis/test_pareto.py",
    *("unit/cli/test_run_directory.py", "unit/cli/commands/test_runs.py"),
    *("unit/cli/reporting/test_page.py", "unit/cli/reporting/test_worst.py", "unit/cli/commands/test_report.py"),
}
# Folders whose tests are about GPUs; what starts the emulator gives it an environment of its own.
ABOUT_GPUS = ("ops", "gpu", "emulator")

# What asks a training to end: as the tests find it.
_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

# The same examples on every run: a change is judged by what it changed, not by how long it takes on a busy machine.
# `--hypothesis-profile fuzz` looks for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
# A run of samples takes a quarter of the examples, as `tests.sample.examples` does of those that say how many.
settings.register_profile("sampled", settings.get_profile("same"), max_examples=25)
settings.register_profile("fuzz", deadline=None)
# For bugs that are planted: an example that fails is enough, without a search for the smallest.
settings.register_profile(
    "first", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what runs the long tests as well, and what says how long tests take."""
    parser.addoption("--long", action="store_true", help="run the whole suite with what is marked long")
    parser.addoption("--times", action="store_true", help="print CPU seconds by folder, and the longest tests")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests where that is asked for."""
    if config.option.times:
        config.pluginmanager.register(Times())


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in a process more than there are cores, up to four; chosen files, and one GPU, in one.

    A quarter of their time tests wait: for time limits, and for processes that sleep until a signal comes. A process
    that is done takes over half of what another has left, in a row: what a file's tests share is made once.

    The whole suite, and what its tests start, leave out the long tests; chosen files run all that they hold.
    """
    options = config.option
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    if whole and not options.long:
        os.environ[SAMPLED] = "1"
    if os.environ.get(SAMPLED):
        settings.load_profile("sampled")
    if os.environ.get(SAMPLED) and "long" not in options.markexpr:
        options.markexpr = f"({options.markexpr}) and not long" if options.markexpr else "not long"
    wanted = getattr(options, "numprocesses", 0)  # no such option: pytest-xdist is not installed
    alone = hasattr(config, "workerinput") or options.usepdb or os.environ.get("DPTRAIN_REAL_GPU") == "1"
    if wanted is None and options.dist == "no" and whole and not alone:
        options.numprocesses = min((os.cpu_count() or 1) + 1, 4)
        options.dist = "worksteal"
        _rewrite_assertions(config)


def _rewrite_assertions(config: pytest.Config) -> None:
    """Write what pytest makes of test modules, which in a fresh clone each process of a run would make for itself.

    Two forks do it. There is no public way: where a version of pytest has none of these functions, nothing is lost.
    """
    from _pytest.assertion import rewrite

    def write(paths: list[Path]) -> None:
        state = config.stash[rewrite.assertstate_key]
        for path in paths:
            pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(path, pyc) is None:
                key, code = rewrite._rewrite_test(path, config)
                pyc.parent.mkdir(exist_ok=True)
                rewrite._write_pyc(state, code, key, pyc)

    paths, forks = sorted((ROOT / "tests").rglob("test_*.py")), []
    for half in (paths[::2], paths[1::2]):
        if fork := os.fork():
            forks.append(fork)
            continue
        try:
            write(half)
        finally:  # whatever another version of pytest raises
            os._exit(0)
    for fork in forks:
        os.waitpid(fork, 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what samples leave out; start with the longest tests, so that no process works alone on one at the end."""
    mark_long(items, ROOT / "tests")  # before pytest looks at marks
    yield
    if getattr(config.option, "dist", "no") == "worksteal" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection(session: pytest.Session) -> None:
    """Collect the tests without looking for garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Never look for garbage among the tests and modules: hundreds of thousands of objects that stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Let tests execute what users execute, compiled programs, but where that takes too long."""
    name, path = "DPTRAIN_JIT_COMPILE", item.path.relative_to(ROOT / "tests")
    chosen = os.environ.get(name)
    by_numpy = path.parts[0] in BY_NUMPY
    if os.environ.get(SAMPLED) and path.name not in ABOUT_EXECUTION:
        by_numpy |= path.as_posix().startswith(BY_NUMPY_IN_SAMPLES)
    if chosen is None and by_numpy:
        os.environ[name] = "0"
    try:
        return (yield)
    finally:
        if chosen is None:
            os.environ.pop(name, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that tests have recorded, in whatever process they ran."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{text}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep the user's cache out of the tests, and the tests out of the user's cache.

    All processes of a run share it, and so do those that tests start, so that each kernel is compiled once.
    """
    ours = tmp_path_factory.getbasetemp()
    common = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours
    cache = os.environ.get("DPTRAIN_TEST_CACHE") or str(common / "cache")
    Path(cache).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPTRAIN_TEST_CACHE", cache)
        patch.setenv("DPTRAIN_CACHE", cache)
        patch.delenv("DPTRAIN_DATA", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quiet_locks():
    """Say nothing of another process of the tests that compiles what this one waits for, however long it takes."""
    from dptrain.runtime.storage import locks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "NOTICE", 3600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _threads_counted_once():
    """Look for BLAS among this process's libraries once, not for each model: it takes longer than a short training."""
    from dptrain.train import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "limit_threads", functools.cache(devices.limit_threads))
        yield


@pytest.fixture(scope="session", autouse=True)
def _bytecode() -> None:
    """Compile dptrain once; where PYTHONDONTWRITEBYTECODE is set, every process started would, in a third of its start.

    What stands there and is up to date is left alone.
    """
    compileall.compile_dir(ROOT / "dptrain", quiet=2)


@pytest.fixture(scope="session", autouse=True)
def _without_pictures():
    """Let what tests start draw no curves and write no page, which takes longer than most of its trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(WITHOUT_PICTURES), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module", autouse=True)
def _without_pictures_here(request: pytest.FixtureRequest):
    """Make Matplotlib and Jinja2 look as if they were not installed in this process too, but for tests about them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(ROOT / "tests").as_posix() not in ABOUT_PICTURES:
            patch.setitem(sys.modules, "matplotlib.figure", None)
            patch.setitem(sys.modules, "jinja2", None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _without_gpu(request: pytest.FixtureRequest):
    """Keep `--device auto` on the CPU, here and in what tests start, on a machine with a GPU and PyCUDA as well.

    There it would take the GPU, whose bits are not the CPU's, and refuse more ranks than there are GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(ROOT / "tests").parts[0] not in ABOUT_GPUS:
            patch.setitem(sys.modules, "pycuda", None)
            patch.setenv("PYTHONPATH", str(ROOT / "tests" / "without_gpu"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _headers_parsed_once(_own_cache: None):
    """Compile generated programs of this process with precompiled headers, if a test compiles any."""
    from dptrain.backend.cpu import compile as compiling
    from tests.precompiled import compiler_with

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_compiled", compiler_with(Path(os.environ["DPTRAIN_TEST_CACHE"], "headers")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_as_quickly_as_needed(request: pytest.FixtureRequest):
    """Optimize little of what is compiled in this process for tests that are not about compiled code, or of samples."""
    from dptrain.backend.cpu import compile as compiling

    room, *places = request.path.relative_to(ROOT / "tests").parts
    level = "-O3"
    if room == "ops" or (room == "unit" and ABOUT_COMPILED_CODE.isdisjoint(places)):
        level = "-O0"
    elif os.environ.get(SAMPLED) and ABOUT_OPTIMIZED_CODE.isdisjoint(places):
        level = os.environ.get(LEVEL, "-O1")
    if level != compiling.OPTIONS[0]:
        compiling.OPTIONS = (level, *compiling.OPTIONS[1:])
        compiling.library.cache_clear()
        compiling.products.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _loaded_in_this_process_alone(request: pytest.FixtureRequest):
    """Try no compiled library in a process of its own first, which takes a third of compiling a small one."""
    from dptrain.backend.cpu import compile as compiling

    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_compile.py":
            patch.setattr(compiling, "_try_to_load", lambda path: None)
        yield


@pytest.fixture(autouse=True)
def _own_settings():
    """Let no test begin with another's handlers of signals, default seed, type of numbers or global policy."""
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in _HANDLERS.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    if (random := sys.modules.get("dptrain.random")) is not None:
        random.set_default_seed(0)
    if (config := sys.modules.get("dptrain.config")) is not None:
        config.set_floatx("float32")
        config.set_image_data_format("channels_last")
    if (mixed_precision := sys.modules.get("dptrain.mixed_precision")) is not None:
        mixed_precision.forget_dtype_policy()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """Return a function that returns what another makes in a folder, of a name; one process of a run makes it.

    Tests of a file may run in several, each of which would launch all jobs that they look at.
    """
    ours = tmp_path_factory.getbasetemp()
    common = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours

    def once(name: str, make: Callable[[Path], Any]) -> Any:
        folder = common / "once" / name
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                content = pickle.dumps(make(Path(tempfile.mkdtemp(dir=folder))))
                (folder / "made").write_bytes(content)
            return pickle.loads((folder / "made").read_bytes())

    return once


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    if not MNIST.is_dir():
        pytest.skip(f"the real MNIST is not at {MNIST}")
    return MNIST


@pytest.fixture(scope="session")
def small_npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 1003 + 201 strokes, whose sizes no number of ranks divides."""
    import numpy as np

    from dptrain.data.strokes import generate

    x_train, y_train, x_test, y_test = generate(1003, 201)
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path
