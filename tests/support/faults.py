"""The rows of docs/faults.md, and the tests that carry them."""

import ast
import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| ([A-Z]\d+[a-z]?) \| (.+) \|$", re.MULTILINE)


@cache
def fault_rows() -> dict[str, str]:
    """Return what holds, by row: `{"A1": "Decompressing is linear ..."}`."""
    return dict(_ROW.findall((_ROOT / "docs" / "faults.md").read_text()))


def marked_rows() -> dict[str, list[str]]:
    """Return for each row that a `pytest.mark.fault` names the files where it does."""
    marked: dict[str, list[str]] = {}
    for path in sorted((_ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
                for argument in node.args:
                    row = str(ast.literal_eval(argument))
                    marked.setdefault(row, []).append(str(path.relative_to(_ROOT)))
    return marked
