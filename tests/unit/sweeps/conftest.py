"""What tests of a report share."""

import pytest


@pytest.fixture(autouse=True)
def _without_pictures(request, monkeypatch):
    """Let sweeps that are trained draw no pictures, which takes longer than the training."""
    if request.path.name in ("test_sweeping.py", "test_continuing.py"):
        from dptrain.sweeps import drawing

        monkeypatch.setattr(drawing, "installed", lambda: False)


@pytest.fixture
def no_pictures(monkeypatch):
    """For what is about a report's numbers."""
    from dptrain.sweeps import drawing

    monkeypatch.setattr(drawing, "installed", lambda: False)


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn, to look into: a wide one and a narrow one for each picture."""
    from dptrain.sweeps import drawing

    seen = []
    real = drawing.svg

    def keeping(figure, name, width):
        seen.append(figure)
        return real(figure, name, width)

    monkeypatch.setattr(drawing, "svg", keeping)
    return seen
