"""What a caller accepts: the weighted lists of `Accept` and its kin (RFC 9110, 12.4.2)."""

from collections.abc import Iterator, Sequence


def best_offer(header: str, offers: Sequence[str], wildcards: Sequence[str] = ()) -> str | None:
    """
    Return the offer that a header's list gives the greatest weight; None = it accepts none.

    Among equal weights the list's order counts.  An element of `wildcards` stands for the
    first offer.
    """
    best, best_weight = None, 0.0
    for name, weight in _weighted(header):
        if name in offers or (name in wildcards and offers):
            offer = name if name in offers else offers[0]
            if weight > best_weight:
                best, best_weight = offer, weight
    return best


def _weighted(header: str) -> Iterator[tuple[str, float]]:
    """Give each element of the list, in lower case, with its weight; a malformed weight is 0."""
    for element in header.lower().split(","):
        name, _, parameters = element.partition(";")
        yield name.strip(), _weight(parameters)


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
