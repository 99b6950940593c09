"""Each row of docs/faults.md is held by tests that carry its name."""

from tests.support.faults import fault_rows, marked_rows


def test_tests_name_only_rows_that_exist() -> None:
    """A mark that is misspelt would be counted for no row."""
    assert marked_rows().keys() <= fault_rows().keys()
