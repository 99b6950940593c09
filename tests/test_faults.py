"""Each row of docs/faults.md is held by tests that carry its name."""

from tests.support.faults import fault_rows, marked_rows


def test_every_row_has_its_tests_and_every_mark_its_row() -> None:
    """A row without a test is a promise; a mark that is misspelt would be counted for no row."""
    assert marked_rows().keys() == fault_rows().keys()
