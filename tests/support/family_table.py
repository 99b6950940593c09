"""
Write the table of families in docs/families.md: `python -m tests.support.family_table`.

It runs the tests of the families and notes how far formula and engine were from transformers'
modules in each.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from export.families.config import Config
from service.inference.calls import Inputs
from service.layer_config import LayerConfig
from tests.support import attention_cases
from tests.support.attention_cases import Case

PAGE = Path("docs/families.md")
START, END = "<!-- table -->\n", "<!-- end of table -->\n"

HEADER = """\
| `model_type` | attention | beside the formula | output | weights | calls with | E, H, K, D |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass
class Row:
    """What was seen of one kind of layer of one family."""

    output_error: float = 0.0
    weights_error: float = 0.0
    masks: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)


def main() -> int:
    """Run the tests and write the table; return pytest's exit status."""
    with recorded() as rows:
        status = pytest.main(["-q", "-p", "no:cacheprovider", "tests/export/families"])
    if status == 0:
        before, _, rest = PAGE.read_text().partition(START)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + START + table(rows) + END + after)
    return int(status)


@contextlib.contextmanager
def recorded() -> Iterator[dict[tuple[str, str, str], Row]]:
    """Note meanwhile what `attention_cases` compares, by family, attention and options."""
    rows: dict[tuple[str, str, str], Row] = defaultdict(Row)
    family = ""
    text, compare = Config.text, attention_cases.compare

    def noted_text(config: Config, key: str, default: str | None = None) -> str:
        nonlocal family
        value = text(config, key, default)
        family = value if key == "model_type" else family
        return value

    def noted_compare(case: Case, config: LayerConfig, *answers: Any) -> tuple[float, float]:
        output_error, weights_error = compare(case, config, *answers)
        row = rows[family, attention_of(config), options_of(config)]
        row.output_error = max(row.output_error, output_error)
        row.weights_error = max(row.weights_error, weights_error)
        row.masks |= masks_of(case.inputs, config)
        sizes = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        row.shapes.add(", ".join(map(str, sizes)))
        return output_error, weights_error

    with (
        mock.patch.object(Config, "text", noted_text),
        mock.patch.object(attention_cases, "compare", noted_compare),
    ):
        yield rows


def table(rows: dict[tuple[str, str, str], Row]) -> str:
    """Return the rows as a table."""
    lines = [
        f"| {family} | {attention} | {options} | {row.output_error:.1e} | {row.weights_error:.1e}"
        f" | {', '.join(sorted(row.masks)) or 'none'} | {min(row.shapes)} |\n"
        for (family, attention, options), row in sorted(rows.items())
    ]
    return HEADER + "".join(lines)


def attention_of(config: LayerConfig) -> str:
    """Say where keys come from, and whether the layer is causal by default."""
    if config.is_cross:
        return "cross"
    return "self, causal" if config.causal else "self"


def options_of(config: LayerConfig) -> str:
    """Say what a layer computes beside the formula."""
    scaling = (
        "" if config.rotary is None or config.rotary.scaling == "none" else config.rotary.scaling
    )
    options = {
        "shared keys": config.num_kv_heads < config.num_heads,
        f"{scaling} rotary".strip(): config.rotary is not None,
        "norm": config.norm is not None,
        "position bias": config.position_bias is not None,
        "scale": config.scale is not None,
        "soft-cap": config.softcap is not None,
        "window": config.window is not None,
        "sink": bool(config.extra_keys),
    }
    return ", ".join(name for name, is_there in options.items() if is_there)


def masks_of(inputs: Inputs, config: LayerConfig) -> set[str]:
    """Return the kinds of masks and positions in a call."""
    given = {
        "padding": inputs.attend_mask is not None,
        "pairs": inputs.pair_mask is not None,
        "positions": inputs.positions is not None,
        "causal": inputs.causal,
        "not causal": config.causal and not inputs.causal,
    }
    return {name for name, is_there in given.items() if is_there}


if __name__ == "__main__":
    sys.exit(main())
