"""The documentation as a site: it builds without a warning, which is about links that lead nowhere."""

import html
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import run

pytest.importorskip("mkdocs")
pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    # Without what hides Jinja from what tests start (tests/conftest.py).
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": None, "NO_MKDOCS_2_WARNING": "1"}
    done = run(command, cwd=ROOT, timeout=400, **environment)
    assert (done.code, done.err) == (0, "")
    return folder


def text_of(page) -> str:
    """Return what a page says."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_page_of_the_repository_is_in_the_site(site):
    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")]
    assert len(pages) > 20
    assert [page for page in pages if not (site / page).with_suffix(".html").is_file()] == []
    assert "trains neural networks" in text_of(site / "index.html")
    assert (site / "kernels" / "native.h.txt").is_file(), "sources that pages link to"
    assert not list(site.rglob("hooks.py*"))


@pytest.mark.slow
def test_the_reference_comes_from_the_code(site):
    assert "--learning-rate" in text_of(site / "reference" / "command-line.html")
    assert "y = activation(x @ kernel + bias)" in text_of(site / "reference" / "layers.html")


@pytest.mark.slow
def test_what_pages_load_is_in_the_site(site):
    for page in (site / "index.html", site / "docs" / "tutorial.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?([^" >#?]+)', page.read_text())
        assert len([target for target in loaded if target.endswith((".css", ".js"))]) >= 3
        missing = [target for target in loaded if ":" not in target and not (page.parent / target).exists()]
        assert missing == [], page


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    for page in ("index.html", "docs/tutorial.html", "reference/layers.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?(https?:[^" >]+)', (site / page).read_text())
        assert loaded == [], page
