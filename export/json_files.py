"""JSON that was written by others: read strictly, and refused in one line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from export.errors import SourceInvalid


def read_json(file: Path) -> Any:
    """
    Return what a JSON file holds.

    Raises:
        SourceInvalid: it is no JSON, is nested too deeply, or has a key twice in one object.
        OSError: it cannot be read.
    """
    return parse_json(str(file), file.read_bytes())


def parse_json(where: str, text: bytes) -> Any:
    """
    Return what the text holds; `where` names it in messages.

    Raises:
        SourceInvalid: see `read_json`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise SourceInvalid(f"{where}: {twice!r} is there twice; expected it once")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise SourceInvalid(f"{where}: expected JSON: {error}") from None
    except RecursionError:
        raise SourceInvalid(f"{where}: expected JSON, got brackets nested too deeply") from None
