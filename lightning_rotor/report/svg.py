"""Just enough SVG: shapes and text as strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_NARROW = frozenset("iljtfrI.,:;|'!()[] /·")
_WIDE = frozenset("mwMW@%—…→×")


def text_width(text: str, size: float) -> float:
    """Width of a line in the widest of the fonts, in the unit of ``size``; a few percent too much rather than too little."""
    return size * sum(0.37 if character in _NARROW else 0.9 if character in _WIDE else 0.62 for character in text)


def fitted(text: str, width: float, size: float) -> str:
    """A line without its inside if it is too long."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep > 2 and text_width(text[:keep], size) + size > width:
        keep -= 1
    head = keep // 3
    return f"{text[:head]}…{text[len(text) - (keep - head) :]}"


def wrapped(words: Sequence[str], width: float, size: float, separator: str = " · ") -> list[str]:
    """Words in lines that are no wider than this, unless a word is."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]}{separator}{word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element; underscores in attributes' names become hyphens, numbers lose what nobody sees."""

    def value(given: object) -> str:
        return f"{given:.2f}".rstrip("0").rstrip(".") if isinstance(given, float) else str(given)

    spelled = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(value(given))}" for key, given in attributes.items()
    )
    return f"<{name}{spelled}>{content}</{name}>" if content else f"<{name}{spelled}/>"


def text(content: str, x: float, y: float, size: float, **attributes: object) -> str:
    """A line of text, from ``x`` on the baseline ``y``."""
    return element("text", escape(content), x=x, y=y, font_size=size, **attributes)


def document(parts: Iterable[str], width: float, height: float, title: str) -> str:
    """The picture as a file."""
    body = "\n".join(
        [element("title", escape(title)), element("rect", width="100%", height="100%", fill="white"), *parts]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="{FONT}">\n{body}\n</svg>\n'
    )
