"""Lines of logs: each has its time and rank, once, whoever wrote it in how many pieces."""

import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import ConfigError
from dptrain.runtime.launch.supervisor import LOG_FORMATS, log_line
from dptrain.runtime.output import streams
from dptrain.runtime.output.log_stream import LogStream, begin_log, end_log

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def stream(log_format, rank=3):
    return LogStream(io.StringIO(), "stdout", rank, log_format)


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_line_of_a_log_is_made_once(log_format):
    line = log_line("loss: 0.5", 3, "stderr", log_format)
    assert log_line(line, 1, "stdout", log_format) == line
    if log_format == "json":
        record = json.loads(line)
        assert re.fullmatch(STAMP, record.pop("time"))
        assert record == {"rank": 3, "stream": "stderr", "message": "loss: 0.5"}
    else:
        assert re.fullmatch(f"{STAMP} \\[3\\] loss: 0.5" if log_format == "text" else "loss: 0.5", line)


@given(st.lists(st.text("ab\n\r é\udcff", max_size=8), max_size=6), st.sampled_from(("text", "json")))
def test_pieces_become_the_lines_that_they_are(pieces, log_format):
    log = stream(log_format)
    for piece in pieces:
        log.write(piece)
    log.flush()
    lines = [line for line in log.stream.getvalue().split("\n") if line]
    expected = [line for line in "".join(pieces).split("\n") if line]
    if log_format == "json":
        printable = [line.encode(errors="surrogateescape").decode(errors="backslashreplace") for line in expected]
        assert [json.loads(line)["message"] for line in lines] == printable
    else:
        assert [re.sub(f"^{STAMP} \\[3\\] ", "", line) for line in lines] == expected
        assert all(re.match(STAMP, line) for line in lines)


def test_records_have_fields_in_json_alone_and_null_for_what_json_lacks():
    log = stream("json")
    log.write("begun")
    log.write_record("Epoch 1", {"epoch": 1, "loss": float("nan"), "names": ["a"]})
    begun, epoch = map(json.loads, log.stream.getvalue().splitlines())
    assert begun["message"] == "begun"
    assert {name: epoch[name] for name in ("message", "epoch", "loss", "names")} == {
        "message": "Epoch 1",
        "epoch": 1,
        "loss": None,
        "names": ["a"],
    }
    log = stream("text")
    log.write_record("Epoch 1", {"epoch": 1})
    assert re.fullmatch(f"{STAMP} \\[3\\] Epoch 1\n", log.stream.getvalue())


@pytest.mark.parametrize("log_format", ["auto", *LOG_FORMATS])
@pytest.mark.parametrize("is_file", [False, True])
def test_by_default_files_are_logs_and_the_streams_come_back(tmp_path, monkeypatch, log_format, is_file):
    with open(tmp_path / "log", "w+") as file:
        output = file if is_file else io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        begin_log(log_format, 0)
        print("hello")
        end_log()
        assert sys.stdout is output
        output.seek(0)
        line = output.read()
    expected = log_format if log_format != "auto" else "text" if is_file else "plain"
    patterns = {"text": f"{STAMP} \\[0\\] hello\n", "json": '{"time".*"message": "hello"}\n', "plain": "hello\n"}
    assert re.fullmatch(patterns[expected], line)


@pytest.mark.parametrize(("word", "log_format"), [("json", "json"), ("plain", "plain"), ("", "text"), ("auto", "text")])
def test_the_environment_decides_for_auto(tmp_path, monkeypatch, word, log_format):
    monkeypatch.setenv("DPTRAIN_LOG_FORMAT", word)
    for given_format, expected in (("auto", log_format), ("text", "text")):
        with open(tmp_path / "log", "w+") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            begin_log(given_format, 0)
            found = "plain" if sys.stdout is file else sys.stdout._format
            end_log()
        assert found == expected


def test_a_wrong_word_in_the_environment_is_said(monkeypatch):
    monkeypatch.setenv("DPTRAIN_LOG_FORMAT", "yaml")
    with pytest.raises(ConfigError, match="DPTRAIN_LOG_FORMAT = 'yaml': expected auto, text, json, plain"):
        begin_log("auto", 0)


def test_errors_that_pass_by_python_are_lines_of_the_log_too(monkeypatch):
    written = []
    monkeypatch.setattr(streams.os, "write", lambda descriptor, text: written.append((descriptor, text)))
    monkeypatch.setattr(sys, "stderr", stream("text", rank=1))
    streams.write_error("dptrain: warning: one\ndptrain: two\n")
    [(descriptor, text)] = written
    assert descriptor == 2
    assert re.fullmatch(f"{STAMP} \\[1\\] dptrain: warning: one\n{STAMP} \\[1\\] dptrain: two\n", text.decode())
