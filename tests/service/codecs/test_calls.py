"""Random calls over HTTP in every format: right ones are exact, wrong ones are told why."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.calls import (
    Case,
    Reply,
    check_close,
    expected,
    json_body,
    random_case,
    send_json,
    send_oip_binary,
    send_oip_json,
    send_oip_mixed,
    send_packed,
    send_safetensors,
    send_single,
)
from tests.support.layers import ALL, CONFIGS, WIDE, Layers
from tests.support.server import Server

Sender = Callable[[Server, Case], Reply]
ANY_LENGTHS: list[Sender] = [send_json, send_packed]
ONE_LENGTH: list[Sender] = [send_safetensors, send_oip_json, send_oip_binary, send_oip_mixed]

# The fixtures are a server and its layers, which no call changes.
many = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def cases(draw: st.DrawFn, models: list[str]) -> tuple[Sender, Case]:
    """Draw a call of any kind to one of the models, and a format that can carry it."""
    model = draw(st.sampled_from(models))
    layer = ALL[model]
    rows = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(1, 9), min_size=rows, max_size=rows)
    longest = layer.max_positions or 40
    lengths = draw(st.one_of(sizes, st.integers(1, longest).map(lambda n: [n] * rows)))
    keys = draw(sizes) if layer.is_cross else lengths
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    options: dict[str, Any] = {
        "weights": draw(st.booleans()),
        "causal": draw(st.sampled_from([None, False] if layer.is_cross else [None, True, False])),
    }
    if layer.takes_positions and draw(st.booleans()):
        last = layer.max_positions or 60
        options["positions"] = tuple(random.integers(0, last, n) for n in lengths)
    if draw(st.booleans()):
        # Some rows end up with nothing to attend to; rule 1 covers them.
        options["attend_mask"] = tuple(random.random(n) < 0.7 for n in keys)
    if draw(st.booleans()):
        heads = draw(st.sampled_from([1, layer.num_heads]))
        options["pair_mask"] = tuple(
            random.random((heads, s, t)) < 0.7 for s, t in zip(lengths, keys, strict=True)
        )
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(layer.num_heads,), (rows, layer.num_heads)]))
        options["head_mask"] = random.integers(-1, 3, shape).astype(np.float32)
    case = random_case(random, model, layer, lengths, keys, **options)
    senders = ANY_LENGTHS + (ONE_LENGTH if case.is_uniform else [])
    if rows == 1 and (case.head_mask is None or case.head_mask.ndim == 1):
        senders = [*senders, send_single]
    return draw(st.sampled_from(senders)), case


@many
@given(drawn=cases(sorted(CONFIGS)))
def test_valid_call_in_any_format_equals_the_formula(
    drawn: tuple[Sender, Case], server: Server, layers: Layers
) -> None:
    """Rules 1 to 3 hold for every size, mask, option and wire format."""
    send, case = drawn

    reply = send(server, case)

    check_close(reply, expected(case, layers.formula(case.model)))


@many
@given(drawn=cases(sorted(WIDE)))
def test_valid_call_to_any_kind_of_layer_in_any_format_equals_the_formula(
    drawn: tuple[Sender, Case], wide_server: Server, layers: Layers
) -> None:
    """Positions, value memories, extra keys, causal defaults and what overrides them."""
    send, case = drawn

    reply = send(wide_server, case)

    check_close(reply, expected(case, layers.formula(case.model)))


def put(path: str, value: object) -> Callable[[dict[str, Any]], str]:
    """Return a mistake that puts a value at a dotted path; the first part names the field."""

    def spoil(body: dict[str, Any]) -> str:
        *parents, last = path.split(".")
        place: Any = body
        for key in parents:
            place = place[int(key) if key.isdigit() else key]
        place[int(last) if last.isdigit() else last] = value
        return path.split(".")[0]

    return spoil


def drop(key: str) -> Callable[[dict[str, Any]], str]:
    """Return a mistake that leaves a key out."""

    def spoil(body: dict[str, Any]) -> str:
        del body[key]
        return key

    return spoil


WRONG_VALUES: list[Any] = [
    None,
    True,
    "1.5",
    "NaN",
    {},
    [],
    [[]],
    [[[]]],
    1e39,
    -1e39,
    10**400,
    [1, 2],
]

mistakes = st.one_of(
    st.builds(put, st.just("embeddings.0.0.1"), st.sampled_from(WRONG_VALUES)),
    st.builds(put, st.just("embeddings.1.0"), st.sampled_from([*WRONG_VALUES, [1.0] * 7, 3])),
    st.builds(put, st.just("embeddings.1"), st.sampled_from([*WRONG_VALUES, 3, [[0.0] * 9]])),
    st.builds(put, st.just("embeddings"), st.sampled_from([*WRONG_VALUES, 3, [[[[0.0] * 8]]]])),
    st.just(drop("embeddings")),
    st.builds(
        put,
        st.just("attend_mask"),
        st.sampled_from(
            [[[1, 2], [1]], [[True]], [True], [[True, "x"], [True]], 1, "x", [[True] * 3, [True]]]
        ),
    ),
    st.builds(
        put,
        st.just("pair_mask"),
        st.sampled_from([[[True]], [[[[True]]]], [[[[1]]], [[[0]]]], True, [[[[True] * 2] * 2]]]),
    ),
    st.builds(
        put, st.just("head_mask"), st.sampled_from([[1], [1, 1, 1], [True, True], "x", [[1, 1]], 1])
    ),
    st.builds(
        put,
        st.just("weights"),
        st.sampled_from([1, "true", {"heads": [2]}, {"heads": []}, {"head": [0]}, []]),
    ),
    st.builds(put, st.just("causal"), st.sampled_from([1, "true", {}])),
    st.builds(
        put, st.just("model"), st.sampled_from(["nope", "", 1, "tiny-weights", "\ud800", []])
    ),
    st.builds(put, st.just("timeout_s"), st.sampled_from([0, -1, "1", True, 1e9, 1e400, []])),
    st.builds(put, st.just("priority"), st.sampled_from([-1, 1.5, "1", True, 2**40, {}])),
    st.builds(put, st.just("memory"), st.just([[[0.0]], [[0.0]]])),
    st.builds(put, st.sampled_from(["embedding", "mask", "attention_mask", "x"]), st.just(1)),
)


@many
@given(spoil=mistakes)
def test_invalid_call_is_refused_by_field_name_and_harms_nothing(
    spoil: Callable[[dict[str, Any]], str], server: Server, layers: Layers
) -> None:
    """Wrong input gets a 4xx that names the field, and the next right call its right answer."""
    case = random_case(np.random.default_rng(1), "tiny", CONFIGS["tiny"], [2, 1])
    body = json_body(case)
    field = spoil(body)

    response = server.post("/v1/attention", content=_dump(body))

    assert 400 <= response.status_code < 500, response.text
    problem = response.json()
    assert sorted(problem) == ["code", "error"]
    assert field in problem["error"]
    check_close(send_json(server, case), expected(case, layers.formula("tiny")))


def _dump(body: dict[str, Any]) -> bytes:
    """Write JSON that orjson would refuse to write: huge integers, lone surrogates."""
    return json.dumps(body).replace("Infinity", "1e400").encode()


def test_two_hundred_mistakes_are_really_mistakes(server: Server) -> None:
    """The body that the mistakes start from is right."""
    case = random_case(np.random.default_rng(1), "tiny", CONFIGS["tiny"], [2, 1])

    response = server.post("/v1/attention", content=orjson.dumps(json_body(case)))

    assert response.status_code == 200
