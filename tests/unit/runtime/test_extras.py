"""Hints of what to install name what pyproject.toml names, and work without a published dptrain."""

import re
import tomllib

import pytest

from dptrain.runtime import extras
from tests.conftest import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def resolved(extra: str) -> list[str]:
    """Return an extra's requirements, those of the extras within it among them."""
    packages = []
    for requirement in EXTRAS[extra]:
        inner = re.fullmatch(r"dptrain\[(.*)\]", requirement)
        packages += [each for name in inner[1].split(",") for each in resolved(name)] if inner else [requirement]
    return packages


@pytest.mark.parametrize("extra", extras._REQUIREMENTS)
def test_a_hint_installs_what_the_extra_does(extra):
    assert list(extras._REQUIREMENTS[extra]) == resolved(extra)


def test_a_hint_can_be_pasted_into_a_shell():
    assert extras.pip_install("sweep") == "pip install 'scipy>=1.11' 'matplotlib>=3.8'"
    assert extras.pip_install("tensorboard") == "pip install tensorboardX"


def test_no_message_names_an_extra_of_a_dptrain_on_an_index():
    files = [str(path) for path in (ROOT / "dptrain").rglob("*.py") if "dptrain[" in path.read_text()]
    assert files == []
