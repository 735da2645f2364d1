"""What tests of a report share."""

import pytest


@pytest.fixture
def no_pictures(monkeypatch):
    """For what is about a report's numbers."""
    from dptrain.sweeps.reporting import drawing

    monkeypatch.setattr(drawing, "why_not", lambda: "matplotlib is not installed")


@pytest.fixture
def undrawn(monkeypatch):
    """Every figure, to look into what it holds; it is not drawn, which takes longest, and its picture is empty."""
    from dptrain.sweeps.reporting import drawing

    undrawn_names = []
    monkeypatch.setattr(drawing, "svg", lambda figure, name, width: undrawn_names.append(figure) or "<svg></svg>")
    return undrawn_names


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn, to look into: a wide one and a narrow one for each picture."""
    from dptrain.sweeps.reporting import drawing

    figure_list = []
    real = drawing.svg

    def keeping(figure, name, width):
        figure_list.append(figure)
        return real(figure, name, width)

    monkeypatch.setattr(drawing, "svg", keeping)
    return figure_list
