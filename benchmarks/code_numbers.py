"""Counts what makes a code base hard to live in: lines, identifiers that say nothing, long functions, full rooms.

    python benchmarks/code_numbers.py [--at COMMIT ...]

prints a table with a column for each commit and one for the working tree. Lines of code are lines that are neither
empty, comments nor docstrings; identifiers are counted as tokens, strings and comments left out.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Identifiers that do not say what they hold.
VAGUE = ("one", "found", "own", "made", "given", "known", "asked", "told", "about")
MOST_LINES_OF_FUNCTION, MOST_LINES_OF_CLASS, MOST_FILES = 60, 400, 25
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(commit: str | None, folder: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the Python files below a folder, at a commit or in the working tree."""
    if commit is None:
        words = ["git", "ls-files", "--", f"{folder}/*.py"]
    else:
        words = ["git", "ls-tree", "-r", "--name-only", commit, "--", folder]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in listed:
        if path.endswith(".py") and commit is None and (ROOT / path).exists():
            yield path, (ROOT / path).read_text(encoding="utf-8")
        elif path.endswith(".py") and commit is not None:
            words = ["git", "show", f"{commit}:{path}"]
            yield path, subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def numbers(files: Mapping[str, str]) -> dict[str, float]:
    """Return what is counted in a folder's files."""
    counts: Counter[str] = Counter({"functions": 0, "classes": 0})
    identifiers: Counter[str] = Counter()
    class_names: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    for path, text in files.items():
        tree, lines = ast.parse(text), text.splitlines()
        docstrings = docstring_lines(tree)
        code = [
            number
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.lstrip().startswith("#") and number not in docstrings
        ]
        counts["code"] += len(code)
        counts["docstrings"] += len(docstrings)
        rooms[str(Path(path).parent)] += not path.endswith("__init__.py")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                length = sum(node.lineno <= number <= (node.end_lineno or node.lineno) for number in code)
                counts["functions"] += isinstance(node, ast.FunctionDef) and length > MOST_LINES_OF_FUNCTION
                counts["classes"] += isinstance(node, ast.ClassDef) and length > MOST_LINES_OF_CLASS
        class_names.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        identifiers.update(token.string for token in tokens if token.type == tokenize.NAME)
    return {
        "lines of code": counts["code"],
        "lines of docstrings": counts["docstrings"],
        "`one`": identifiers["one"],
        "`found`": identifiers["found"],
        "all identifiers that say nothing": sum(identifiers[name] for name in VAGUE),
        f"functions above {MOST_LINES_OF_FUNCTION} lines": counts["functions"],
        f"classes above {MOST_LINES_OF_CLASS} lines": counts["classes"],
        "public class names that stand for two things": sum(count > 1 for count in class_names.values()),
        f"folders of more than {MOST_FILES} files": sum(count > MOST_FILES for count in rooms.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", nargs="*", default=[], metavar="COMMIT", help="commits to compare with")
    commits = [*parser.parse_args().at, None]
    print("| | " + " | ".join(commit or "working tree" for commit in commits) + " |")
    print("|---|" + "---:|" * len(commits))
    for folder in ("dptrain", "tests", "benchmarks"):
        columns = [numbers(dict(sources(commit, folder))) for commit in commits]
        for name in columns[0]:
            print(f"| {folder}: {name} | " + " | ".join(f"{column[name]:,}" for column in columns) + " |")


if __name__ == "__main__":
    main()
