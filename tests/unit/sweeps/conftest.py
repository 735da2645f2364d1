"""What tests of a report share."""

import pytest


@pytest.fixture
def no_pictures(monkeypatch):
    """For what is about a report's numbers."""
    from dptrain.sweeps import drawing

    monkeypatch.setattr(drawing, "why_not", lambda: "matplotlib is not installed")


@pytest.fixture
def undrawn(monkeypatch):
    """Every figure, to look into what it holds; it is not drawn, which takes longest, and its picture is empty."""
    from dptrain.sweeps import drawing

    seen = []
    monkeypatch.setattr(drawing, "svg", lambda figure, name, width: seen.append(figure) or "<svg></svg>")
    return seen


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
