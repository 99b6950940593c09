"""Calls whose bodies lie in a file."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loadtest.cli import main
from tests.support.load_stub import Stub
from tests.support.server import Server

QUICK = ("--null-time", "0", "--warmup", "0", "--max-lag", "1h", "--max-spread", "1000000%")


def load(url: str, *argv: object) -> int:
    """Return the exit code of the command, run in this process."""
    return main([url, *map(str, argv), *QUICK])


def attention(length: int) -> str:
    """Return a call of `/v1/attention`."""
    return json.dumps({"model": "tiny", "embeddings": [[0.5] * 8] * length})


def infer(length: int) -> str:
    """Return a call of the protocol."""
    entry = {"name": "embeddings", "shape": [1, length, 8], "datatype": "FP32"}
    return json.dumps({"inputs": [entry | {"data": [0.5] * 8 * length}]})


@pytest.mark.fault("F7")
@pytest.mark.parametrize("kind", ["v1.jsonl", "v2.jsonl", "one.json", "one.safetensors"])
def test_bodies_of_a_file_are_sent_as_they_are(server: Server, tmp_path: Path, kind: str) -> None:
    """Every one in turn, and each answer checked against the same call alone."""
    file, raw = tmp_path / kind, tmp_path / "raw.json"
    if kind == "one.safetensors":
        save_file({"embeddings": np.full((1, 3, 8), 0.5, np.float32)}, file)
    else:
        call = infer if kind == "v2.jsonl" else attention
        file.write_text("\n\n".join(map(call, (1, 5) if kind.endswith("jsonl") else (1,))))

    code = load(server.url, *("--body", file, "-n", 10, "-c", 1, "--model", "tiny"), "--check",
                "--raw", raw)  # fmt: skip

    [point] = json.loads(raw.read_text())["points"]
    assert code == 0
    assert point["statuses"] == {"200": 10}
    assert (point["checked"], point["wrong"]) == (10, 0)
    assert point["id"].endswith(f"{file} 1 clients")
    assert point["work"]["body"] == str(file)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "", "expected a file of .json, .jsonl, .safetensors"),
        ("a.json", "{", "expected JSON"),
        ("a.json", "[1]", "expected a JSON object, got list"),
        ("a.jsonl", "\n\n", "expected at least one call"),
        ("a.jsonl", '{"inputs": []}\n{', "line 2: expected JSON"),
        ("a.json", '{"embeddings": []}', "expected a call of the Open Inference Protocol"),
    ],
)
def test_file_that_holds_no_calls_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: str, expected: str
) -> None:
    """In one line that names option, file and what was expected; nothing is measured."""
    file = tmp_path / name
    file.write_text(content)
    with Stub() as stub:
        code = load(stub.url, "--body", file)

    errors = capfd.readouterr().err
    assert code == 2
    assert errors.startswith("headwise-load: --body: ")
    assert expected in errors
    assert errors.count("\n") == 1


def test_options_of_drawn_calls_do_not_go_with_bodies_of_ones_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What would be passed over is refused."""
    file = tmp_path / "a.json"
    file.write_text(attention(1))

    for option, value in (("shape", "1x8"), ("mask", "none"), ("format", "json")):
        assert load("http://127.0.0.1:9", "--body", file, f"--{option}", value) == 2
        assert f"--{option}: the bodies of --body say that" in capfd.readouterr().err


@pytest.mark.fault("F7")
def test_refusal_before_the_body_was_read_is_told_as_what_was_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that answers 413 and closes has answered: the connection was not just lost."""
    large = infer(60_000)  # more than a socket holds
    calls, alone, raw = tmp_path / "both.jsonl", tmp_path / "one.json", tmp_path / "raw.json"
    calls.write_text(f"{infer(1)}\n{large}\n")
    alone.write_text(large)
    with Stub(most_bytes=1000) as stub:
        load(stub.url, "--body", calls, *("-n", 20, "-c", 2, "--raw", raw))
        told = load(stub.url, "--body", alone)

    [point] = json.loads(raw.read_text())["points"]
    assert point["statuses"] == {"200": 10, "413": 10}
    assert point["codes"] == {"large": 10}
    assert told == 2
    assert "answered 413: body: at most so many" in capfd.readouterr().err


@pytest.mark.fault("F7")
def test_everything_measured_is_printed_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Alone on standard output, whatever else is told on the other one."""
    with Stub() as stub:
        code = load(stub.url, "--json", "-n", 5, "-c", 1)

    told = capfd.readouterr()
    assert code == 0
    assert json.loads(told.out)["points"][0]["statuses"] == {"200": 5}
    assert "p99" in told.err


@pytest.mark.fault("F7")
def test_name_that_looks_like_an_emoji_stays_what_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """`1:100:0` is a range that is wrong, not a picture."""
    assert load("http://127.0.0.1:9", "--rate", "1:100:0") == 2
    assert "got '1:100:0'" in capfd.readouterr().err
