"""NumPy's sorts leave the order of equal elements to the length and the CPU unless they are told to be stable."""

import ast
from pathlib import Path

import pytest

import dptrain
from dptrain.backend.cuda.sources import kernels_dir

PACKAGE = Path(dptrain.__file__).parent
SORTS, METHODS = {"sort", "argsort"}, {"argsort"}


def unstable(source: str) -> list[int]:
    """Return the lines of sorts by NumPy without kind="stable"; `list.sort` and dptrain's own ops are stable."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
        is_stable = any(isinstance(kind, ast.Constant) and kind.value == "stable" for kind in kinds)
        sorts = node.func.attr in (SORTS if module in ("np", "numpy") else METHODS) and module != "ops"
        partitions = node.func.attr == "argpartition" and module in ("np", "numpy")
        if partitions or (sorts and not is_stable):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("np.argsort(x)", 1),
        ("np.sort(x, kind='quicksort')", 1),
        ("x.argsort()[::-1]", 1),
        ("np.argpartition(x, 3)", 1),
        ("np.argsort(x, kind='stable') + np.sort(x, axis=1, kind='stable')", 0),
        ("names.sort(key=len); ops.argsort(x); argsort(x)", 0),
    ],
)
def test_what_is_found(source, count):
    assert len(unstable(source)) == count


def test_every_sort_is_stable():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in unstable(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_kernels_sort_nothing_unstably():
    texts = {path.name: path.read_text(encoding="utf-8") for path in kernels_dir().glob("*.*h")}
    assert len(texts) > 20
    for name, text in texts.items():
        for call in ("std::sort", "std::nth_element", "std::partial_sort", "qsort(", "thrust::sort", "std::partition("):
            assert call not in text, (name, call)
