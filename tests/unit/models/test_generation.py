"""`Model.generate`: the tokens of a window that is computed anew for each, from caches."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.cli.main import main
from dptrain.errors import ConfigError, DataError
from dptrain.ops.decoding import Decoder, most_probable
from dptrain.random import Purpose, stream

LENGTH, TOKENS, WIDTH = 12, 13, 8


def weighted(model, seed=0, scale=0.5):
    """Return a model with weights that make its choices differ."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if weight.dtype.kind in "fV":
            weight.assign(rng.normal(0, scale, weight.shape))
    return model


def attention(kind, x, **options):
    if kind == "grouped":
        layer = layers.GroupQueryAttention(4, 4, 2, **options)
    elif kind == "composed":
        layer = layers.MultiHeadAttention(2, 4, dropout=0.5, **options)
    elif kind == "window":
        layer = layers.MultiHeadAttention(2, 4, sliding_window=3, **options)
    elif kind == "gated":
        layer = layers.MultiHeadAttention(2, 4, value_dim=3, use_gate=True, **options)
    elif kind == "masked":
        return layers.MultiHeadAttention(2, 4, **options)(x, x, attention_mask=np.tri(x.shape[1], dtype=bool)[None])
    elif kind == "dot product":
        return layers.Attention(**options)([x, x], use_causal_mask=True)
    else:
        layer = layers.MultiHeadAttention(2, 4, **options)
    return layer(x, x, use_causal_mask=True)


class Positions(layers.Layer):
    def __init__(self, kind, length, width, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.kind, self.length, self.width = kind, length, width
        self.table = layers.Embedding(length, width) if kind == "learned" else None

    def call(self, x):
        count = x.shape[1]
        if self.table is not None:
            return x + self.table(ops.arange(count))
        angles = ops.cast(ops.arange(count), "float32")[:, None] / 100 ** (np.arange(self.width) / self.width)
        return x + ops.cast(ops.where(np.arange(self.width) % 2, ops.cos(angles), ops.sin(angles)), x.dtype)


def gpt(kind="heads", positions="learned", norm="layer", ending="scores", blocks=2, length=LENGTH, mask_zero=False):
    """Return a small GPT."""
    tokens = dp.Input((length,), dtype="int32")
    table = layers.ReversibleEmbedding(TOKENS, WIDTH, mask_zero=mask_zero)
    x = Positions(positions, 16 if length is None else length, WIDTH)(table(tokens))
    for _ in range(blocks):
        normalized = (layers.LayerNormalization if norm == "layer" else layers.RMSNormalization)()(x)
        x = layers.Add()([x, layers.Dropout(0.3)(attention(kind, normalized))])
        x = layers.Add()([x, layers.Dense(WIDTH, "gelu")(layers.LayerNormalization()(x))])
    if ending == "tied":
        return dp.Model(tokens, table(x, reverse=True))
    return dp.Model(tokens, layers.Dense(TOKENS, "softmax" if ending == "probabilities" else None)(x))


def scores_of(model, ids, length, ending="scores"):
    """Return the scores after ids, from the whole window."""
    window = np.zeros((1, length or len(ids)), np.int32)
    window[0, : len(ids)] = ids
    outputs = np.asarray(model.predict(window, verbose=0)).astype(np.float64)
    last = outputs[0, len(ids) - 1] if outputs.ndim == 3 else outputs[0]
    return np.log(last) if ending == "probabilities" else last


def drawn(scores, uniform, temperature, top_k, top_p):
    """Return a token as `generate` documents it, by sorting."""
    if not temperature:
        return int(scores.argmax())
    powers = np.exp((scores - scores.max()) / temperature)
    if top_k is not None:
        powers = np.where(powers >= np.sort(powers)[::-1][min(top_k, len(powers)) - 1], powers, 0)
    if top_p is not None and top_p < 1:
        order = np.sort(powers)[::-1]
        least = order[np.searchsorted(np.cumsum(order), top_p * powers.sum())]
        powers = np.where(powers >= least, powers, 0)
    total = np.cumsum(powers)
    return int(np.argmax(total > uniform * total[-1]))


def recomputed(model, prompts, count, length, temperature=0.0, top_k=None, top_p=None, stop=(), seed=0, ending=""):
    texts = []
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        uniform = stream(seed, Purpose.GENERATION, row).random(256, np.float32)
        for _ in range(count):
            scores = scores_of(model, text, length, ending)
            text.append(drawn(scores, uniform[len(text)], temperature, top_k, top_p))
            if text[-1] in stop:
                break
        texts.append(text)
    return texts


def lists(texts):
    assert all(text.dtype == np.int32 for text in texts)
    return [text.tolist() for text in texts]


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]
KINDS = ["heads", "grouped", "composed", "window", "gated", "masked", "dot product"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_probable_tokens_are_those_of_the_window_computed_anew(kind):
    model = weighted(gpt(kind))
    model.compile(jit_compile=False)
    assert lists(model.generate(PROMPTS, 7, temperature=0)) == recomputed(model, PROMPTS, 7, LENGTH)


OPTIONS = {
    "kind": KINDS,
    "positions": ["learned", "sinusoidal"],
    "norm": ["layer", "root"],
    "ending": ["scores", "probabilities", "tied"],
    "dtype": ["float32", "float64", "bfloat16"],
}
CHOICES = np.random.default_rng(1)
CASES = [{name: str(CHOICES.choice(values)) for name, values in OPTIONS.items()} for _ in range(12)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_random_models_and_ways_to_draw(number):
    rng, case = np.random.default_rng(number), dict(CASES[number])
    dtype = case.pop("dtype")
    model = weighted(gpt(**case), scale=0.7)
    model.compile(dtype=dtype, jit_compile=False)
    prompts = [rng.integers(0, TOKENS, rng.integers(1, 6)).tolist() for _ in range(3)]
    options = {
        "temperature": [0, 0.7, 1.0, 2.0][rng.integers(4)],
        "top_k": [None, 1, 3, 100][rng.integers(4)],
        "top_p": [None, 0.3, 0.9, 1.0][rng.integers(4)],
        "stop": [(), (4,), (2, 7)][rng.integers(3)],
        "seed": int(rng.integers(9)),
    }
    expected = recomputed(model, prompts, 6, LENGTH, ending=case["ending"], **options)
    assert lists(model.generate(prompts, 6, **options)) == expected


def test_compiled_code_draws_the_same():
    model = weighted(gpt("grouped", ending="tied"))
    model.compile()
    for options in ({"temperature": 0}, {"top_k": 4, "top_p": 0.8, "seed": 5, "stop": (2,)}):
        expected = recomputed(model, PROMPTS, 7, LENGTH, **({"temperature": 1.0} | options))
        assert lists(model.generate(PROMPTS, 7, **options)) == expected
    assert lists(model.generate([[7, 7], [8]], 9, temperature=0)) == recomputed(model, [[7, 7], [8]], 9, LENGTH)


def recurrent(kind, length=None, stacks=True):
    tokens = dp.Input((length,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH, mask_zero=kind == "masked")(tokens)
    if kind == "stacked":
        x = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(6), layers.GRUCell(5)]), return_sequences=True)(x)
    cell = {"lstm": layers.LSTM, "simple": layers.SimpleRNN}.get(kind, layers.GRU)
    x = cell(7, return_sequences=stacks)(x)
    return dp.Model(tokens, layers.Dense(TOKENS)(x))


@pytest.mark.parametrize("kind", ["lstm", "gru", "simple", "stacked", "masked"])
@pytest.mark.parametrize("stacks", [True, False], ids=["sequences", "last"])
def test_recurrent_layers_keep_their_states(kind, stacks):
    model = weighted(recurrent(kind, stacks=stacks))
    model.compile(jit_compile=False)
    long = [list(range(1, 13)) * 4, [2, 3]]
    assert lists(model.generate(long, 5, temperature=0)) == recomputed(model, long, 5, None)
    assert lists(model.generate(PROMPTS, 9, top_p=0.8, seed=4)) == recomputed(
        model, PROMPTS, 9, None, temperature=1.0, top_p=0.8, seed=4
    )


class Subclassed(dp.Model):
    """A GPT as people write it: with rotary positions, a mask of its own, and recurrence beside attention."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(TOKENS, WIDTH)
        self.norm, self.mixed = layers.LayerNormalization(), layers.Dense(3 * WIDTH)
        self.recurrent = layers.GRU(WIDTH, return_sequences=True)

    def turned(self, x):
        angles = np.arange(x.shape[1])[:, None] / 10 ** (np.arange(WIDTH // 2) / 4)
        cos, sin = (ops.cast(f(angles), x.dtype) for f in (np.cos, np.sin))
        a, b = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return ops.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def call(self, ids):
        x = self.table(ids)
        q, k, v = ops.split(self.mixed(self.norm(x)), 3, axis=-1)
        scores = self.turned(q) @ ops.transpose(self.turned(k), (0, 2, 1)) / WIDTH**0.5
        scores = scores + (1 - np.tri(ids.shape[1], dtype=np.float32)) * -1e9
        x = x + ops.softmax(scores) @ v
        return (x + self.recurrent(x)) @ ops.transpose(self.table.embeddings)


def test_a_subclassed_model_with_operations_of_its_own():
    model = Subclassed()
    model(np.zeros((1, 4), np.int32))
    weighted(model)
    model.compile(jit_compile=False)
    prompts = [[3] * 40, [1, 2], list(range(13)) * 3]
    assert lists(model.generate(prompts, 9, temperature=0)) == recomputed(model, prompts, 9, None)


@pytest.mark.parametrize("length", [LENGTH, None])
def test_padding_is_masked(length):
    model = weighted(gpt(mask_zero=True, length=length, positions="sinusoidal"))
    model.compile(jit_compile=False)
    prompts = [[3, 0, 4], [1], [5, 9, 0, 6, 5]]
    assert lists(model.generate(prompts, 6, temperature=0)) == recomputed(model, prompts, 6, length)


class OfAnyLength(dp.Model):
    def __init__(self):
        super().__init__()
        self.table, self.positions = layers.Embedding(TOKENS, WIDTH), layers.Embedding(16, WIDTH)
        self.attention, self.scores = layers.MultiHeadAttention(2, 4), layers.Dense(TOKENS)

    def call(self, ids):
        x = self.table(ids) + self.positions(ops.arange(ids.shape[1]))
        return self.scores(x + self.attention(x, x, use_causal_mask=True))


def test_a_model_of_any_length_is_limited_by_its_table_of_positions():
    model = OfAnyLength()
    model(np.zeros((1, 4), np.int32))
    weighted(model)
    model.compile(jit_compile=False)
    prompts = [[1, 2, 3], [4] * 6]
    assert lists(model.generate(prompts, 10, temperature=0)) == recomputed(model, prompts, 10, None)
    message = "a prompt of 6 tokens and max_new_tokens=11 are 17 positions, but not all have a vector"
    with pytest.raises(ConfigError, match=message):
        model.generate(prompts, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature=nan; expected a number of at least 0"),
        ({"temperature": -1}, "temperature=-1; expected"),
        ({"temperature": "hot"}, "temperature='hot'; expected"),
        ({"top_p": 0}, "top_p=0; expected a number above 0 and up to 1, or None"),
        ({"top_p": 2}, "top_p=2; expected"),
        ({"top_p": float("nan")}, "top_p=nan; expected"),
        ({"top_k": 0}, "top_k=0; expected an integer of at least 1"),
        ({"top_k": 1.5}, "top_k=1.5; expected"),
        ({"stop": 13}, "stop=13 is no token of the model, which knows 0 to 12"),
        ({"stop": [1, -1]}, "stop=-1 is no token"),
        ({"stop": "end"}, "stop='end': 'end' is no token; expected ids, integers"),
        ({"max_new_tokens": 10}, "a prompt of 3 tokens and max_new_tokens=10 are 13 positions, but the model sees 12"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1; expected an integer of at least 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0; expected"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_options_out_of_range_get_a_line(options, message):
    model = gpt(blocks=1)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        model.generate([3, 1, 4], **({"max_new_tokens": 2} | options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; expected at least one token"),
        ([[1], []], "prompt 1 is empty"),
        (np.zeros((0, 3), int), "the prompt is empty"),
        ([1, 13], "the prompt has token 13; the model knows 0 to 12"),
        ([[1], [2, -1]], "prompt 1 has token -1"),
        ([[2**40]], "the prompt has token 1099511627776"),
        ([0.5, 1.0], "has shape (2,) and type float64; expected a vector of integers"),
        ([[[1]]], "expected a vector of integers"),
        ("Once", "prompt='Once' is text; expected ids of tokens"),
        (["Once", "upon"], "is text; expected ids"),
        ([1, [2]], "prompt=[1, [2]]; expected ids of tokens, or a list of such prompts"),
        ([[1, [2]]], "prompt=[[1, [2]]]; expected"),
        ([2**70], "has shape (1,) and type object"),
        ([True], "type bool"),
        (3, "prompt=3; expected ids of tokens, or a list of such prompts"),
        (None, "prompt=None; expected"),
    ],
)
def test_prompts_that_are_none_get_a_line(prompt, message):
    model = gpt(blocks=1)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        model.generate(prompt, 2)
    assert "\n" not in str(caught.value)


def other(kind):
    """Return a model in which a layer mixes positions otherwise."""
    tokens = dp.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(tokens)
    if kind == "sees":
        x = layers.MultiHeadAttention(2, 4, name="guilty")(x, x)
    elif kind == "sees, composed":
        x = layers.MultiHeadAttention(2, 4, dropout=0.1, name="guilty")(x, x)
    elif kind == "masked too little":
        mask = np.tri(LENGTH, k=1, dtype=bool)[None]
        x = layers.MultiHeadAttention(2, 4, name="guilty")(x, x, attention_mask=mask)
    elif kind == "both ways":
        x = layers.Bidirectional(layers.GRU(4, return_sequences=True), name="guilty")(x)
    elif kind == "backwards":
        x = layers.GRU(4, return_sequences=True, go_backwards=True, name="guilty")(x)
    elif kind == "mean":
        x = x + layers.GlobalAveragePooling1D(keepdims=True, name="guilty")(x)
    elif kind == "normalized":
        x = layers.LayerNormalization(axis=1, name="guilty")(x)
    elif kind == "dense":
        x = layers.Permute((2, 1))(layers.Dense(LENGTH, name="guilty")(layers.Permute((2, 1))(x)))
    elif kind == "windows":
        x = layers.Conv1D(WIDTH, 3, padding="same", name="guilty")(x)
    elif kind == "flat":
        return dp.Model(tokens, layers.Dense(TOKENS)(layers.Flatten(name="guilty")(x)))
    elif kind == "reversed":
        x = x + layers.Lambda(lambda x: ops.flip(x, 1), name="guilty")(x)
    return dp.Model(tokens, layers.Dense(TOKENS)(x))


@pytest.mark.parametrize(
    "kind",
    [
        *("sees", "sees, composed", "masked too little", "both ways", "backwards", "mean", "normalized", "dense"),
        *("windows", "flat", "reversed"),
    ],
)
def test_layers_that_mix_positions_otherwise_are_named(kind):
    with pytest.raises(
        ConfigError, match=r"generate: layer '(guilty|\w*gru|softmax|dense)' .*use_causal_mask=True"
    ) as caught:
        other(kind).generate([1, 2], 3)
    assert "\n" not in str(caught.value)


def test_models_that_do_not_score_tokens_get_a_line():
    tokens = dp.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(tokens)
    with pytest.raises(ConfigError, match=r"the model returns list; expected one tensor of scores"):
        dp.Model(tokens, [x, x]).generate([1], 2)
    pictures = dp.Input((4, 4, 3))
    with pytest.raises(ConfigError, match=r"expected one input of tokens, \(rows, length\)"):
        dp.Model(pictures, layers.Dense(3)(pictures)).generate([1], 2)


def test_prompts_of_several_blocks():
    model = weighted(gpt("grouped", length=75, blocks=1))
    model.compile(jit_compile=False)
    prompts = [[number % 7 for number in range(70)], [5] * 67, [1, 2] * 33]
    assert lists(model.generate(prompts, 5, temperature=0)) == recomputed(model, prompts, 5, 75)
    assert lists(model.generate(prompts[2:], 9, temperature=0)) == recomputed(model, prompts[2:], 9, 75)


def test_a_text_goes_on_as_it_would_have():
    model = weighted(gpt(blocks=1))
    model.compile(jit_compile=False)
    whole = model.generate([1, 2], 8, seed=7)
    part = model.generate(np.array([1, 2]), 3, seed=7)
    assert whole.shape == (10,)
    np.testing.assert_array_equal(model.generate(part, 5, seed=7), whole)
    np.testing.assert_array_equal(model.generate([1, 2], 0), [1, 2])


def test_batches_do_not_matter_and_calls_without_a_seed_differ():
    texts = []
    for _ in range(2):
        dp.utils.set_random_seed(3)
        model = weighted(gpt(blocks=1))
        model.compile(jit_compile=False)
        prompts = [[1, 2]] * 6
        expected = lists(model.generate(prompts, 8, seed=7))
        assert lists(model.generate(prompts, 8, seed=7, batch_size=4)) == expected
        assert len(set(map(tuple, expected))) > 1
        texts.append([model.generate([1, 2], 8).tolist() for _ in range(3)])
        assert len(set(map(tuple, texts[-1]))) == 3
    assert texts[0] == texts[1]


def test_the_weights_of_now_write():
    model = weighted(gpt(blocks=1))
    model.compile("sgd", dp.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    before = model.generate(PROMPTS, 5, temperature=0)
    weighted(model, seed=9)
    assert lists(model.generate(PROMPTS, 5, temperature=0)) == recomputed(model, PROMPTS, 5, LENGTH)
    assert lists(before) != recomputed(model, PROMPTS, 5, LENGTH)
    model.fit(np.ones((4, LENGTH), int), np.ones((4, LENGTH), int), verbose=0)
    assert lists(model.generate(PROMPTS, 5, temperature=0)) == recomputed(model, PROMPTS, 5, LENGTH)


@pytest.mark.parametrize("kind", ["gpt", "gru", "bfloat16"])
def test_an_exported_program_generates_the_same(tmp_path, kind):
    model = weighted(recurrent("gru") if kind == "gru" else gpt("grouped", ending="tied"))
    model.compile(**({"dtype": "bfloat16"} if kind == "bfloat16" else {}))
    length = 20 if kind == "gru" else None
    model.export(tmp_path / "it.program", "generation", length=length)
    program = dp.saving.load_program(tmp_path / "it.program")
    for options in ({"temperature": 0}, {"seed": 3}, {"top_k": 4, "top_p": 0.8, "seed": 5, "stop": (2,)}):
        assert lists(program.generate(PROMPTS, 6, **options)) == lists(model.generate(PROMPTS, 6, **options))
    np.testing.assert_array_equal(program.generate([1], 3, seed=2), model.generate([1], 3, seed=2))
    with pytest.raises(ConfigError, match=f"the model sees {length or LENGTH} positions"):
        program.generate([1], 40)
    with pytest.raises(DataError, match="the prompt has token 99; the model knows 0 to 12"):
        program.generate([99], 1)
    with pytest.raises(ConfigError, match="an exported program takes 8"):
        program.generate([1], 1, stop=range(9))


def test_what_is_exported_otherwise_does_not_generate(tmp_path):
    model = gpt(blocks=1)
    model.export(tmp_path / "it.program")
    with pytest.raises(ConfigError, match=r'its program predicts; export.* format="generation"'):
        dp.saving.load_program(tmp_path / "it.program").generate([1], 2)
    with pytest.raises(ConfigError, match='length=5 is for format="generation"'):
        model.export(tmp_path / "it.program", length=5)
    with pytest.raises(ConfigError, match="length=5, but the model sees 12 positions"):
        model.export(tmp_path / "it.program", "generation", length=5)
    for length in (1, True, "long"):
        with pytest.raises(ConfigError, match=f"export: length={length!r}; expected an integer"):
            recurrent("gru").export(tmp_path / "it.program", "generation", length=length)
    with pytest.raises(ConfigError, match="pass length="):
        recurrent("gru").export(tmp_path / "it.program", "generation")


@pytest.mark.parametrize("kind", ["gpt", "gru", "bfloat16"])
def test_a_stream_has_the_same_tokens(kind):
    model = weighted(recurrent("gru") if kind == "gru" else gpt("grouped", length=70, blocks=1))
    model.compile(jit_compile=False, dtype="bfloat16" if kind == "bfloat16" else "float32")
    for options in ({"temperature": 0}, {"top_k": 4, "seed": 5}, {"seed": 2, "stop": [3, 4]}):
        for prompt in ([1], [5, 9, 2, 6, 5] * 8):
            tokens = list(model.generate(prompt, 25, stream=True, **options))
            assert prompt + tokens == model.generate(prompt, 25, **options).tolist()
            assert all(type(token) is int for token in tokens)
    assert list(model.generate([1, 2], 0, stream=True)) == []
    with pytest.raises(ConfigError, match="stream=True takes a single prompt; found 2"):
        model.generate([[1], [2]], 3, stream=True)


class OfOwnLoop(OfAnyLength):
    """Writes greedily after the first token, by a loop as the documentation has it."""

    def predict_step(self, data):
        tokens, count = data, 8
        decoder = Decoder(tokens, self(tokens))

        def step(position, token, text, *state):
            logits, state = decoder.step(token, position, decoder.unpacked(state))
            token = most_probable(logits[:, 0])[:, None]
            return position + 1, token, ops.where(np.arange(tokens.shape[1]) == position + 1, token, text), *state

        start = (np.int32(0), tokens[:, :1], tokens, *decoder.start())
        return ops.while_loop(lambda position, *_: position < count, step, start)[2]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_of_ones_own(compiled):
    model = OfOwnLoop()
    tokens = np.zeros((3, 10), np.int32)
    tokens[:, 0] = [4, 2, 9]
    model(tokens)
    weighted(model)
    model.compile(jit_compile=compiled)
    texts = np.asarray(model.predict(tokens, verbose=0))
    expected = model.generate(tokens[:, :1], 8, temperature=0)
    np.testing.assert_array_equal(texts[:, :9], expected)


def test_the_command_line_exports_a_generation(tmp_path, capsys):
    model = weighted(recurrent("gru"))
    model.compile(jit_compile=False)
    model.save(tmp_path / "gru.keras")
    out = str(tmp_path / "gru.program")
    command = ["export", str(tmp_path / "gru.keras"), "--out", out]
    assert main([*command, "--length", "9"]) == 2
    assert "--length is for --format generation; found program" in capsys.readouterr().err
    assert main([*command, "--format", "generation"]) == 2
    assert "pass length=" in capsys.readouterr().err
    assert main([*command, "--format", "generation", "--length", "9"]) == 0
    text = dp.saving.load_program(out, jit_compile=False).generate([1, 2], 7, seed=1)
    np.testing.assert_array_equal(text, model.generate([1, 2], 7, seed=1))


def deferred():
    return dp.Sequential([layers.Embedding(TOKENS, 8), layers.GRU(5, return_sequences=True), layers.Dense(TOKENS)])


class Recomputing(OfAnyLength):
    def call(self, ids):
        x = self.table(ids)
        return self.scores(x + dp.remat(lambda x: self.attention(x, x, use_causal_mask=True))(x))


class LastOnly(OfAnyLength):
    def call(self, ids):
        return super().call(ids)[:, -1]


def nested():
    x = dp.Input((None, WIDTH))
    block = dp.Model(x, layers.MultiHeadAttention(2, 4)(layers.BatchNormalization()(x), x, use_causal_mask=True))
    tokens = dp.Input((None,))  # floating-point, as by default
    x = layers.Embedding(TOKENS, WIDTH)(tokens)
    return dp.Model(tokens, layers.TimeDistributed(layers.Dense(TOKENS))(x + block(x)))


@pytest.mark.parametrize("make", [deferred, Recomputing, LastOnly, nested])
def test_models_of_other_forms(make):
    model = make()
    model(np.zeros((2, 4), np.int32))
    weighted(model)
    model.compile(jit_compile=False)
    assert lists(model.generate(PROMPTS, 6, temperature=0)) == recomputed(model, PROMPTS, 6, None)


def test_threads_generate_beside_each_other():
    model = weighted(gpt(blocks=1))
    model.compile(jit_compile=False)
    expected = [lists(model.generate(PROMPTS, 4, seed=seed)) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda seed: lists(model.generate(PROMPTS, 4, seed=seed % 4)), range(12)))
    assert texts == expected * 3
