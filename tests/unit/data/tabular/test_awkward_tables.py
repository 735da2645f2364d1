"""Ten awkward tables: one message names all problems, and each advice in it works; `--auto` needs none."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dptrain.cli.loading import load_configured
from dptrain.cli.main import _configure, _parse
from dptrain.comm import SoloCommunicator
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.tabular.table_loading import encode_file
from dptrain.data.tabular.tables import repaired
from dptrain.errors import LIST, AgreedError, DataError
from tests.unit.data.tabular.awkward import ROWS, TABLES

OPTION = re.compile(
    r"--(?:drop|numbers|categorical|text|dates|na|decimal|missing) (?:'[^']*'|[^\s,;()']|,(?=\S))+|--repair-header"
)


def load(path, target, *arguments):
    config = _configure(_parse("train", ["--data", str(path), "--target", target, *arguments]))
    return load_configured(config.data, SoloCommunicator(), config.data.task)


def message_of(path, target, *arguments):
    with pytest.raises(AgreedError) as caught:
        load(path, target, *arguments)
    assert caught.value.exit_code == 65
    return str(caught.value)


@pytest.fixture(params=TABLES)
def table(request, tmp_path):
    awkward = TABLES[request.param]
    return awkward, awkward.write(tmp_path / "t.csv")


def assert_sound(data, least=0.9 * ROWS):
    for split in (data.train, data.test):
        assert split.x.shape == (len(split.y), *data.preprocessing.sample_shape)
        assert np.isfinite(split.x).all()
        assert np.isfinite(split.y).all()
    assert least <= len(data.train) + len(data.test) <= ROWS


def advised(message):
    """Return the options that settle all, and what is advised in each line, as typed."""
    if LIST not in message:
        lines, together = [message], OPTION.findall(message)[:1]
    else:
        first, *lines = message.split(LIST)
        together = [first.split("--auto settles them, or ")[1]]
    return " ".join(together), [OPTION.findall(line.replace(" --missing indicator)", "")) for line in lines]


def test_all_problems_are_in_one_message(table):
    awkward, path = table
    if not awkward.message:
        assert_sound(load(path, awkward.target))
        return
    message = message_of(path, awkward.target)
    assert message.startswith(str(path))
    for part in awkward.message:
        assert part in message
    assert message.count(LIST) == 0 or len(message.split(LIST)) > 2


def test_what_the_message_advises_together_trains(table):
    awkward, path = table
    if awkward.message:
        together, _ = advised(message_of(path, awkward.target))
        assert_sound(load(path, awkward.target, *shlex.split(together)))


def test_each_advice_works(table):
    """Each alternative of each line, beside the others' first: it settles its problem, and what it shows has advice."""
    awkward, path = table
    if not awkward.message:
        return
    message = message_of(path, awkward.target)
    _, lines = advised(message)
    for number, line in enumerate(lines):
        assert line, "a problem without an option"
        for alternative in dict.fromkeys(line):
            others = [first for place, (first, *_) in enumerate(lines) if place != number]
            typed = shlex.split(" ".join([*others, alternative]))
            try:
                data = load(path, awkward.target, *typed)
            except AgreedError as error:  # that way shows another problem: its advice works
                more, _ = advised(str(error))
                data = load(path, awkward.target, *typed, *shlex.split(more))
            assert_sound(data, least=10)


def test_auto_does_what_it_says(table):
    awkward, path = table
    data = load(path, awkward.target, "--auto")
    assert_sound(data)
    stands_for = next(note for note in data.notes if note.startswith("--auto: stands for "))
    typed = shlex.split(stands_for.removeprefix("--auto: stands for "))
    assert load(path, awkward.target, *typed).preprocessing == data.preprocessing


def test_a_model_reads_what_it_was_trained_on(table, tmp_path):
    """The saved preprocessing gives the training's numbers: from a file, a data frame and records, also of few rows."""
    awkward, path = table
    data = load(path, awkward.target, "--auto")
    known = Preprocessing.from_dict(data.preprocessing.to_dict())
    assert known == data.preprocessing
    complete = replace(awkward, rows=[row for row in awkward.rows if row[-1] != ""])
    x = encode_file(str(complete.write(path)), known, SoloCommunicator()).x
    trained = np.concatenate([data.train.x, data.test.x])
    assert sorted(map(tuple, trained.tolist())) == sorted(map(tuple, x.tolist()))
    few = encode_file(str(complete.write(tmp_path / "few.csv", slice(7))), known, SoloCommunicator()).x
    np.testing.assert_array_equal(few, x[:7])
    rows = [record(complete, known, row) for row in complete.rows]
    np.testing.assert_array_equal(known.encode(rows), x)
    np.testing.assert_array_equal(known.encode(rows[:7]), x[:7])
    np.testing.assert_array_equal(known.encode(pd.DataFrame(rows)), x)


def record(awkward, preprocessing, row):
    """Return a row as a client sends it: numbers as numbers, other cells as the file has them, null for empty ones."""
    names, _ = repaired([name.strip() for name in awkward.header])
    cells = dict(zip(names, row, strict=True))
    plain = {column.name for column in preprocessing.columns if column.role == "number" and not column.date}
    for name, cell in cells.items():
        text = str(cell).strip()
        is_word = text == "" or text in preprocessing.na
        cells[name] = None if is_word else float(text) if name in plain and is_float(text) else cell
    return cells


def is_float(text):
    return text.replace(".", "", 1).removeprefix("-").isdigit()


def test_values_that_training_has_not_seen_go_by_their_rule(tmp_path):
    awkward = TABLES["a house price table"]
    data = load(awkward.write(tmp_path / "t.csv"), "SalePrice", "--auto")
    row = record(awkward, data.preprocessing, awkward.rows[0])
    known = data.preprocessing
    column = next(column for column in known.columns if column.name == "Sale Type")
    assert len(column.rare) > 1
    expected = known.encode({**row, "Sale Type": column.rare[0]})
    for cell in (column.rare[1], "never seen", None):
        np.testing.assert_array_equal(known.encode({**row, "Sale Type": cell}), expected)
    assert not np.array_equal(known.encode({**row, "Sale Type": "WD"}), expected)
    assert np.isfinite(known.encode({**row, "LotArea": None})).all()
    with pytest.raises(DataError, match=r"column 'Date Sold': '1\.2\.2020', expected a date such as 12/31/2020"):
        known.encode({**row, "Date Sold": "1.2.2020"})


def test_na_is_a_country_where_it_is_asked_for(tmp_path):
    awkward = TABLES["words for nothing"]
    awkward = replace(awkward, rows=[row for row in awkward.rows if row[-1] != ""])
    path = awkward.write(tmp_path / "t.csv")
    data = load(path, "y", "--auto", "--categorical", "country")
    country = next(column for column in data.preprocessing.columns if column.name == "country")
    assert (country.values, country.missing) == (("DE", "FR", "NA"), None)
    x = encode_file(str(path), data.preprocessing, SoloCommunicator()).x
    place = [column.name for column in data.preprocessing.columns].index("country")
    assert place == 3
    expected = [country.values.index(row[3]) for row in awkward.rows]
    np.testing.assert_array_equal(x[:, -3:].argmax(axis=1), expected)


def test_the_words_for_a_missing_value_may_be_set(tmp_path):
    path = tmp_path / "t.csv"
    cells = ["NA", "x", "?", "null"] * 5
    path.write_text("a,b,y\n" + "".join(f"{cell},{n % 7},{n}.5\n" for n, cell in enumerate(cells)))
    columns = [
        (load(path, "y", "--missing", "mean", *words).preprocessing.columns[0].values)
        for words in ((), ("--na", "?"), ("--na", "default,?"), ("--na", "none"))
    ]
    assert columns == [
        ("?", "x", "(missing)"),
        ("NA", "null", "x", "(missing)"),
        ("x", "(missing)"),
        ("?", "NA", "null", "x"),
    ]


def test_options_add_up_where_they_are_repeated(tmp_path):
    path = TABLES["identifiers and free text"].write(tmp_path / "t.csv")
    drops = [word for name in ("customer_id", "uuid", "order no,note") for word in ("--drop", name)]
    data = load(path, "y", *drops, "--numbers", "area")
    assert [column.name for column in data.preprocessing.columns] == ["code", "area"]
