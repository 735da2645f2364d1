"""The page of what is trusted names tests that exist."""

import ast
import re

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "security.md"


def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_is_there():
    path, count = None, 0
    for words in re.findall(r"`([^`\n]+)`", PAGE.read_text()):
        if "::" in words:
            path, words = words.split("::")
        if words.startswith("test_"):
            assert words in functions(ROOT / path), f"{path}::{words}"
            count += 1
    assert count > 80
