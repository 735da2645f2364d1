"""What other tools call the words of the command line."""

import re

import pytest

from dptrain.cli.options import words
from dptrain.cli.options.words import suggest


@pytest.mark.parametrize(
    ("word", "known", "end"),
    [
        ("lr", ["learning_rate", "seed"], "; did you mean 'learning_rate'?"),
        ("--LR", ["--learning-rate"], "; did you mean '--learning-rate'?"),
        ("--learning_rate", ["--learning-rate"], "; did you mean '--learning-rate'?"),
        ("eval", ["train", "evaluate"], "; did you mean 'evaluate'?"),
        ("--workers", ["--ranks"], "; did you mean '--ranks'?"),
        ("--workers", ["--seed"], "; mpirun sets the number of ranks: mpirun -n 4 python -m dptrain"),
        ("--sead", ["--seed"], "; did you mean '--seed'?"),
        ("lr", ["units"], "; known: units"),
    ],
)
def test_suggestions(word, known, end):
    assert suggest(word, known) == end


def test_further_words_are_suggested_by_their_ends_only():
    assert suggest("lr", ["seed"], ["optimizer.learning_rate"]) == "; did you mean 'optimizer.learning_rate'?"
    assert suggest("learning_rat", ["seed"], ["optimizer.learning_rate"]) == "; known: seed"


def test_a_word_that_is_ours_where_it_was_typed_comes_first():
    assert suggest("--objective", ["--metric", "--objectives"]) == "; did you mean '--metric'?"
    assert suggest("--Objective", ["--metric", "--objective"]) == "; did you mean '--objective'?"


def test_every_word_is_written_as_it_is_looked_up():
    assert all(re.fullmatch("[a-z0-9_]+", word) and word == words._plain(word) for word in words._MEANT)
