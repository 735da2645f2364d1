"""The table of number types, and that no other module decides what it holds."""

import ast

import ml_dtypes
import numpy as np
import pytest

from dptrain.runtime.types import TYPES, is_floating, is_narrow, type_of
from tests.unit.test_imports import MODULES, PACKAGE, tree_of

TABLE = PACKAGE / "runtime/types.py"
FLOATS = [name for name, known in TYPES.items() if known.is_float]


def decisions_on_types(tree):
    """Yield lines where a module looks for ml_dtypes' kind, or has a rule of half precision of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "kind":
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if any(isinstance(text, str) and text.isalpha() and len(text) < 8 and "V" in text for text in texts):
                yield node.lineno
        names = [getattr(node, field, None) for field in ("id", "attr", "name")]
        if "is_half" in names:
            yield node.lineno


def test_no_module_decides_on_types_by_itself():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in MODULES
        if path != TABLE
        for line in decisions_on_types(tree_of(path))
    ]
    assert not wrong, f"ask runtime/types.py: {wrong}"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('x.dtype.kind in "fV"', True),
        ('np.dtype(name).kind not in "Vf"', True),
        ('x.dtype.kind == "V"', True),
        ('x.dtype.kind in ("f", "V")', True),
        ("is_half(x.dtype)", True),
        ("def is_half(dtype): ...", True),
        ("from a import is_half", True),
        ('x.dtype.kind in "iu"', False),
        ('parameter.kind == "VAR_POSITIONAL"', False),
        ("is_floating(x.dtype)", False),
    ],
)
def test_decisions_are_seen(text, seen):
    assert any(decisions_on_types(ast.parse(text))) == seen


def test_floating_point_types_are_known_whatever_their_kind():
    assert {name for name in TYPES if is_floating(np.dtype(name))} == set(FLOATS)
    assert not is_floating(np.dtype([("a", np.float32)]))
    assert not is_floating(np.dtype("V2"))
    assert is_floating(np.dtype(np.longdouble))
    assert is_floating(np.dtype(">f4"))
    assert [name for name in TYPES if is_narrow(np.dtype(name))] == [
        name for name in FLOATS if np.dtype(name).itemsize < 4
    ]


def test_types_that_tensors_do_not_have_have_no_names():
    unknown = type_of(np.dtype(np.complex64))
    assert (unknown.c, unknown.is_float, unknown.compute) == (None, False, np.complex64)


@pytest.mark.parametrize("name", FLOATS)
def test_random_bits_fill_a_significand(name):
    assert TYPES[name].random_bits == min(ml_dtypes.finfo(name).nmant + 1, 32)


@pytest.mark.parametrize("name", FLOATS)
def test_the_mask_of_what_is_not_finite(name):
    known = TYPES[name]
    width = 8 * known.storage.itemsize
    if width <= 16:
        bits = np.arange(1 << width, dtype=np.uint64)
    else:
        values = np.array([0, -1, 1e30, -np.inf, np.inf, np.nan, np.finfo(name).max, np.finfo(name).tiny], name)
        bits = values.view(f"u{width // 8}").astype(np.uint64)
    values = bits.astype(f"u{width // 8}").view(known.storage)
    mask = np.uint64(known.not_finite)
    with np.errstate(invalid="ignore"):  # signaling NaN
        finite = np.isfinite(values)
    np.testing.assert_array_equal((bits & mask) != mask, finite)


def test_integers_have_no_mask():
    assert not any(known.not_finite for known in TYPES.values() if not known.is_float)
