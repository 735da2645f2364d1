"""Tensors are told apart by identity: their `==` is an op, whose truth nobody may ask for while a step is traced.

Python 3.13's dataclasses compare field by field; those before compare tuples, which look at identity first.
"""

import ast
import re

from dptrain.program.codegen.views import IndexMap, part_of, whole
from dptrain.program.tensor import placeholder
from tests.unit.test_imports import MODULES, PACKAGE, tree_of


def compared(node):
    """Return whether a class is a dataclass that compares its fields."""
    for decorator in node.decorator_list:
        if "dataclass" in ast.unparse(decorator):
            return "eq=False" not in ast.unparse(decorator) and "__eq__" not in {
                getattr(statement, "name", "") for statement in node.body
            }
    return False


def test_no_dataclass_compares_tensors():
    tensor_fields = [
        f"{path.relative_to(PACKAGE)}: {node.name}.{ast.unparse(statement.target)}"
        for path in MODULES
        if "dataclass" in path.read_text(encoding="utf-8")  # before it is parsed
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and compared(node)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and re.search(r"\b(Tensor|Variable|Operand)\b", ast.unparse(statement.annotation))
    ]
    assert tensor_fields == []


def test_sources_of_one_tensor_are_equal_where_their_places_are():
    x, y = (placeholder((3, 4), "float32", "x") for _ in range(2))
    assert whole(x) == whole(x)
    assert hash(whole(x)) == hash(whole(x))
    assert whole(x) != part_of(x, (IndexMap(1), IndexMap(0)), 2)
    assert whole(x) != whole(y)
