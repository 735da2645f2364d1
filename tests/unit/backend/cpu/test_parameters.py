"""Which literals of generated C++ become parameters, and that these change no bits."""

import numpy as np
import pytest

from dptrain.backend.cpu import parameters
from dptrain.backend.cpu.parameters import LONGEST, Literal, Version, parsed
from tests.lengths import model_of, results, texts

TEXT = """static void kernel0(Context &c, const int *s) {{
  float r0[{bound}];
  dp_Sum<float, 16> s1;
  for (int64_t k0 = 0; k0 < {length}; ++k0) w0[k0 * {length} + 4] = x1 / {real}f + {long_integer}ll;
}}

static const int numbers[] = {{0, 1, 2}};
extern "C" void run(Context &whole, const int64_t *starts, int64_t steps) {{
  dp_rows(c, numbers + 7, kernel0, 3 * B);
}}
"""


def text(length, **changed):
    return TEXT.format(**{"bound": length, "length": length, "real": float(length), "long_integer": length} | changed)


def version_of(*sources):
    return Version(parsed(sources[0]).pieces, [parsed(source).literals for source in sources])


def test_literals_of_functions_alone_are_found():
    found = parsed(text(20))
    integers = [Literal("int", n) for n in ("0", "20", "20", "4")]
    expected = [Literal("bound", "20"), *integers, Literal("float", "20.0"), Literal("long long", "20")]
    assert found.literals == [*expected, Literal("int", "7"), Literal("int", "3")]
    assert "dp_Sum<float, 16>" in found.pieces[1]
    assert found.digest == parsed(text(21)).digest
    assert found.digest != parsed(text(20).replace("16", "1")).digest, "an argument of a template"
    assert found.digest != parsed(text(20).replace("{0, 1", "{0, 2")).digest, "outside of functions"


def test_what_differs_becomes_a_parameter():
    version = version_of(text(20), text(21))
    assert version.source == (
        "static void kernel0(Context &c, const int *s) {\n"
        "  const int d0 = dp_parameter<int>(c, 0);\n"
        "  const float d1 = dp_parameter<float>(c, 1);\n"
        "  const long long d2 = dp_parameter<long long>(c, 2);\n"
        f"  float r0[{LONGEST + 16}];\n"
        "  dp_Sum<float, 16> s1;\n"
        "  for (int64_t k0 = 0; k0 < d0; ++k0) w0[k0 * d0 + 4] = x1 / d1 + d2;\n"
        "}\n" + text(20).split("}\n", 1)[1]
    )
    bits = int(np.float64(34).view(np.uint64))
    assert version.parameters(parsed(text(34)).literals) == [34, bits, 34]


@pytest.mark.parametrize("changed", [{"real": 5.0}, {"long_integer": 33}, {"bound": 7}])
def test_parameters_of_other_numbers(changed):
    version = version_of(text(20), text(21))
    assert version.parameters(parsed(text(34, **changed)).literals) is not None


def test_what_a_version_holds_fast_must_be_equal():
    same = version_of(text(20), text(21, bound=20))
    assert same.parameters(parsed(text(22, bound=20)).literals) is not None
    assert same.parameters(parsed(text(22)).literals) is None, "the bound of a buffer"
    sources = text(20), text(21)
    version = version_of(*sources)
    other = text(34).replace("k0 * 34", "k0 * 35")
    assert version.parameters(parsed(other).literals) is None, "where both had one number"
    assert version_of(*sources, other).parameters(parsed(text(22)).literals) is not None
    assert version.parameters(parsed(text(34).replace("+ 4", "+ 5")).literals) is None
    assert version.source != version_of(*sources, other).source


def test_the_order_of_lengths_does_not_change_the_text():
    assert version_of(text(20), text(21)).source == version_of(text(34), text(9)).source


@pytest.mark.parametrize(
    ("number", "is_parameter"),
    [
        ("0.1f", True),
        ("1e-05f", True),
        ("0.0999755859375f", True),  # a half's digits, which are more than a float needs
        ("0.100000001490116f", False),  # not the shortest of its float
        ("0.30000000000000004", True),
        ("9223372036854775807ll", True),
        ("18446744073709551615ull", False),
        ("2147483648", True),
        ("0x10", False),
    ],
)
def test_literals_that_may_be_parameters(number, is_parameter):
    head, tail = "static void kernel0(Context &c) {\n  x1 = ", ";\n}\n"
    (*_, literal) = [None, *parsed(f"{head}{number}{tail}").literals]
    assert (literal is not None) == is_parameter


def test_long_buffers_and_types_stay():
    assert len(parsed(text(LONGEST)).literals) == 1 + len(parsed(text(20, bound=LONGEST + 1)).literals)
    assert parsed(text(2**31 - 1, bound=1)).digest != parsed(text(2**31, bound=1)).digest


def test_optimized_texts_have_the_same_bits():
    """As users compile them; those of the tests of models are compiled in less time."""
    lengths = (19, 20, 21, 40, 41, 42)
    with texts():
        shared = results(model_of("masked attention"), lengths)
    with texts(shared=False):
        expected = results(model_of("masked attention"), lengths)
    for value, other in zip(shared, expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_what_is_remembered_has_a_bound(monkeypatch):
    monkeypatch.setattr(parameters, "_MOST_TEXTS", 3)
    known = parameters._Known()
    for number in range(9):
        known.family(parsed(text(20).replace("numbers[]", f"numbers{number}[]")), number)
    assert len(known.families) == 3
