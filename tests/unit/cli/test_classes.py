"""Scores of classes, against numbers computed by hand."""

import numpy as np
import pytest

from dptrain.cli.classes import confusion_matrix, of_classes, scores, show
from dptrain.cli.predictions import Meaning

Y = np.array([0, 0, 0, 1, 1, 2])
OUTPUTS = np.eye(3)[[0, 0, 1, 1, 0, 0]]


def test_the_matrix_and_its_scores():
    matrix = confusion_matrix(Y, OUTPUTS, 3)
    assert matrix.tolist() == [[2, 1, 0], [1, 1, 0], [1, 0, 0]]
    class_scores = scores(matrix)
    assert class_scores["precision"] == [0.5, 0.5, 0]
    assert class_scores["recall"] == pytest.approx([2 / 3, 0.5, 0])
    assert class_scores["f1"] == pytest.approx([4 / 7, 0.5, 0])


def test_two_classes_of_one_probability():
    class_scores = of_classes(
        Meaning("binary", ("no", "yes")), np.array([[0], [1], [1]]), np.array([[0.2], [0.9], [0.5]])
    )
    assert class_scores["names"] == ["no", "yes"]
    assert class_scores["confusion"] == [[1, 0], [1, 1]]


def test_numbers_and_other_labels_have_none():
    assert of_classes(Meaning(target="y"), Y, OUTPUTS) is None
    assert of_classes(Meaning("multiclass"), None, OUTPUTS) is None
    assert of_classes(Meaning("multiclass"), Y + 1, OUTPUTS) is None


def test_names_are_shown_as_they_are(capsys):
    show(of_classes(Meaning("multiclass", ("[red]a", "b", "\x1b[2J")), Y, OUTPUTS))
    out = capsys.readouterr().out
    assert "[red]a" in out
    assert "\x1b" not in out
    assert "0.6667" in out
