"""The documentation as a site: it builds without a warning, which is about links that lead nowhere."""

import html
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import run

LOADED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="?([^" >#?]+)')


def text_of(page: Path) -> str:
    """Return what a page says."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


# One test, so that the site is built once, whichever processes take the tests.
@pytest.mark.slow
def test_the_site_holds_all_pages_and_all_that_they_load(tmp_path):
    for module in ("mkdocs", "material"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # Without what hides Jinja from what tests start (tests/conftest.py).
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": None, "NO_MKDOCS_2_WARNING": "1"}
    done = run(command, cwd=ROOT, timeout=400, **environment)
    assert done.code == 0, done.err

    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")]
    assert len(pages) > 20
    assert [page for page in pages if not (tmp_path / page).with_suffix(".html").is_file()] == []
    assert (tmp_path / "kernels" / "native.h.txt").is_file(), "sources that pages link to"
    assert not list(tmp_path.rglob("hooks.py*"))
    assert "trains neural networks" in text_of(tmp_path / "index.html")
    # The reference comes from the code.
    assert "--learning-rate" in text_of(tmp_path / "reference" / "command-line.html")
    assert "y = activation(x @ kernel + bias)" in text_of(tmp_path / "reference" / "layers.html")
    # Pages load what is in the site, and nothing from elsewhere.
    for page in (tmp_path / "index.html", tmp_path / "docs" / "tutorial.html", tmp_path / "reference" / "layers.html"):
        loaded = LOADED.findall(page.read_text(encoding="utf-8"))
        assert len([target for target in loaded if target.endswith((".css", ".js"))]) >= 3
        assert [target for target in loaded if not (page.parent / target).exists()] == [], page
