"""`/generate`: the tokens of `Model.generate`, in one answer and as a stream of events."""

import json

import pytest

import dptrain as dp
from dptrain import layers

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from dptrain.cli.server.served_model import describe
from tests.unit.cli.server.test_app import Lines, exchange


@pytest.fixture(scope="module")
def served():
    dp.utils.set_random_seed(2)
    tokens = dp.Input((12,), dtype="int32")
    x = layers.Embedding(9, 8)(tokens)
    x = x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    model = dp.Model(tokens, layers.Dense(9)(x))
    model.compile(jit_compile=False)
    return describe(model, "gpt", "1")


def asked(served, body, **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    ((status, fields, answer),) = exchange(served, [("POST", "/generate", content)], **options)
    return status, fields.get("content-type", ""), answer


def events_of(content):
    events = []
    for block in content.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


def test_an_answer_and_a_stream(served):
    wanted = {"prompt": [1, 2], "max_new_tokens": 7, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3}
    expected = served.model.generate([1, 2], 7, 0.8, 5, 0.9, seed=3)[2:].tolist()
    status, kind, content = asked(served, wanted)
    assert (status, kind) == (200, "application/json")
    answer = json.loads(content)
    assert answer == {"tokens": expected, "reason": "length", "model_name": "gpt", "model_version": "1"}
    status, kind, content = asked(served, wanted | {"stream": True})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    *tokens, last = events_of(content)
    assert tokens == [("", {"token": token}) for token in expected]
    assert last == ("end", {"tokens": expected, "reason": "length"})


def test_a_stop_is_the_reason(served):
    whole = served.model.generate([1, 2], 7, temperature=0)[2:].tolist()
    wanted = {"prompt": [1, 2], "max_new_tokens": 7, "temperature": 0, "stop": [whole[3]]}
    answer = json.loads(asked(served, wanted)[2])
    assert answer["tokens"] == whole[: whole.index(whole[3]) + 1]
    assert answer["reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: not JSON"),
        ([1, 2], "expected {"),
        ({"max_new_tokens": 2}, "expected {"),
        ({"prompt": [1], "temprature": 2}, "body: unknown 'temprature'; did you mean 'temperature'?"),
        ({"prompt": [1], "stream": 1}, "body: stream=1; expected true or false"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [99]}, "the prompt has token 99; the model knows 0 to 8"),
        ({"prompt": "Once"}, "is text; expected ids"),
        ({"prompt": None}, "expected ids"),
        ({"prompt": [1], "top_p": 2}, "top_p=2; expected"),
        ({"prompt": [1], "stop": {"a": 1}}, "stop="),
        ({"prompt": [1], "seed": "x"}, "seed"),
        ({"prompt": [1], "max_new_tokens": 100}, "the model sees 12 positions"),
        (b'{"prompt": [1], "temperature": NaN}', "NaN is no number of JSON"),
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["answer", "stream"])
def test_bad_requests_get_a_line(served, body, message, streams):
    if isinstance(body, dict) and "stream" not in body:
        body = {"max_new_tokens": 2, "stream": streams} | body
    status, kind, content = asked(served, body)
    assert (status, kind) == (400, "application/json")
    assert message in json.loads(content)["error"]


def test_a_model_that_cannot_generate():
    model = dp.Sequential([layers.Input((2,)), layers.Dense(3)])
    status, _, content = asked(describe(model, "dense", "1"), {"prompt": [1], "max_new_tokens": 1})
    assert status == 400
    assert "generate: " in json.loads(content)["error"]


def test_a_full_queue_and_what_is_counted(served):
    log = Lines()
    wanted = ("POST", "/generate", b'{"prompt": [1], "max_new_tokens": 6, "stream": true}')
    results = exchange(served, [wanted, wanted, wanted], queue=2, log=log)
    assert sorted(status for status, _, _ in results) == [200, 200, 503]
    assert len(log) == 3
    results = exchange(served, [("POST", "/generate", None)], seconds=0.05)
    assert results[0][0] == 408
    results = exchange(served, [wanted], seconds=0.2, reads=False)
    assert results[0][0] is None


def test_an_error_in_the_middle_is_an_event(served, monkeypatch):
    real = type(served.model).generate

    def failing(model, *arguments, **options):
        for number, token in enumerate(real(model, *arguments, **options)):
            if number == 2:
                raise RuntimeError("no more")
            yield token

    monkeypatch.setattr(type(served.model), "generate", failing)
    wanted = {"prompt": [1], "max_new_tokens": 6, "stream": True}
    events = events_of(asked(served, wanted)[2])
    assert [kind for kind, _ in events] == ["", "", "error"]
    assert "no more" in events[-1][1]["error"]
    assert asked(served, wanted | {"stream": False})[0] == 500
