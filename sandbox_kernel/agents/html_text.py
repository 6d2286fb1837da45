"""Tables and text from HTML that a sandbox sent, for outputs that have nothing plainer.

Nothing is run or fetched, and no parser of HTML is trusted with it: tags are found by one pattern
that looks at each character once, and what is no tag is text.
"""

from __future__ import annotations

import html
import re

MOST_HTML = 2**18
_MOST_ROWS = 1000
_MOST_COLUMNS = 100
_MOST_IN_CELL = 200
_TAG = re.compile(r"<(!--|(/?)([a-zA-Z][a-zA-Z0-9]{0,20})(?:\s[^<>]*)?/?>|[!?][^<>]*>)")
_SILENT = frozenset({"script", "style", "head", "template", "svg", "math", "iframe", "object"})
_BREAKS = frozenset({"br", "p", "div", "li", "ul", "ol", "table", "tr", "pre"}) | {
    f"h{level}" for level in range(1, 7)
}
_SPACE = re.compile(r"\s+")


def html_text(source: str) -> str:
    """The text of a piece of HTML; rows of tables are lines, with bars between cells."""
    cut = len(source) > MOST_HTML
    page = _Page()
    source = source[:MOST_HTML]
    at = 0
    while found := _TAG.search(source, at):
        page.text(source[at : found.start()])
        at = found.end()
        if found.group(1) == "!--":
            end = source.find("-->", at)
            at = end + 3 if end >= 0 else len(source)
        elif found.group(3):
            tag = found.group(3).lower()
            if tag in _SILENT and not found.group(2) and not found.group().endswith("/>"):
                at = _end_of(tag, source, at)
            elif tag not in _SILENT:
                page.tag(tag, closing=bool(found.group(2)))
    page.text(source[at:])
    return page.done(cut)


def _end_of(tag: str, source: str, at: int) -> int:
    """Where an element ends whose contents are not text."""
    found = re.compile(rf"</{tag}\s*>", re.IGNORECASE).search(source, at)
    return found.end() if found else len(source)


class _Page:
    """Collects lines; a row of a table is one line."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._words: list[str] = []
        self._cells: list[str] | None = None
        self._in_cell = False
        self._rows = 0

    def text(self, source: str) -> None:
        try:
            text = html.unescape(source)
        except ValueError:  # a reference with thousands of digits
            text = source
        self._words.append(_SPACE.sub(" ", text))

    def tag(self, tag: str, *, closing: bool) -> None:
        if tag in ("td", "th"):
            self._end_cell()
            self._in_cell = not closing
        elif tag in ("tr", "table"):
            self._end_row()
            self._cells = [] if tag == "tr" and not closing else None
        elif tag in _BREAKS:
            if self._cells is None:
                self._end_line()
            else:
                self._words.append(" ")

    def done(self, cut: bool) -> str:
        self._end_row()
        if self._rows > _MOST_ROWS:
            self._lines.append(f"[... {self._rows - _MOST_ROWS} rows left out ...]")
        if cut:
            self._lines.append("[... the rest of the HTML left out ...]")
        return "\n".join(self._lines)

    def _end_cell(self) -> None:
        if self._cells is None:
            self._end_line()
            self._cells = []
        words = self._taken()
        if words or self._in_cell:
            self._cells.append(words)
        self._in_cell = False

    def _end_row(self) -> None:
        if self._cells is None:
            return self._end_line()
        self._end_cell()
        cells, self._cells = self._cells, None
        if cells:
            self._rows += 1
        if cells and self._rows <= _MOST_ROWS:
            shown = [cell[:_MOST_IN_CELL] for cell in cells[:_MOST_COLUMNS]]
            more = f" | [{len(cells) - len(shown)} more]" if len(cells) > len(shown) else ""
            self._lines.append(" | ".join(shown) + more)

    def _end_line(self) -> None:
        words = self._taken()
        if words:
            self._lines.append(words)

    def _taken(self) -> str:
        words = _SPACE.sub(" ", "".join(self._words)).strip()
        self._words.clear()
        return words
