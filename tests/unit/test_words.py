"""docs/words.md: every file and symbol that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs/words.md").read_text().splitlines() if line.startswith("| ")]


def symbols(path: Path) -> set[str]:
    """Return the names that a module defines at its top, and `Class.member`."""
    defined = set()
    for node in ast.parse(path.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        defined |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            defined |= {alias.asname for alias in node.names if alias.asname}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            name = member.target if isinstance(member, ast.AnnAssign) else member
            defined.add(f"{node.name}.{getattr(name, 'id', getattr(name, 'name', None))}")
    return defined


def test_every_file_and_symbol_exists():
    where = [row.rstrip(" |").rpartition(" | ")[2] for row in ROWS]
    places = [re.findall(r"`([^`]+)`", cell) for cell in where if "`" in cell]
    assert len(places) > 50
    for file, *names in places:
        assert names, f"{file}: no symbol"
        missing = set(names) - symbols(ROOT / "dptrain" / file)
        assert not missing, f"dptrain/{file} defines no {', '.join(sorted(missing))}"
