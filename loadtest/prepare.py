"""Everything that a load needs before its clock starts: requests, and what is expected of them."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from loadtest.answers import agree
from loadtest.calls import GOOD
from loadtest.endpoint import Reply
from loadtest.errors import TargetRefused
from loadtest.formats import Message, decode, encode, v2_binary
from loadtest.histogram import Histogram
from loadtest.oip import HEADER_LENGTH, Arrays
from loadtest.own_bodies import messages_of
from loadtest.plan import RequestsOf
from loadtest.shared_memory import Regions
from loadtest.target import Target
from loadtest.work import Tensors, Work, draw_tensors

_MOST_BYTES: Final = 256 * 2**20
"""Of prepared inputs; a call larger than that is the only one."""
_SHOWN: Final = 300
_NOT_NOW: Final = (429, 503, 504)
_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.2


@dataclass
class Prepared:
    """The requests of one kind of work, and how their answers are read."""

    target: Target
    work: Work
    requests: Sequence[bytes] | RequestsOf
    count: int
    """How many different calls there are."""
    expected: list[Arrays]
    """By call; empty when nothing is checked."""
    regions: Regions | None = None

    def decode(self, index: int, body: bytes, header_length: int | None) -> Arrays:
        """
        Return the tensors of an answer to one of the calls.

        Raises:
            ValueError: the body is none.
        """
        if self.regions is not None:
            return self.regions.decode(index, body)
        return decode(self.work, self.target.api, body, header_length)

    def is_right(self, index: int, body: bytes, header_length: int | None) -> bool:
        """Return whether an answer is the expected one."""
        try:
            return agree(self.decode(index, body, header_length), self.expected[index])
        except (ValueError, KeyError, TypeError):
            return False

    def decode_times(self, bodies: Sequence[tuple[int, bytes, int | None]]) -> Histogram:
        """Return what reading these answers takes a client written in Python."""
        took = []
        for index, body, header_length in bodies:
            started = time.perf_counter()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self.decode(index, body, header_length)
                took.append(time.perf_counter() - started)
        found = Histogram()
        found.add(np.array(took))
        return found


@contextlib.contextmanager
def prepared(
    target: Target,
    work: Work,
    *,
    connections: int,
    bodies: int,
    seed: int,
    check: bool,
    repository: Path | None,
) -> Iterator[Prepared]:
    """
    Give the requests of a load, once the server has answered the first of them well.

    With `check`, what is expected is what the server answers to each call alone, or what
    the artifact in `repository` gives.

    Raises:
        TargetRefused: the server refuses the call; with what it says.
        UsageWrong: the call cannot be made in this format, or there is no such artifact.
        Unreachable: nobody answers.
    """
    if work.body:
        own = messages_of(target, work)
        asked = [_ask(target, work, message) for message in (own if check else own[:1])]
        requests = _requests(target, own)
        yield Prepared(target, work, requests, len(requests), asked if check else [])
        return
    fixed = work.rows.isdecimal() and work.length.isdecimal()
    count = bodies if fixed else 4 * bodies  # a drawn shape is to be seen many times
    tensors = draw_tensors(work, target.inputs, count, most_bytes=_MOST_BYTES, seed=seed)
    if work.format == "shared-memory":
        binary = [v2_binary(target, work, one) for one in tensors]
        asked = [_ask(target, work, message) for message in binary]
        with Regions(target, work, tensors, asked, connections) as regions:
            given = Prepared(target, work, regions.requests_of, len(tensors), [], regions)
            given.expected = _expected(target, work, tensors, asked, repository) if check else []
            yield given
        return
    messages = [encode(target, work, one) for one in tensors]
    alone = repository is None and check
    asked = [_ask(target, work, message) for message in (messages if alone else messages[:1])]
    requests = _requests(target, messages)
    given = Prepared(target, work, requests, len(requests), [])
    given.expected = _expected(target, work, tensors, asked, repository) if check else []
    yield given


def _requests(target: Target, messages: Sequence[Message]) -> list[bytes]:
    return [
        target.endpoint.post_bytes(message.path, message.body, message.headers)
        for message in messages
    ]


def _expected(
    target: Target,
    work: Work,
    tensors: Sequence[Tensors],
    asked: list[Arrays],
    repository: Path | None,
) -> list[Arrays]:
    if repository is None:
        return asked
    from loadtest.oracle import of_artifact  # the rest of the tester needs no runtime

    return of_artifact(target.model, work, tensors, repository)


def _ask(target: Target, work: Work, message: Message) -> Arrays:
    reply = _patiently(target, message)
    found: Any = reply.json() if reply.status != GOOD else None
    if reply.status != GOOD:
        told = found.get("error") if isinstance(found, dict) else None
        raise TargetRefused(
            f"{target.endpoint.url}{message.path}: refused [{work}]:"
            f" answered {reply.status}{f': {told}'[:_SHOWN] if told else ''}"
        )
    length = reply.headers.get(HEADER_LENGTH.lower(), "")
    form = work if work.format != "shared-memory" else Work(format="binary")
    try:
        return decode(form, target.api, reply.body, int(length) if length.isdecimal() else None)
    except (ValueError, KeyError, TypeError) as error:
        raise TargetRefused(
            f"{target.endpoint.url}{message.path}: answered what is no {work.format}: {error}"
        ) from None


def _patiently(target: Target, message: Message) -> Reply:
    """Return the answer to a call, asked again while the server says "not now"."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        reply = target.endpoint.ask("POST", message.path, message.body, message.headers)
        # What the load before has left in its queue may still keep it busy.
        if reply.status not in _NOT_NOW or time.monotonic() > deadline:
            return reply
        time.sleep(_PAUSE_S)
