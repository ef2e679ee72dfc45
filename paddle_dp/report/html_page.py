"""The frame of a page: one HTML file with its style and without scripts, and the pieces that pages are made of.

Text becomes HTML through `escape` or one of these functions; an `Html` is HTML already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from paddle_dp.files import replacing

Html = str

_STYLE = Path(__file__).with_name("page.css").read_text("utf-8")

# Nothing is fetched or run, whatever a recipe or a data set puts into the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SHORT = 32  # characters of a cell that stand on one line


def page(title: str, body: Iterable[Html]) -> Html:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )


def write_page(path: Path, content: Html) -> None:
    """Writes a page, whole or not at all. Raises OSError."""
    with replacing(path) as partial:
        # A lone surrogate of a file's name has no UTF-8.
        partial.write_text(content, "utf-8", errors="replace")


def paragraph(text: str, kind: str = "") -> Html:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def note(text: str, kind: str, *more: Html) -> Html:
    """A sentence that stands out. `kind`: good, quiet, bad or warn."""
    return f'<div class="note {kind}"><div>{escape(text)}</div>{"".join(more)}</div>'


def command(text: str) -> Html:
    return f"<pre>{escape(text)}</pre>"


def tiles(labelled: Sequence[tuple[str, str, str]]) -> Html:
    """Boxes of (label, value, explanation)."""
    boxes = "".join(
        f'<div class="tile"><span class="quiet">{escape(label)}</span><b>{escape(value)}</b>'
        f'<small class="quiet">{escape(more)}</small></div>'
        for label, value, more in labelled
    )
    return f'<div class="tiles">{boxes}</div>' if boxes else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table; numbers stand on the right."""
    body = [
        "<tr>" + "".join(f'<td class="{_kind(cell)}">{escape(_cell(cell))}</td>' for cell in row) + "</tr>"
        for row in rows
    ]
    if not body:
        return ""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    first = f"<tr>{titles}</tr>" if any(head) else ""
    return f'<div class="wide"><table>{first}{"".join(body)}</table></div>'


def _kind(cell: object) -> str:
    return "n" if isinstance(cell, int | float) else "short" if len(str(cell)) <= _SHORT else "long"


def _cell(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def bar(shares: Mapping[str, tuple[float, int]]) -> Html:
    """A bar of {label: (share, colour)}, shares of 1."""
    pieces = "".join(
        f'<span class="c{colour}" style="width:{100 * share:.2f}%" title="{escape(label)} {share:.1%}"></span>'
        for label, (share, colour) in shares.items()
        if share > 0
    )
    return f'<div class="bar">{pieces}</div>'


def legend(labels: Mapping[str, int]) -> Html:
    """The colours of a picture, by label."""
    keys = "".join(
        f'<span class="key"><i class="c{colour % 8}"></i>{escape(label)}</span>'
        for label, colour in labels.items()
    )
    return f'<div class="legend">{keys}</div>'


def cards(pictured: Iterable[tuple[str, Html, Html]]) -> Html:
    """Small cards of (a PNG in base 64 or "", head, text)."""
    boxes = "".join(
        '<figure class="sample">'
        + (f'<img alt="" src="data:image/png;base64,{escape(png)}">' if png else "")
        + f"<figcaption>{head}<small>{text}</small></figcaption></figure>"
        for png, head, text in pictured
    )
    return f'<div class="samples">{boxes}</div>' if boxes else ""


def details(title: str, *content: Html) -> Html:
    """Content that is opened by a click, without JavaScript."""
    body = "".join(content)
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def section(title: str, *content: Html) -> Html:
    """A heading with its content; "" if there is none."""
    body = "\n".join(filter(None, content))
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""
