"""Elements of HTML and SVG as text; whatever is not an element already is escaped."""

import html
from collections.abc import Iterable

from loadtest.report.words import printable

_EMPTY = frozenset({"br", "col", "link", "meta"})
"""Elements of HTML that have no end."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """
    Return one element.

    Underscores in attribute names stand for hyphens, one at the end for nothing
    (`class_`); an attribute of None is left out, as is a child.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{pairs}>")
    return Markup(f"<{name}{pairs}>{join(children)}</{name}>")


def join(children: Iterable[str | None]) -> Markup:
    """Return elements one after the other, texts among them escaped."""
    return Markup("".join(text(child) for child in children if child is not None))


def text(child: str) -> Markup:
    """Return a text escaped, or an element as it is."""
    return child if isinstance(child, Markup) else Markup(html.escape(printable(child)))


def _attribute(value: str | float) -> str:
    return printable(value) if isinstance(value, str) else f"{value:.6g}"
