"""System shared memory, as the protocol lends it: tensors that never pass the wire."""

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import orjson

from loadtest import oip
from loadtest.errors import LoadTestError, TargetRefused, UsageWrong
from loadtest.formats import v2_inputs, v2_parameters, v2_path
from loadtest.oip import Arrays
from loadtest.target import Target
from loadtest.work import Tensors, Work

_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps these segments
_ALIGNED: Final = 64
_MOST_BYTES: Final = 4 * 2**30


class Regions:
    """
    Two segments that the server has been lent: one with all inputs, one for answers.

    Each connection has its own place for answers, since the server writes several at once.

    Raises:
        UsageWrong: there is no shared memory here, or not enough.
        TargetRefused: the server does not take it.
    """

    def __init__(
        self,
        target: Target,
        work: Work,
        tensors: Sequence[Tensors],
        answers: Sequence[Arrays],
        connections: int,
    ) -> None:
        self._target, self._work, self._tensors = target, work, tensors
        self._answers = answers
        self._stride = max(sum(_aligned(a.nbytes) for a in one.values()) for one in answers)
        tag = f"loadtest-{os.getpid()}-{secrets.token_hex(4)}"
        self._in, self._out = f"{tag}-in", f"{tag}-out"
        inputs = [values for one in tensors for values in v2_inputs(one).values()]
        self._size_in = sum(_aligned(values.nbytes) for values in inputs)
        self._size_out = self._stride * connections
        if self._size_in + self._size_out > _MOST_BYTES:
            raise UsageWrong(
                f"--connections: {connections} answers of {self._stride} bytes are more than"
                f" {_MOST_BYTES} bytes of shared memory"
            )
        self._stack = contextlib.ExitStack()
        self._answers_at: mmap.mmap

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            lent = self._segment(stack, self._in, self._size_in)
            self._answers_at = self._segment(stack, self._out, self._size_out)
            self._entries = []
            at = 0
            for one in self._tensors:
                entries = []
                for name, values in v2_inputs(one).items():
                    part = np.ascontiguousarray(values).tobytes()
                    lent[at : at + len(part)] = part
                    entries.append(
                        {
                            **oip.described(name, values),
                            "parameters": oip.in_shared_memory(self._in, at, len(part)),
                        }
                    )
                    at += _aligned(len(part))
                self._entries.append(entries)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def requests_of(self, connection: int) -> Sequence[bytes]:
        """Return the whole requests of one connection."""
        return [self._request(connection, index) for index in range(len(self._tensors))]

    def answer(self, connection: int, index: int) -> bytes:
        """Return a copy of the last answer to this call on this connection."""
        start = connection * self._stride
        size = sum(_aligned(array.nbytes) for array in self._answers[index].values())
        return self._answers_at[start : start + size]

    def decode(self, index: int, answer: bytes) -> Arrays:
        """Return the tensors of a copied answer."""
        found: Arrays = {}
        at = 0
        for name, like in self._answers[index].items():
            values = np.frombuffer(answer, like.dtype, like.size, at)
            found[name] = values.reshape(like.shape)
            at += _aligned(like.nbytes)
        return found

    def _request(self, connection: int, index: int) -> bytes:
        at = connection * self._stride
        outputs = []
        for name, like in self._answers[index].items():
            outputs.append(
                {"name": name, "parameters": oip.in_shared_memory(self._out, at, like.nbytes)}
            )
            at += _aligned(like.nbytes)
        body = {"inputs": self._entries[index], "outputs": outputs}
        if parameters := v2_parameters(self._work, self._tensors[index]):
            body["parameters"] = parameters  # type: ignore[assignment]
        path = v2_path(self._target, self._work)
        headers = {"Content-Type": "application/json"}
        return self._target.endpoint.post_bytes(path, orjson.dumps(body), headers)

    def _segment(self, stack: contextlib.ExitStack, name: str, size: int) -> mmap.mmap:
        """Make a segment, lend it, and have both undone in the end."""
        path = _DIRECTORY / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(path.unlink, missing_ok=True)
            try:
                os.posix_fallocate(descriptor, 0, size)
                mapped = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UsageWrong(f"--format: shared-memory: {path}: {error.strerror}") from None
        stack.callback(mapped.close)
        self._call(f"{name}/register", {"key": f"/{name}", "offset": 0, "byte_size": size})
        stack.callback(self._give_back, name)
        return mapped

    def _give_back(self, name: str) -> None:
        # A server that is gone has let go already.
        with contextlib.suppress(LoadTestError):
            self._call(f"{name}/unregister", {})

    def _call(self, path: str, body: dict[str, Any]) -> None:
        where = f"/v2/systemsharedmemory/region/{path}"
        reply = self._target.endpoint.ask("POST", where, json.dumps(body).encode())
        if reply.status != 200:
            found = reply.json()
            told = found.get("error", "") if isinstance(found, dict) else ""
            raise TargetRefused(
                f"--format: shared-memory: the server answered {reply.status}: {told}"
            )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
