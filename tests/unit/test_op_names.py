"""No op is known by its name outside of `dptrain/ops/`: what others need of an op stands in its record.

The syntax trees of all modules are searched for text that is an op's name, and for `op.name` where it is compared,
looked up, or asked for its parts; in messages and labels it may stand.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

import dptrain.ops.random  # with `dptrain.ops`, all ops
from dptrain.program.tensor import OPS
from tests.unit.test_imports import tree_of

PACKAGE = Path(dptrain.__file__).parent

# Text that is an op's name as well, and means something else.
OTHER_WORDS = {
    # Activations by their names, as Keras has them, and what they made.
    "cli/building.py": {"sigmoid": 3},
    "cli/options/config.py": {"relu": 2, "sigmoid": 1, "tanh": 1},
    "cli/options/network.py": {"relu": 2},
    "losses/base.py": {"sigmoid": 1},
    "layers/recurrent/conv_lstm.py": {"sigmoid": 4, "tanh": 4},
    "layers/recurrent/gru.py": {"sigmoid": 2, "tanh": 2},
    "layers/recurrent/lstm.py": {"sigmoid": 2, "tanh": 2},
    "layers/recurrent/simple_rnn.py": {"tanh": 2},
    # A spectrogram's mode.
    "layers/preprocessing/spectrograms.py": {"log": 2},
    # Activations, and what Keras calls layers of its networks.
    "applications/densenet.py": {"relu": 3},
    "applications/efficientnet.py": {"add": 1, "sigmoid": 1},
    "applications/efficientnet_v2.py": {"add": 1, "sigmoid": 1},
    "applications/inception_v3.py": {"conv2d": 1, "relu": 1},
    "applications/mobilenet_v2.py": {"add": 1},
    "applications/mobilenet_v3.py": {"add": 1, "relu": 1},
    "applications/resnet.py": {"relu": 3},
    "applications/vgg16.py": {"relu": 3},
    "applications/xception.py": {"relu": 1},
    # Keras' functions that make layers.
    "layers/__init__.py": {"add": 1, "maximum": 1, "minimum": 1, "multiply": 1, "subtract": 1},
    # What ranks and the launcher send each other.
    "runtime/launch/job.py": {"log": 1},
    # A server's access log.
    "cli/server/log.py": {"log": 1},
    # A learning rate's schedule.
    "cli/options/schedule.py": {"power": 2},
    # Axes of pictures and of spaces; words of sentences.
    "sweeps/reporting/drawing.py": {"log": 1},
    "sweeps/reporting/field_pictures.py": {"log": 2},
    "sweeps/space.py": {"log": 2},
    "sweeps/analysis/pareto.py": {"less": 1},
    "sweeps/reporting/pictures.py": {"less": 1},
    "sweeps/reporting/report.py": {"less": 1},
}


def names_in(module: ast.Module) -> Counter[str]:
    """Count the places of a module that know an op by its name."""
    docs = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    counts = Counter(
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and node.value in OPS and id(node) not in docs
    )
    for node in ast.walk(module):
        candidates: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            candidates = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            candidates = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            candidates = [] if ast.unparse(node.func.value) == "OPS" else [node.func.value, *node.args]
        counts.update(ast.unparse(part) for part in candidates if is_name_of_op(part))
    return counts


def is_name_of_op(expression: ast.expr) -> bool:
    """Whether it is `op.name`, of whatever it is an attribute."""
    if not isinstance(expression, ast.Attribute) or expression.attr != "name":
        return False
    holder = expression.value
    return (holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")) == "op"


def test_no_op_is_known_by_its_name():
    results = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative_path = path.relative_to(PACKAGE)
        if relative_path.parts[0] == "ops":
            continue
        names = names_in(tree_of(path)) - Counter(OTHER_WORDS.get(str(relative_path), {}))
        if names:
            results[str(relative_path)] = dict(names)
    assert results == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("OPS['add'](x, y)", 1),
        ("OPS.get('add')", 1),
        ("made.op is OPS['add']", 1),
        ("tensor.op.name == kind", 1),
        ("op.name in TABLE", 1),
        ("TABLE[one.op.name]", 1),
        ("TABLE.get(op.name)", 1),
        ("op.name.startswith('reduce_')", 1),
        ("TABLE = {'conv2d': 1, 'conv2d_input': 2}", 2),
        ("frozenset({'exp'} | {'log'})", 2),
        ("f'op {tensor.op.name!r} has no kernel'", 0),
        ("layer.name == other", 0),
        ("OPS.get(one.op.name) is one.op", 0),
        ("def f():\n    'exp'", 0),
    ],
)
def test_what_is_found(code, count):
    assert names_in(ast.parse(code)).total() == count
