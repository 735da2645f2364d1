"""What a sweep varies, as people write it."""

import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dptrain.errors import ConfigError
from dptrain.sweeps.space import (
    MAX_SEEDS,
    Choice,
    Floats,
    Integers,
    Space,
    label,
    parse_distribution,
    parse_grid,
    parse_random,
    parse_seeds,
)

INTEGERS_64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS_64 | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
# Mostly what the parsers have rules for.
SCRIBBLE = st.text() | st.text("0123456789.,-+:=[]{}'\"#&*!|>% \n\tabelogxnft_~?", max_size=20)


def distinct(values: list) -> bool:
    return not complaint(Choice, values)


CHOICES = st.lists(VALUES, min_size=1, max_size=4).filter(distinct).map(Choice)


@st.composite
def ranges(draw):
    log = draw(st.booleans())
    if draw(st.booleans()):
        ends = st.integers(1, 2**63 - 1) if log else INTEGERS_64
        return Integers(*sorted(draw(st.lists(ends, min_size=2, max_size=2, unique=True))), log=log)
    ends = st.floats(5e-324, exclude_min=False, allow_infinity=False) if log else NUMBERS
    pair = st.lists(ends, min_size=2, max_size=2, unique=True).filter(lambda pair: pair[0] != pair[1])
    return Floats(*sorted(draw(pair)), log=log)


def refusal(parse, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    return str(caught.value)


def complaint(parse, *arguments) -> str:
    """Return the message of a refusal, "" where there is none; any other error is the test's."""
    try:
        parse(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ("0-15", tuple(range(16))),
        ("0-3,8,10-12", (0, 1, 2, 3, 8, 10, 11, 12)),
        ("7", (7,)),
        (" 5 , 1 - 2", (5, 1, 2)),
        (7, (7,)),
        ([3, 1, 2], (3, 1, 2)),
        (["0-2", 9], (0, 1, 2, 9)),
        (range(3), (0, 1, 2)),
        (np.arange(2), (0, 1)),
        (str(2**63 - 1), (2**63 - 1,)),
        ("0-9999", tuple(range(10_000))),
    ],
)
def test_seeds(words, seeds):
    parsed = parse_seeds(words)
    assert parsed == seeds
    assert {type(seed) for seed in parsed} == {int}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "seeds: '' contains no seed; expected a list such as 0-15 or 0,2,5"),
        ([], "seeds: [] contains no seed; expected a list such as 0-15 or 0,2,5"),
        ("1,,2", "seeds: '' is neither an integer >= 0 nor a range such as 0-15"),
        ("0-3,two", "seeds: 'two' is neither an integer >= 0 nor a range such as 0-15"),
        ("-1", "seeds: '-1' is neither an integer >= 0 nor a range such as 0-15"),
        (-1, "seeds: -1 is neither an integer >= 0 nor a range such as 0-15"),
        (True, "seeds: True is neither an integer >= 0 nor a range such as 0-15"),
        (1.5, "seeds: 1.5 is neither an integer >= 0 nor a range such as 0-15"),
        ({"a": 1}, "seeds: {'a': 1} is neither an integer >= 0 nor a range such as 0-15"),
        (None, "seeds: None is neither an integer >= 0 nor a range such as 0-15"),
        ("3-1", "seeds: the range '3-1' is descending; write the lower end first"),
        ("0-3,2", "seeds: 2 of '2' appears twice"),
        ([1, 1], "seeds: 1 of 1 appears twice"),
        ("0-10000", f"seeds: with '0-10000' there are more than {MAX_SEEDS}"),
        ("0-9223372036854775807", f"seeds: with '0-9223372036854775807' there are more than {MAX_SEEDS}"),
        ("9223372036854775808", "seeds: '9223372036854775808' is above 2**63 - 1"),
    ],
)
def test_seeds_that_are_none(words, message):
    assert refusal(parse_seeds, words) == message


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("learning_rate=1e-3,3e-4", "learning_rate", [1e-3, 3e-4]),
        ("hidden=128,[256,128]", "hidden", [128, [256, 128]]),
        ("optimizer.name = adam, sgd", "optimizer.name", ["adam", "sgd"]),
        ("batch-size=32", "batch-size", [32]),
        ("shuffle=true,false", "shuffle", [True, False]),
        ("clipnorm=null,1.", "clipnorm", [None, 1.0]),
        ("clipnorm=none,.5", "clipnorm", ["none", 0.5]),
        ("a=1E+3,-2e4,.5e1,[1e1]", "a", [1000.0, -20000.0, 5.0, [10.0]]),
        ("a='x, y',\"b=c\"", "a", ["x, y", "b=c"]),
        ("day=2026-01-01,2026-13-45", "day", ["2026-01-01", "2026-13-45"]),
        ("a=1,true", "a", [1, True]),
    ],
)
def test_grid(text, name, values):
    grid = parse_grid(text)
    assert grid == (name, values)
    assert [type(value) for value in grid[1]] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden", "grid: 'hidden' has no '='; expected name=values"),
        ("=1,2", "grid: '' is not a field's name"),
        ("a b=1", "grid: 'a b' is not a field's name"),
        ("a=", "grid: a: no values"),
        ("a=1,2,1", "grid: a: 1 appears twice"),
        ("a=0,0.0", "grid: a: 0.0 appears twice"),
        ("a=[1,2],[1, 2.0]", "grid: a: [1, 2.0] appears twice"),
        ("a={b: 1}", "grid: a: {'b': 1} is not a finite number, a word or a list of these"),
        ("a=b: 1", "grid: a: {'b': 1} is not a finite number, a word or a list of these"),
        ("a=[{b: 1}]", "grid: a: {'b': 1} is not a finite number, a word or a list of these"),
        ("a=.inf", "grid: a: inf is not a finite number, a word or a list of these"),
        ("a=1e999", "grid: a: inf is not a finite number, a word or a list of these"),
        ("a=99999999999999999999", "grid: a: 99999999999999999999 is not a finite number, a word or a list of these"),
        ("a=1]", "grid: a: cannot read '1]': expected '<document start>', but found ']'"),
        ("a=1,,2", "grid: a: cannot read '1,,2': expected the node content, but found ','"),
        ("a=&b [*b]", "grid: a: cannot read '&b [*b]': tags and references are not read"),
        ("a=!!python/name:os.system x", None),
        ("a=!!binary eA==", None),
        ("a=" + 2000 * "[", None),
        ("a=" + 9 * "[" + 9 * "]", None),
        ("a=" + 5000 * "9", None),
        ("a=0x" + 5000 * "f", None),
        ("a=1 # 2", None),
        ('a="\\ud800"', None),
    ],
)
def test_grids_that_are_none(text, message):
    error = refusal(parse_grid, text)
    assert error.startswith("grid: ")
    assert "\n" not in error
    assert len(error) < 200
    assert message is None or error == message


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("log:1e-5..1e-1", Floats(1e-5, 1e-1, log=True)),
        ("0.1..0.5", Floats(0.1, 0.5)),
        (".1...5", Floats(0.1, 0.5)),
        ("0..1.", Floats(0.0, 1.0)),
        ("-1e3..1", Floats(-1e3, 1.0)),
        ("16..512", Integers(16, 512)),
        (" -3 .. +3 ", Integers(-3, 3)),
        ("log:16..1024", Integers(16, 1024, log=True)),
        (" log : 1 .. 2.0", Floats(1.0, 2.0, log=True)),
        ("relu,tanh", Choice(("relu", "tanh"))),
        ("128,[256,128]", Choice((128, [256, 128]))),
        ("1e-3,3e-4", Choice((1e-3, 3e-4))),
        ("'../a'", Choice(("../a",))),
        ("'gs:a',b", Choice(("gs:a", "b"))),
        ("adam", Choice(("adam",))),
    ],
)
def test_distributions(text, distribution):
    parsed = parse_distribution(text)
    assert parsed == distribution
    assert type(parsed) is type(distribution)
    assert parse_random(f"field={text}") == ("field", distribution)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5..0.1", "'0.5..0.1': the lower end 0.5 is not below the upper end 0.1"),
        ("3..3", "'3..3': the lower end 3 is not below the upper end 3"),
        ("log:0..1", "'log:0..1': the lower end 0 is not above 0 and has no logarithm"),
        ("log:-1.0..1", "'log:-1.0..1': the lower end -1.0 is not above 0 and has no logarithm"),
        ("0.1..inf", "'0.1..inf': 'inf' is not a finite number"),
        ("0.1..1e999", "'0.1..1e999': '1e999' is not a finite number"),
        ("nan..1", "'nan..1': 'nan' is not a finite number"),
        ("..1", "'..1': '' is not a finite number"),
        ("a..b", "'a..b': 'a' is not a finite number"),
        ("0..9223372036854775808", "'0..9223372036854775808': 9223372036854775808 is not a 64-bit integer"),
        ("lag:1..2", "'lag:1..2': unknown prefix 'lag'; did you mean 'log'?"),
        ("normal:0..1", "'normal:0..1': unknown prefix 'normal'; known: log"),
        ("log:1,2", "'log:1,2': expected a range such as log:1e-5..1e-1"),
        ("log:1e-5-1e-1", "'log:1e-5-1e-1': expected a range such as log:1e-5..1e-1"),
        ("", "choice: no values"),
        ("a,a", "choice: a appears twice"),
    ],
)
def test_distributions_that_are_none(text, message):
    assert refusal(parse_distribution, text) == message
    assert refusal(parse_random, f"lr={text}") == f"random: lr: {message}"
    assert refusal(Space.from_dict, {"random": {"lr": text}, "samples": 1}) == f"random: lr: {message}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Floats("0", 1),
        lambda: Floats(math.nan, 1),
        lambda: Floats(0, 10**400),
        lambda: Floats(False, True),
        lambda: Integers(0.0, 1),
        lambda: Integers(0, 2**63),
        lambda: Choice("ab"),
        lambda: Choice([]),
        lambda: Choice([object()]),
        lambda: Choice([math.inf]),
    ],
)
def test_ends_and_choices_made_by_hand_are_checked(make):
    assert "\n" not in refusal(make)


@given(SCRIBBLE)
@example("a=" + "&a [*a]")
@example("a=[=]")
@example("a=0001-01-01 00:00:00 +23:59")
@example("a=<<: 1")
@example("a=? [b]")
def test_any_text_gives_a_value_or_one_line(text):
    for parse in (parse_seeds, parse_distribution, parse_grid, parse_random, lambda text: parse_grid(f"a={text}")):
        message = complaint(parse, text)
        assert message.isprintable()
        assert len(message) < 250


@given(VALUES | st.dictionaries(st.text(max_size=9), VALUES, max_size=3))
def test_any_tree_gives_a_value_or_one_line(tree):
    for parse in (parse_seeds, Space.from_dict, lambda tree: Space.from_dict({"grid": tree, "random": {"a": tree}})):
        assert complaint(parse, tree).isprintable()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20, unique=True))
def test_seeds_stay_as_written(seeds):
    assert parse_seeds(",".join(map(str, seeds))) == tuple(seeds)
    assert parse_seeds(seeds) == tuple(seeds)


@given(ranges() | CHOICES, st.integers(0, 2**63 - 1))
@example(Floats(-1.7e308, 1.7e308), 0)
@example(Integers(2**63 - 2, 2**63 - 1, log=True), 0)
@example(Integers(-(2**63), 2**63 - 1), 0)
def test_a_description_gives_the_distribution_back_and_draws_are_in_it(distribution, seed):
    reparsed = parse_distribution(distribution.describe())
    assert reparsed == distribution
    assert type(reparsed) is type(distribution)
    samples = [distribution.sample(np.random.default_rng(seed + i)) for i in range(5)]
    assert samples == [reparsed.sample(np.random.default_rng(seed + i)) for i in range(5)]
    assert json.loads(json.dumps(samples, allow_nan=False)) == samples
    for value in samples:
        if isinstance(distribution, Choice):
            assert value in distribution.choices
        else:
            assert type(value) is (int if isinstance(distribution, Integers) else float)
            assert distribution.low <= value <= distribution.high


def draws(distribution, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([distribution.sample(rng) for _ in range(count)])


def test_draws_have_their_distribution():
    # Within five standard deviations of what the distribution says, of a fixed generator.
    assert abs(draws(Floats(2, 4), 10_000).mean() - 3) < 5 * (2 / 12**0.5) / 100
    logs = np.log10(draws(Floats(1e-4, 1, log=True), 10_000))
    assert abs(logs.mean() + 2) < 5 * (4 / 12**0.5) / 100
    counts = np.bincount(draws(Integers(0, 3), 10_000))
    assert np.all(np.abs(counts - 2500) < 5 * (10_000 * 0.25 * 0.75) ** 0.5)
    counts = np.bincount(draws(Integers(1, 3, log=True), 10_000))[1:]
    parts = np.diff(np.log([0.5, 1.5, 2.5, 3.5])) / np.log(7)
    assert np.all(np.abs(counts - 10_000 * parts) < 5 * (10_000 * parts * (1 - parts)) ** 0.5)
    counts = np.unique(draws(Choice(("a", "b")), 10_000), return_counts=True)[1]
    assert np.all(np.abs(counts - 5000) < 5 * (10_000 * 0.25) ** 0.5)


def test_settings_of_a_grid():
    space = Space(grid={"a": [1, 2], "b": ["x", "y"]})
    assert space.fields == ("a", "b")
    assert space.size == 4
    assert space.settings() == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]


def test_an_empty_space_has_one_empty_setting():
    assert Space().settings() == [{}]
    assert Space().size == 1
    assert Space.from_dict({}) == Space.from_dict({"grid": None, "random": None}) == Space()


def test_each_draw_meets_the_whole_grid():
    space = Space(grid={"a": [1, 2]}, random={"b": Floats(0, 1), "c": Integers(0, 10**9)}, samples=3)
    settings = space.settings()
    assert space.fields == ("a", "b", "c")
    assert len(settings) == space.size == 6
    assert [tuple(setting) for setting in settings] == 6 * [("a", "b", "c")]
    assert [setting["a"] for setting in settings] == [1, 2, 1, 2, 1, 2]
    combinations = [(setting["b"], setting["c"]) for setting in settings]
    assert combinations[::2] == combinations[1::2]
    assert len(set(combinations)) == 3


def test_draws_stay_what_they_were():
    # A sweep that is continued by another version of dptrain goes through the same settings.
    space = Space(random={"lr": Floats(1e-5, 1e-1, log=True), "hidden": Integers(16, 512)}, samples=2, seed=3)
    first, second = space.settings()
    assert first == {"lr": pytest.approx(0.0005101050624664615, rel=1e-12), "hidden": 333}
    assert second == {"lr": pytest.approx(0.0030832187856869677, rel=1e-12), "hidden": 84}


@given(
    st.dictionaries(st.sampled_from("abc"), ranges() | CHOICES, min_size=1),
    ranges(),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 2**63 - 1),
)
def test_more_samples_and_fields_keep_the_draws(random, other, samples, more, seed):
    settings = Space(random=random, samples=samples, seed=seed).settings()
    assert Space(random=random, samples=samples + more, seed=seed).settings()[:samples] == settings
    wider = Space(grid={"grid": [0]}, random={"other": other, **random}, samples=samples, seed=seed).settings()
    assert [{name: setting[name] for name in random} for setting in wider] == settings


def test_another_seed_and_another_name_draw_anew():
    def values(name, seed):
        return [setting[name] for setting in Space(random={name: Floats(0, 1)}, samples=4, seed=seed).settings()]

    samples = values("a", 0) + values("a", 1) + values("b", 0)
    assert len(set(samples)) == 12


@given(
    st.dictionaries(st.sampled_from("abc"), CHOICES.map(lambda choice: choice.choices)),
    st.dictionaries(st.sampled_from("xyz"), ranges() | CHOICES),
    st.integers(1, 20),
    st.integers(0, 2**63 - 1),
)
def test_a_space_survives_json_and_yaml(grid, random, samples, seed):
    space = Space(grid=grid, random=random, samples=samples if random else 0, seed=seed)
    tree = space.to_dict()
    assert Space.from_dict(json.loads(json.dumps(tree, allow_nan=False))) == space
    assert Space.from_dict(yaml.safe_load(yaml.safe_dump(tree))) == space


def test_a_space_as_people_write_it():
    text = """
    grid: {hidden: [128, [256, 128]], learning_rate: [1e-3, 3e-4]}
    random: {dropout: 0.1..0.5, activation: [relu, tanh], weight_decay: "log:1e-5..1e-1"}
    samples: 20
    """
    assert Space.from_dict(yaml.safe_load(text)) == Space(
        grid={"hidden": (128, [256, 128]), "learning_rate": (0.001, 0.0003)},
        random={
            "dropout": Floats(0.1, 0.5),
            "activation": Choice(("relu", "tanh")),
            "weight_decay": Floats(1e-5, 1e-1, log=True),
        },
        samples=20,
    )


def test_values_of_numpy_become_plain():
    space = Space(
        grid={"lr": np.geomspace(0.25, 1, 3), "hidden": [(8, 4), np.int64(3), np.array([1, 2])]},
        random={"a": Floats(np.float64(0.5), np.int32(2)), "b": Choice(range(2))},
        samples=1,
    )
    assert space.grid == {"lr": (0.25, 0.5, 1.0), "hidden": ([8, 4], 3, [1, 2])}
    assert [type(value) for values in space.grid.values() for value in values] == [float] * 3 + [list, int, list]
    assert json.loads(json.dumps(space.to_dict()))["random"] == {"a": "0.5..2.0", "b": "0,1"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"girds": {}}, "space: unknown key 'girds'; did you mean 'grid'?"),
        ({"trials": 3}, "space: unknown key 'trials'; known: grid, random, samples, seed"),
        ({1: 3}, "space: unknown key 1; known: grid, random, samples, seed"),
        ([1], "space: expected names with values, found [1]"),
        ({"grid": [1]}, "grid: expected names with values, found [1]"),
        ({"grid": {"a": 1}}, "grid: a: expected a list of values, found 1"),
        ({"grid": {"a": "1,2"}}, "grid: a: expected a list of values, found '1,2'"),
        ({"grid": {"a": []}}, "grid: a: no values"),
        ({"grid": {True: [1]}}, "grid: True is not a field's name"),
        ({"random": {"a": 1}, "samples": 1}, "random: a: choice: expected a list of values, found 1"),
        ({"grid": {"a": [1]}, "random": {"a": "0..1"}, "samples": 1}, "'a' is both in grid and in random; keep one"),
        ({"random": {"a": "0..1"}}, "samples is 0: expected the number of random draws of a"),
        ({"samples": 3}, "samples is 3, but no field is random"),
        ({"samples": -1}, "samples: expected an integer of 0 to 100000, found -1"),
        ({"samples": True}, "samples: expected an integer of 0 to 100000, found True"),
        ({"seed": "x"}, "seed: expected an integer of 0 to 9223372036854775807, found 'x'"),
        (
            {"grid": {"a": list(range(1001)), "b": list(range(100))}},
            "100100 settings, expected 100000 at most; use fewer values or samples",
        ),
    ],
)
def test_spaces_that_are_none(tree, message):
    assert refusal(Space.from_dict, tree) == message


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({}, ""),
        ({"learning_rate": 1e-3, "hidden": 128}, "learning_rate=0.001, hidden=128"),
        ({"a": 1e-5, "b": [256, 128], "c": None, "d": True}, "a=1e-05, b=[256, 128], c=null, d=true"),
        ({"a": "relu", "b": "x y", "c": "true", "d": ""}, 'a=relu, b="x y", c="true", d=""'),
        ({"lr": 0.0005101050624664615, "b": [1.0, 2e20 / 3]}, "lr=0.000510105, b=[1.0, 6.66667e+19]"),
        ({"a": "two\nlines\x1b"}, 'a="two\\nlines\\e"'),
    ],
)
def test_label(setting, text):
    assert label(setting) == text


def rounded(value):
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@given(VALUES.filter(lambda value: distinct([rounded(value)])))
def test_a_label_is_one_line_that_the_grid_reads(value):
    (value,) = Choice([value]).choices
    text = label({"a": value})
    assert text.splitlines() == [text]
    assert parse_grid(text) == ("a", [rounded(value)])
