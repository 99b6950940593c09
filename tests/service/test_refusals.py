"""Every refusal says where, what was expected, what came, and the cure; all of them are listed."""

import ast
import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from service import errors
from service.app import create_app
from service.errors import NotNow, Refused
from tests.support.doubles import quiet_server
from tests.support.layers import Layers
from tests.support.refusals import CLOSED, OPEN, REFUSALS, SEGMENT, WIDE

SERVICE = Path(errors.__file__).parent
FILES = [
    *sorted((SERVICE / "codecs").glob("*.py")),
    *sorted((SERVICE / "api").glob("*.py")),
    SERVICE / "inference" / "validation.py",
]

ELSEWHERE = {
    "api_keys.digest_of: Unauthorized": "tests/service/api/test_api_keys.py",
    "api_keys.name_of_digest: Unauthorized": "tests/service/api/test_api_keys.py",
    "compression.decompress: Draining": "tests/service/codecs/test_compression.py",
    "oip_routes.model_ready: Draining": "tests/service/api/test_oip_routes.py",
    "readers._within_limits: TooLarge": "tests/service/codecs/test_readers.py",
    "readers.decode: NotReady": "tests/service/codecs/test_readers.py",
    "routes.ready: Draining": "tests/system/test_main.py",
    "routes.ready: NotReady": "tests/system/test_main.py",
    "shared_memory._open: InvalidInput": "tests/service/codecs/test_shared_memory.py",
    "shared_memory._refuse_short: InvalidInput": "tests/service/codecs/test_shared_memory.py",
    "shared_memory.register: InvalidInput": "tests/service/codecs/test_shared_memory.py",
    "shared_memory.write: InvalidInput": "tests/service/codecs/test_shared_memory.py",
    "unsent_answers.check_room: TooLarge": "tests/service/transport/test_unread_answers.py",
    "unsent_answers.check_room: QueueFull": "tests/service/transport/test_unread_answers.py",
}
"""Places that refuse and that no call of the table reaches, and the file that tests them."""

Site = tuple[str, int, int]
"""A `raise` of the service: its file, its first and its last line."""


def sites() -> dict[Site, str]:
    """Return every place that refuses, and how `ELSEWHERE` calls it: `module.function: Kind`."""
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Refused | NotNow)
    }
    found: dict[Site, str] = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                    continue
                kind = ast.unparse(node.exc.func)
                if kind in kinds:
                    assert node.end_lineno is not None
                    name = f"{file.stem}.{function.name}: {kind}"
                    found[str(file), node.lineno, node.end_lineno] = name
    return found


class Tracer:
    """Notes which lines of the service's files are run, in this thread and in new ones."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._files = {str(file) for file in FILES}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> "Callable[..., Any] | None":
        """Note a line, as `sys.settrace` has it."""
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self


async def answers(layers: Layers, tracer: Tracer) -> list[httpx.Response]:
    """Make every call of the table of an application in this thread."""
    clients = {}
    threading.settrace(tracer)  # before the servers' threads, which are there from the start
    mha = {"default_model": "mha"}
    for name, repository, settings in (
        ("open", layers.repository, mha | OPEN),
        ("closed", layers.repository, mha | CLOSED),
        ("wide", layers.wide, WIDE),
    ):
        server = quiet_server(repository, **settings)
        app = create_app(server, refuse=lambda error: pytest.fail(str(error)))
        transport = httpx.ASGITransport(app)
        clients[name] = httpx.AsyncClient(transport=transport, base_url="http://headwise")
        for region, size in (("small", 8), ("large", 32_000)) if name == "open" else ():
            server.shared_memory.register(region, "/" + SEGMENT, 0, size)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return [
            await clients[refusal.server].request(
                refusal.method, refusal.path, content=refusal.content, headers=refusal.headers
            )
            for refusal in REFUSALS
        ]
    finally:
        sys.settrace(before)
        threading.settrace(before)


def unreached(tracer: Tracer) -> set[str]:
    """Return the places that refuse and of which no line was run."""
    return {
        name
        for (file, first, last), name in sites().items()
        if not any((file, line) in tracer.lines for line in range(first, last + 1))
    }


@pytest.fixture(scope="module")
def made(layers: Layers) -> Iterator[tuple[list[httpx.Response], Tracer]]:
    """Return the answer to each call of the table, and which lines gave them."""
    segment = Path("/dev/shm") / SEGMENT  # noqa: S108
    segment.write_bytes(bytes(32_000))
    tracer = Tracer()
    try:
        yield asyncio.run(answers(layers, tracer)), tracer
    finally:
        segment.unlink()
        gc.unfreeze()  # an application takes everything that is there for its own


@pytest.mark.fault("E5", "E8d", "B9")
@pytest.mark.parametrize("i", range(len(REFUSALS)), ids=[r.message[:60] for r in REFUSALS])
def test_refusal_says_where_what_was_expected_and_what_came(
    made: tuple[list[httpx.Response], Tracer], i: int
) -> None:
    """Word for word: a message is read by people, and nothing else tests how it reads."""
    refusal, answer = REFUSALS[i], made[0][i]

    assert answer.status_code == refusal.status, answer.text
    assert answer.json()["code"] == refusal.code
    beginning = refusal.message.removesuffix("…")
    if beginning == refusal.message:
        assert answer.json()["error"] == refusal.message
    else:
        assert answer.json()["error"].startswith(beginning)
    where, _, what = refusal.message.partition(": ")
    assert where
    assert what
    assert "None" not in what


def test_every_place_that_refuses_is_in_the_table_or_tested_elsewhere(
    made: tuple[list[httpx.Response], Tracer],
) -> None:
    """A new refusal needs its row, so that its words are read once more."""
    assert unreached(made[1]) == set(ELSEWHERE)
    for file in ELSEWHERE.values():
        assert (SERVICE.parent / file).is_file()
