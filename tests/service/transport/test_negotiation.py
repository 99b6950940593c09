"""What a caller accepts best of what is offered."""

import pytest

from service.transport.negotiation import best_offer


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("br, zstd", None),
        ("gzip, deflate, br", "gzip"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0", None),
        ("GZIP ; q=1", "gzip"),
        ("gzip;q=high", None),
    ],
)
def test_best_offer_has_the_greatest_weight(header: str, expected: str | None) -> None:
    """A malformed weight counts as none, and what is not offered is passed over."""
    assert best_offer(header, ("gzip", "deflate")) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("*/*", "a/b"),
        ("application/*;q=0.5, c/d;q=0.4", "a/b"),
        ("c/d, */*", "c/d"),
        ("*/*;q=0.1, c/d;q=0.2;x=y", "c/d"),
        ("text/*", None),
        ("", None),
    ],
)
def test_best_offer_of_a_wildcard_is_the_first(header: str, expected: str | None) -> None:
    """A wildcard means whatever the server likes best to give."""
    assert best_offer(header, ("a/b", "c/d"), ("application/*", "*/*")) == expected
