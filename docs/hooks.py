"""Collects the pages of the site for MkDocs: what README.md and the navigation lead to, where the repository has it.

Links are the repository's own, so that they work there too. A page is a Markdown file that the navigation names, one
that such a page links to, or one of the reference, which `reference.py` writes. Other files that pages link to, such as
sources, are copied, as text where they are text. `mkdocs build --strict` refuses a link that leads nowhere.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
# Shown by browsers as they are.
SHOWN = {".png", ".svg", ".html"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation."""
    for section in config.nav or []:
        for entry in section.get("Reference", []):
            if "Python" in entry:
                entry["Python"] = [{name: f"reference/{name}.md"} for name in reference.MODULES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those that the navigation names and all that these link to."""
    pages = {"reference/command-line.md": reference.command_line()}
    pages |= {f"reference/{name}.md": reference.module_page(name) for name in reference.MODULES}
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.INCLUDED))
    waiting, seen = [uri for uri in named_in(config.nav) if uri not in pages], set(pages)
    while waiting:
        uri = waiting.pop()
        if uri in seen or not (ROOT / uri).is_file():
            continue
        seen.add(uri)
        file = File.generated(config, uri, abs_src_path=str(ROOT / uri), inclusion=InclusionLevel.INCLUDED)
        if file.is_documentation_page():
            waiting += linked_from(uri)
        elif Path(uri).suffix not in SHOWN:
            file.dest_uri += ".txt"
        files.append(file)
    return files


def linked_from(uri: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for target in LINK.findall((ROOT / uri).read_text(encoding="utf-8")):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(uri), target))


def named_in(nav: object) -> Iterator[str]:
    """Yield the pages that the navigation names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from named_in(list(nav.values()))
    elif isinstance(nav, list):
        for entry in nav:
            yield from named_in(entry)
