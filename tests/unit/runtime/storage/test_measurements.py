"""What is kept of a measurement, and what is not believed of it."""

import pytest

from dptrain.runtime.storage.measurements import Measurements, are_seconds

KNOWN = Measurements("products", ["cuda", 2])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    return tmp_path / "products"


def test_a_measurement_is_kept_for_its_kind_of_machine(folder):
    assert KNOWN.read() == {}
    KNOWN.keep({"ours": 0.5, "library": 0.25})
    assert KNOWN.read() == {"ours": 0.5, "library": 0.25}
    assert are_seconds(KNOWN.read())
    assert Measurements("products", ["cuda", 3]).read() == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"ours": 1}',
        '{"ours": -0.5}',
        '{"ours": NaN}',
        '{"ours": 0.5, "library": [0.1]}',
        '{"ours": 0.5}' + " " * (1 << 20) + "x",
    ],
)
def test_what_is_no_measurement_is_not_believed(folder, content):
    KNOWN.keep({"ours": 0.5})
    (file,) = folder.iterdir()
    file.write_text(content)
    measured = KNOWN.read()
    assert measured == {} or not are_seconds(measured) or (measured == {"ours": 0.5} and len(content) > 1 << 20)


def test_without_a_place_nothing_is_kept(folder):
    folder.write_text("no folder")
    KNOWN.keep({"ours": 0.5})
    assert KNOWN.read() == {}
