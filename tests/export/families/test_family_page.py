"""The page of families: no family without a row, no figure beyond the contract's bound."""

from pathlib import Path

from export.families.registry import MODULES
from service.contract import FP32_TOLERANCE
from tests.support.family_table import END, PAGE, START

ROOT = Path(__file__).parents[3]


def rows() -> list[list[str]]:
    """Return the cells of the table's rows."""
    table = (ROOT / PAGE).read_text().partition(START)[2].partition(END)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_page_has_every_family_that_is_read() -> None:
    """A family that is added is measured."""
    assert {row[0] for row in rows()} == set(MODULES)


def test_page_shows_no_error_beyond_the_bound() -> None:
    """What is published as measured was within the promise."""
    errors = [float(cell) for row in rows() for cell in row[3:5]]

    assert len(errors) == 2 * len(rows()) > 0
    assert max(errors) <= FP32_TOLERANCE
