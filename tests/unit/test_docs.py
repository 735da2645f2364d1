"""Pages that are written from the code are up to date."""

import functools
import importlib.util
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

if find_spec("keras") is None:
    pytest.skip("Keras is not installed: extra 'test'", allow_module_level=True)
spec = importlib.util.spec_from_file_location("refusals", ROOT / "docs" / "refusals.py")
assert spec is not None
assert spec.loader is not None
refusals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(refusals)
# They read all sources, for the page and for other tests.
refusals.missing_arguments = functools.cache(lambda read=refusals.missing_arguments: list(read()))
refusals.refusals = functools.cache(refusals.refusals)


@pytest.mark.long
def test_the_page_of_refusals_is_what_the_code_refuses():
    written = refusals.PAGE.read_text(encoding="utf-8")
    if f"Keras {refusals.keras_version()} " not in written:
        pytest.skip("the page was written from another Keras")
    assert written == refusals.page(), "run: python docs/refusals.py"


def test_names_that_only_keras_has():
    lacking = refusals.missing("layers").split(", ")
    assert "FlaxLayer" in lacking
    assert "Dense" not in lacking
    assert refusals.missing("wrappers") == "all of it"


@pytest.mark.long
def test_arguments_that_only_keras_takes():
    missing = dict(refusals.missing_arguments())
    assert "`quantization_config`" in missing["`layers.Dense`"]  # taken, and refused unless it is None
    assert "`sparse`" in missing["`layers.Hashing`"]
    assert "`lora_rank`" not in missing["`layers.Dense`"]
    assert "`units`" not in missing["`layers.Dense`"]


@pytest.mark.long
def test_messages_have_words_for_what_they_fill_in():
    messages = refusals.refusals()
    assert "einsum(<subscripts>) of shapes <shapes>" in messages["ops"]
    assert "cli" not in messages
