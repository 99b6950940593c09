"""The first bytes by which a body that is not JSON is recognised, and what to do with it."""

from typing import Final

_LENGTH_BYTES: Final = 8
"""At the start of a safetensors file: how long its JSON header is."""

_SIGNATURES: Final = {
    b"\x1f\x8b": "gzip: send Content-Encoding: gzip with it",
    b"\x93NUMPY": "a file of numpy: send safetensors or JSON",
    b"PK\x03\x04": "a zip file, as torch.save and numpy.savez write: send safetensors or JSON",
    b"\x80": "a pickle: send safetensors or JSON",
    b"\xff\xfe": "UTF-16: send UTF-8",
    b"\xfe\xff": "UTF-16: send UTF-8",
}


def recognised(body: bytes) -> str | None:
    """Return what a body is that is not JSON, with the cure; None = it is not recognised."""
    end = int.from_bytes(body[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
    if body[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and end <= len(body):
        return "safetensors: send it to /v1/attention with Content-Type: application/x-safetensors"
    return next((what for start, what in _SIGNATURES.items() if body.startswith(start)), None)
