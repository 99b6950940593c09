"""
The longest step of reading and writing: how long the event loop, or the interpreter's lock,
cannot be had while a codec works on the worst body that it accepts.

    python -m bench.steps [--rounds N] [WORD ...]

Each body goes the way that it goes in the server, which decides where it is read: at once, in
a thread, or in another process.  Beside it the loop ticks, and so does a thread, which needs
the lock for each tick; the longest time between two ticks is a round's figure.  The least
of all rounds is the work's own, the median has what else the machine did.  Words choose
the cases whose names hold one of them.
"""

import argparse
import asyncio
import gc
import gzip
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import save

from bench.many_callers import machine
from service.api import oip_infer, v1_attention
from service.api.server import Server
from service.api.v1_attention import AttentionFormat
from service.app import make_server
from service.codecs import attention_json, attention_safetensors, oip_request, oip_response
from service.codecs.chunks import Chunk, gathered
from service.codecs.compression import decompress
from service.host.malloc import keep_blocks
from service.inference.calls import Answer, Options, Stages
from service.layer_config import LayerConfig
from service.logs import configure
from service.settings import Settings
from service.telemetry.access_log import AccessLog
from service.telemetry.tracing import NoTracing

GOAL_MS: Final = 20
TICK_S: Final = 0.0005
LAYER: Final = LayerConfig(768, 12)
WIDTH: Final = LAYER.embed_dim
MIB: Final = 2**20

Work = Callable[[Server], Awaitable[object]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case, and print a row of each."""
    parser = argparse.ArgumentParser("python -m bench.steps", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args(argv)
    keep_blocks()  # as the server has it
    print(machine())
    print("| what | MB | seconds | loop, ms | lock, ms |\n| --- | --- | --- | --- | --- |")
    asyncio.run(_measure(options.words, options.rounds))
    return 0


async def _measure(words: Sequence[str], rounds: int) -> None:
    log = configure("json", "warning", sys.stderr)
    server = make_server(
        Settings(), tracing=NoTracing(), keys=None, access_log=AccessLog(log, names_keys=False)
    )
    try:
        for name, make in CASES.items():
            if words and not any(word in name for word in words):
                continue
            size, work = make()
            await work(server)  # starts what is started once: threads, the process
            gc.collect()
            gc.freeze()  # as the server does with what stays
            seen = [await _watched(server, work) for _ in range(rounds)]
            seconds, loop, lock = zip(*seen, strict=True)
            print(
                f"| {name} | {size / 1e6:.1f} | {statistics.median(seconds):.2f}"
                f" | {_shown(loop)} | {_shown(lock)} |",
                flush=True,
            )
    finally:
        server.offload.close()
        log.writer.close()


def _shown(gaps: Sequence[float]) -> str:
    """Write the least and the median of some gaps, in ms."""
    least = min(gaps) * 1e3
    text = f"{least:.1f} / {statistics.median(gaps) * 1e3:.1f}"
    return f"**{text}**" if least > GOAL_MS else text


async def _watched(server: Server, work: Work) -> tuple[float, float, float]:
    """Return the seconds of the work, and the longest the loop and the lock were away in it."""
    loop_ticks, lock_ticks = Ticks(), Ticks()
    is_over = threading.Event()

    def tick_in_thread() -> None:
        while not is_over.is_set():
            time.sleep(TICK_S)
            lock_ticks.tick()

    async def tick_on_loop() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            loop_ticks.tick()

    thread = threading.Thread(target=tick_in_thread)
    thread.start()
    ticking = asyncio.create_task(tick_on_loop())
    await asyncio.sleep(0.05)
    loop_ticks.longest = lock_ticks.longest = 0.0
    started = time.perf_counter()
    await work(server)
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.005)
    is_over.set()
    ticking.cancel()
    thread.join()
    return seconds, loop_ticks.longest, lock_ticks.longest


class Ticks:
    """The longest time between two ticks."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.perf_counter()

    def tick(self) -> None:
        """Note the time since the last tick."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now


def _numbers(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _hold(size: int) -> None:
    """Hold no memory: one body is read at a time here."""


def _nothing() -> tuple[int, Work]:
    async def work(server: Server) -> None:
        await asyncio.sleep(0.1)

    return 0, work


def _v1(body: bytes, media_type: str) -> tuple[int, Work]:
    formats = AttentionFormat(media_type, media_type, {}, None)
    return len(body), lambda server: v1_attention.read_tensors(server, formats, body, _hold)


def _json(embeddings: bytes, more: bytes = b"") -> tuple[int, Work]:
    return _v1(b'{"embeddings":' + embeddings + more + b"}", attention_json.MEDIA_TYPE)


def _tokens(size: int) -> bytes:
    """Return ordinary numbers, about so many bytes of them: [tokens][E]."""
    tokens = size // (WIDTH * 12)
    return orjson.dumps(_numbers((tokens, WIDTH)).round(8), option=orjson.OPT_SERIALIZE_NUMPY)


def _ragged_json(size: int) -> tuple[int, Work]:
    """As many sequences as tokens in the longest of them."""
    tokens = size // (WIDTH * 12) // 2
    lengths = [tokens, *[1] * (min(256, tokens, 131_072 // tokens) - 1)]
    rows = [
        orjson.dumps(_numbers((length, WIDTH)), option=orjson.OPT_SERIALIZE_NUMPY)
        for length in lengths
    ]
    return _json(b"[" + b",".join(rows) + b"]")


def _pair_mask_json(size: int) -> tuple[int, Work]:
    length = int((size / 12 / 5) ** 0.5)
    mask = np.ones((12, length, length), bool)
    embeddings = b"[" + b",".join([b"[0,0,0,0,0,0,0,0]"] * length) + b"]"
    pair_mask = orjson.dumps(mask, option=orjson.OPT_SERIALIZE_NUMPY)
    return _json(embeddings, b',"pair_mask":' + pair_mask)


def _many_arrays(count: int, item: bytes, more: bytes = b"") -> tuple[int, Work]:
    return _json(b"[" + b",".join([item] * count) + b"]", more)


def _irregular(size: int, item: bytes) -> tuple[int, Work]:
    """The first numbers are ordinary; the last one is NaN, which only the exact reader takes."""
    return _json(b"[[" + item * (size // len(item)) + b"NaN]]")


def _safetensors(**tensors: npt.NDArray[Any]) -> tuple[int, Work]:
    body = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    return _v1(body, attention_safetensors.MEDIA_TYPE)


def _ragged_safetensors(size: int) -> tuple[int, Work]:
    """One long sequence and many of one token: the block is as large as the limits allow."""
    longest = min(size // (WIDTH * 4) - 40, 4096)
    rows = min(131_072 // longest, 256)
    lengths = np.array([longest, *[1] * (rows - 1)])
    return _safetensors(embeddings=_numbers((int(lengths.sum()), WIDTH)), lengths=lengths)


def _ragged_masks(size: int) -> tuple[int, Work]:
    longest = int(size**0.5)
    rows = min(2**29 // longest**2, 256, 131_072 // longest)
    lengths = np.array([longest, *[1] * (rows - 1)])
    masks = {f"pair_mask.{i}": np.ones((1, n, n), bool) for i, n in enumerate(lengths)}
    return _safetensors(embeddings=_numbers((int(lengths.sum()), 8)), lengths=lengths, **masks)


def _infer(body: bytes, json_bytes: int | None = None) -> tuple[int, Work]:
    headers = {} if json_bytes is None else {oip_request.HEADER_LENGTH: str(json_bytes)}
    return len(body), lambda server: oip_infer.read_request(
        server, headers, "mha", LAYER, body, _hold
    )


def _infer_binary(size: int, datatype: str, dtype: str) -> tuple[int, Work]:
    tokens = size // np.dtype(dtype).itemsize // WIDTH
    content = np.ones((tokens, WIDTH), dtype).tobytes()
    rows = -(-tokens // 4096)
    header = orjson.dumps(
        {
            "inputs": [
                {
                    "name": "embeddings",
                    "shape": [rows, tokens // rows, WIDTH],
                    "datatype": datatype,
                    "parameters": {"binary_data_size": tokens // rows * rows * WIDTH * 4},
                }
            ]
        }
    )
    shape = (rows, tokens // rows, WIDTH)
    data = content[: int(np.prod(shape)) * np.dtype(dtype).itemsize]
    header = header.replace(b"%d}" % (np.prod(shape) * 4), b"%d}" % len(data))
    return _infer(header + data, len(header))


def _infer_json(size: int, number: bytes) -> tuple[int, Work]:
    tokens = size // len(number) // WIDTH
    data = b"[" + (number * (tokens * WIDTH))[:-1] + b"]"
    return _infer(
        b'{"inputs":[{"name":"embeddings","shape":[%d,%d,%d],"datatype":"INT32","data":'
        % (1, tokens, WIDTH)
        + data
        + b"}]}"
    )


def _gzip(size: int) -> tuple[int, Work]:
    body = gzip.compress(bytes(size))
    return size, lambda server: server.offload.interruptible(decompress, body, "gzip", 2 * size)


def _answer(lengths: npt.NDArray[np.int64] | None, shape: tuple[int, int]) -> Answer:
    rows, length = shape
    output, weights = np.ones((rows, length, WIDTH)), np.ones((rows, 12, length, length))
    stages = Stages(0, 0, 0)
    return Answer(output.astype(np.float32), weights.astype(np.float32), lengths, lengths, stages)


def _written(encode: Callable[[Answer], Iterator[Chunk]], answer: Answer) -> tuple[int, Work]:
    async def work(server: Server) -> None:
        async for _ in server.offload.chunks(gathered(encode(answer))):
            pass

    return answer.nbytes, work


def _as_json(answer: Answer) -> Iterator[Chunk]:
    return attention_json.encode("mha", 1, answer, single=False)


def _as_safetensors(answer: Answer) -> Iterator[Chunk]:
    return attention_safetensors.encode("mha", 1, answer)[1]


def _as_infer(answer: Answer, *, binary: bool) -> Iterator[Chunk]:
    outputs = {"output": binary, "attention_weights": binary}
    request = oip_request.InferRequest("", {}, {}, {}, Options(), outputs, {})
    return oip_response.encode("mha", 1, request, answer, {})[2]


LARGE: Final = 60 * MIB
ZERO: Final = b"0,"
HALF: Final = b"0.5,"

CASES: Final[dict[str, Callable[[], tuple[int, Work]]]] = {
    "nothing": _nothing,
    "JSON, at once": lambda: _json(_tokens(320 * 1024)),
    "JSON, thread": lambda: _json(_tokens(4 * MIB)),
    "JSON, process": lambda: _json(_tokens(LARGE)),
    "JSON ragged, thread": lambda: _ragged_json(4 * MIB),
    "JSON ragged, process": lambda: _ragged_json(LARGE),
    "JSON pair mask, at once": lambda: _pair_mask_json(150_000),
    "JSON pair mask, thread": lambda: _pair_mask_json(19 * MIB // 10),
    "JSON pair mask, process": lambda: _pair_mask_json(LARGE),
    "JSON most tokens of one number": lambda: _many_arrays(131_000, b"[0]"),
    "JSON tokens of one number, thread": lambda: _many_arrays(38_000, b"[0]"),
    "JSON tokens of one number, at once": lambda: _many_arrays(2_900, b"[0]"),
    "JSON empty arrays, thread": lambda: _many_arrays(38_000, b"[]"),
    "JSON floats and NaN, at once": lambda: _irregular(130_000, HALF),
    "JSON floats and NaN, thread": lambda: _irregular(1_660_000, HALF),
    "JSON zeros and NaN, thread": lambda: _irregular(830_000, ZERO),
    "JSON zeros and NaN, process": lambda: _irregular(LARGE, ZERO),
    "JSON escapes, thread": lambda: _json(b"[[NaN]]", b',"model":"' + b"\\n" * 2 * MIB + b'"'),
    "safetensors, at once": lambda: _safetensors(embeddings=_numbers((1, 1360, WIDTH))),
    "safetensors, thread": lambda: _safetensors(embeddings=_numbers((5, 4000, WIDTH))),
    "safetensors ragged, 60 KiB": lambda: _ragged_safetensors(160_000),
    "safetensors ragged, 4 MiB": lambda: _ragged_safetensors(4 * MIB),
    "safetensors ragged, 12 MB": lambda: _ragged_safetensors(13 * MIB),
    "safetensors ragged masks, 64 KiB": lambda: _ragged_masks(50_000),
    "safetensors ragged masks, 4 MiB": lambda: _ragged_masks(4 * MIB),
    **{
        f"infer binary {datatype}, {name}": lambda d=datatype, t=dtype, s=size: _infer_binary(  # type: ignore[misc]
            s, d, t
        )
        for name, size in (("at once", 4 * MIB - 4096), ("thread", LARGE))
        for datatype, dtype in (
            ("FP32", "<f4"),
            ("FP16", "<f2"),
            ("BF16", "<u2"),
            ("FP64", "<f8"),
            ("UINT8", "u1"),
            ("INT32", "<i4"),
            ("INT64", "<i8"),
        )
    },
    "infer JSON integers, at once": lambda: _infer_json(64_000, ZERO),
    "infer JSON integers, thread": lambda: _infer_json(830_000, ZERO),
    "infer JSON integers, process": lambda: _infer_json(LARGE, ZERO),
    "gzip": lambda: _gzip(LARGE),
    "answer JSON": lambda: _written(_as_json, _answer(None, (4, 1024))),
    "answer JSON ragged": lambda: _written(
        _as_json, _answer(np.array([1024, 1, 700, 3]), (4, 1024))
    ),
    "answer safetensors": lambda: _written(_as_safetensors, _answer(None, (4, 1024))),
    "answer safetensors ragged": lambda: _written(
        _as_safetensors, _answer(np.array([1024, 1, 700, 3]), (4, 1024))
    ),
    "answer infer binary": lambda: _written(
        lambda answer: _as_infer(answer, binary=True), _answer(None, (4, 1024))
    ),
    "answer infer JSON": lambda: _written(
        lambda answer: _as_infer(answer, binary=False), _answer(None, (4, 1024))
    ),
}


if __name__ == "__main__":
    sys.exit(main())
