"""The description of the interface against what is answered: headings, types, examples."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.layers import WIDE, Layers
from tests.support.server import Server

pytestmark = pytest.mark.fault("E8")

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Give where a value is not what a schema says, as far as our schemas go; nothing untold."""
    if "anyOf" in schema:
        found = [list(problems(value, option, where)) for option in schema["anyOf"]]
        if all(found):
            yield from found[0]
        return
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    matching = [k for k in kinds if isinstance(value, TYPES[k])]
    if isinstance(value, bool) and "boolean" not in kinds:
        matching = []
    if kinds and not matching:
        yield f"{where}: expected {kinds}, got {value!r:.40}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where}: expected one of {schema['enum']}, got {value!r:.40}"
    elif isinstance(value, list):
        for item in value:
            yield from problems(item, schema.get("items", {}), f"{where}[]")
    elif isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        known = schema.get("properties", {})
        yield from (f"{where}: lacks {n}" for n in schema.get("required", []) if n not in value)
        for name, item in value.items():
            rest = schema.get("additionalProperties")
            if name not in known and not isinstance(rest, dict):
                yield f"{where}.{name}: not described"
            else:
                yield from problems(item, known.get(name, rest), f"{where}.{name}")


def operations(server: Server) -> list[tuple[str, str, dict[str, Any]]]:
    """Return path, method and description of every operation."""
    paths = server.get("/openapi.json").json()["paths"]
    return [(path, method, told) for path in paths for method, told in paths[path].items()]


def test_every_operation_has_a_heading_and_a_line_of_its_own(server: Server) -> None:
    """A reader finds it: no heading `default`, no name of a function, no line twice."""
    document = server.get("/openapi.json").json()
    headings = [tag["name"] for tag in document["tags"]]

    for path, method, told in operations(server):
        assert len(told["tags"]) == 1, path
        assert told["tags"][0] in headings
        assert " " in told["summary"], f"{method} {path}: {told['summary']}"
    summaries = [told["summary"] for _, _, told in operations(server)]
    assert len(set(summaries)) == len(summaries)
    assert {told["tags"][0] for _, _, told in operations(server)} == set(headings)


def test_every_answer_to_get_is_of_the_type_that_is_described(server: Server) -> None:
    """Each property is described, and each that is required is there."""
    looked = 0
    for path, method, told in operations(server):
        content = told["responses"].get("200", {}).get("content", {})
        if method != "get" or "application/json" not in content:
            continue
        for name in ("tiny", "cross", "mha-weights"):
            asked = path.format(name=name, version="1", region="r")
            answer = server.get(asked)
            if answer.status_code == 200:
                schema = content["application/json"]["schema"]
                assert list(problems(answer.json(), schema, asked)) == []
                assert schema.get("properties") or schema["type"] == "array", path
                looked += 1
    assert looked > 40


@pytest.mark.parametrize("name", sorted(WIDE))
def test_every_kind_of_layer_is_told_as_described(wide_server: Server, name: str) -> None:
    """Rotary positions, norms, biases of positions: each option has its type."""
    told = {path: told for path, _, told in operations(wide_server)}["/v1/models/{name}"]
    schema = told["responses"]["200"]["content"]["application/json"]["schema"]

    answer = wide_server.get(f"/v1/models/{name}").json()

    assert list(problems(answer, schema, name)) == []


@pytest.mark.parametrize("path", ["/v1/attention", "/v2/models/{name}/infer"])
def test_examples_of_calls_are_real(server: Server, layers: Layers, path: str) -> None:
    """Each is answered, with what the description of the answer says; masks and heads are shown."""
    [told] = [told for one, _, told in operations(server) if one == path]
    body = told["requestBody"]["content"]["application/json"]
    answered = told["responses"]["200"]["content"]["application/json"]

    for example in body["examples"].values():
        answer = server.post(path.format(name="tiny"), json=example["value"])
        assert answer.status_code == 200
        assert list(problems(answer.json(), answered["schema"], path)) == []
        assert list(problems(example["value"], body["schema"], path)) == []
    assert list(problems(answered["example"], answered["schema"], path)) == []
    shown = str(body["examples"])
    assert "attend_mask" in shown
    if path == "/v1/attention":
        assert "{'heads': [1]}" in shown
        first = server.post(path, json=body["examples"]["one sequence"]["value"]).json()
        for name in ("output", "attention_weights"):
            assert shape(first[name]) == shape(answered["example"][name])


def shape(nested: Any) -> list[int]:
    """Return the lengths of nested lists."""
    return [len(nested), *shape(nested[0])] if isinstance(nested, list) else []
