"""Imports run downward only, and importing dptrain touches no GPU and no MPI."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dptrain"

# Every module by its first path component; a module may import from its own layer and those to its right.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"__init__", "applications", "datasets", "distillation", "preprocessing"},
    {"sweeps"},
    {"models", "testing"},
    {"train"},
    {"pruning"},
    {"callbacks"},
    {"saving"},
    {"utils"},
    {"batches"},
    {"layers", "optimizers"},
    {"metrics"},
    {"losses"},
    {"activations", "constraints", "regularizers"},
    {"distribution", "ops"},
    {"backend"},
    {"data", "initializers"},
    {"program"},
    {"comm", "config", "dtype_policies", "mixed_precision", "random", "tree"},
    {"runtime", "registry"},
    {"errors", "version"},
]
RANK = {name: depth for depth, names in enumerate(LAYERS) for name in names}
# Where a third-party library may be imported; every other one is free to use.
ONLY_IN = {
    "pycuda": "backend/cuda/gpu/device.py",
    "nvmath": "backend/cuda/libraries/cublaslt.py",
    "cudnn": "backend/cuda/libraries/cudnn.py",
    "nccl": "comm/nccl.py",
    "mpi4py": ("comm/mpi.py", "runtime/launch/launcher.py"),
    "jinja2": "cli/reporting/page.py",
    "markupsafe": "cli/reporting/page.py",
    "matplotlib": (
        *("cli/curves.py", "cli/reporting/figures.py"),
        *(f"sweeps/reporting/{name}.py" for name in ("drawing", "pictures", "field_pictures")),
    ),
    "scipy": "sweeps/analysis/intervals.py",
    "optuna": ("sweeps/adaptive.py", "sweeps/analysis/importance.py"),
    "sklearn": ("sweeps/analysis/importance.py", "cli/reporting/baselines.py"),
    "tensorboardX": "callbacks/tensorboard.py",
    "mlflow": "callbacks/mlflow_callback.py",
    "wandb": "callbacks/wandb_metrics_logger.py",
    "h5py": "saving/keras_h5.py",
    "onnx": "saving/onnx_file.py",
    "starlette": ("cli/server/app.py", "cli/server/generation.py"),
    "uvicorn": "cli/server/http_server.py",
    "h11": "cli/server/http_server.py",
    "prometheus_client": ("callbacks/metrics_file.py", "cli/server/metrics.py"),
}
NEVER = {"torch", "keras", "tensorflow", "jax"}
MODULES = sorted(PACKAGE.rglob("*.py"))


# Where statements hold others.
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return a module's syntax tree, for all tests that read them."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, each: bool = False) -> list[tuple[str, bool]]:
    """Return (dotted name, whether it is imported when the module is) of everything that a module imports.

    Args:
        path: of the module.
        each: with the names that are imported from a module, which may be modules themselves.
    """
    imported = []

    def visit(statement: ast.AST, at_import: bool) -> None:
        """Look into statements alone: expressions import nothing, and are most of a tree."""
        for child in itertools.chain.from_iterable(getattr(statement, name, ()) for name in BLOCKS):
            inside = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                imported.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = child.module or ""
                each_name = each or module == "dptrain"
                names = [f"{module}.{alias.name}" for alias in child.names] if each_name else [module]
                imported.extend((name, inside) for name in names)
            visit(child, inside)

    visit(tree_of(path), True)
    return imported


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_import(path: Path, name: str, at_import: bool) -> str:
    """Return what is wrong with a module's import of a name, or an empty string."""
    layer, parts = layer_of(path), name.split(".")
    if parts[0] in NEVER:
        return "a peer"
    if parts[0] in ONLY_IN and str(path.relative_to(PACKAGE)) not in ONLY_IN[parts[0]]:
        return f"elsewhere than in {ONLY_IN[parts[0]]}"
    # What a function imports when it is called may point upward: the excepthook asks comm what an error is.
    if parts[0] == "dptrain" and len(parts) > 1 and at_import and layer != "__init__" and RANK[layer] > RANK[parts[1]]:
        return f"above {layer}"
    return ""


def test_imports_run_downward():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}: {problem}"
        for path in MODULES
        for name, at_import in imports(path)
        if (problem := wrong_import(path, name, at_import))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "name", "at_import", "expected"),
    [
        ("ops/basic.py", "dptrain.models.sequential", True, "above ops"),
        ("ops/basic.py", "dptrain.models.sequential", False, ""),
        ("ops/basic.py", "dptrain.program.tensor", True, ""),
        ("ops/basic.py", "keras", False, "a peer"),
        ("ops/basic.py", "mpi4py.MPI", False, "elsewhere than in"),
        ("comm/mpi.py", "mpi4py.MPI", True, ""),
    ],
)
def test_a_wrong_import_is_seen(path, name, at_import, expected):
    message = wrong_import(PACKAGE / path, name, at_import)
    assert message.startswith(expected)
    assert bool(message) == bool(expected)


# Keras' paths to what lies above: `dptrain.saving.load_model` is `dptrain.models.load_model`.
FACADES = {"dptrain", "dptrain.random", "dptrain.saving"}


def rooms_of(module: str) -> list[str]:
    """Return the packages that a dotted name is in."""
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def test_no_circles():
    """Not by what a function imports when it is called, either."""
    path_by_name = {".".join(("dptrain", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES}
    path_by_name = {name.removesuffix(".__init__"): path for name, path in path_by_name.items()}
    graph: dict[str, set[str]] = {}
    for name, path in path_by_name.items():
        if name not in FACADES:
            imported = [target for target, _ in imports(path, each=True)]
            modules = [target if target in path_by_name else target.rpartition(".")[0] for target in imported]
            # An import runs the `__init__` of each room that the importing module is not in itself.
            rooms = [room for module in modules for room in rooms_of(module) if not f"{name}.".startswith(f"{room}.")]
            graph[name] = {module for module in [*modules, *rooms] if module in path_by_name} - {name}
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in MODULES} == set(RANK)


def test_every_room_is_a_package():
    """A wheel holds packages, and a folder without `__init__.py` is none."""
    rooms = {path.parent for path in MODULES}
    assert rooms == {path.parent for path in MODULES if path.name == "__init__.py"}


def test_rooms_have_few_enough_modules_to_be_looked_through():
    modules = Counter(str(path.parent.relative_to(PACKAGE)) for path in MODULES if path.name != "__init__.py")
    assert {room: number for room, number in modules.items() if number > 25} == {}


# What takes longer to import than Python takes to start.
SLOW = {"numpy", "rich", "safetensors", "filelock", "threadpoolctl", "scipy", "matplotlib", "mpi4py"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["sweep", "--help"], ["doctor", "--help"], ["launch", "--help"], ["--version"]]
)
def test_help_imports_nothing_slow(arguments):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['dptrain', *{arguments!r}]\n"
        "try:\n    runpy.run_module('dptrain', run_name='__main__')\n"
        "finally:\n    print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    imported = set(ast.literal_eval(finished.stderr.splitlines()[0]))
    assert "dptrain" in imported
    assert imported & {*SLOW, "pydantic", "yaml"} == set()
    assert finished.stdout


def test_a_training_speaks_before_it_imports_anything_slow(small_npz):
    code = (
        "import builtins, os, sys\n"
        "from dptrain.cli.main import main\n"
        "show = builtins.print\n"
        "def note(*words, **more):\n"
        f"    show(*words, sorted({SLOW!r} & set(sys.modules)), **more | dict(flush=True))\n"
        "    os._exit(0)\n"
        "builtins.print = note\n"
        f"sys.exit(main(['--data', {str(small_npz)!r}, '--fast-dev-run']))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    first = finished.stdout.splitlines()[0]
    assert re.fullmatch(r"dptrain [0-9.]+: loading \S+small.npz \[\]", first), first


@pytest.mark.parametrize(
    "line",
    [
        "from dptrain.activations import relu",
        "from dptrain.callbacks import EarlyStopping",
        "from dptrain.datasets import mnist",
        "from dptrain.datasets.mnist import load_data",
        "from dptrain.distribution import DeviceMesh, set_distribution",
        "from dptrain.initializers import HeNormal",
        "from dptrain.layers import Dense",
        "from dptrain.losses import MeanSquaredError",
        "from dptrain.metrics import Precision",
        "from dptrain.models import Sequential, load_model",
        "from dptrain.ops import matmul",
        "from dptrain.optimizers import Adam",
        "from dptrain.optimizers.schedules import ExponentialDecay",
        "from dptrain.regularizers import L2",
        "from dptrain.saving import load_model",
        "from dptrain.utils import to_categorical",
        "import dptrain as keras; keras.optimizers.schedules.CosineDecay",
    ],
)
def test_import_paths_of_keras(line):
    exec(line, {})


def test_everything_public_is_there():
    import dptrain

    for name in dptrain.__all__:
        assert getattr(dptrain, name) is not None
        assert name in dir(dptrain)
    with pytest.raises(AttributeError, match=r"^not supported: dptrain\.Sequentail; did you mean 'Sequential'\?$"):
        dptrain.Sequentail  # noqa: B018


def test_import_touches_no_mpi_no_gpu_and_no_plotting():
    code = (
        "import sys, dptrain, dptrain.cli.main, dptrain.cli.commands.sweep, dptrain.cli.commands.doctor\n"
        "for name in dptrain.__all__: getattr(dptrain, name)\n"
        "names = ('mpi4py', 'pycuda', 'nvmath', 'matplotlib', 'tensorboardX', "
        "'mlflow', 'wandb', 'h5py', 'numba', 'torch', 'keras', 'jax')\n"
        "print([m for m in names if sys.modules.get(m)])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.strip() == "[]"
