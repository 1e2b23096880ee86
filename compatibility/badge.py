"""A badge: two words in a small SVG image that fetches nothing."""

from __future__ import annotations

from html import escape

# White text is readable on each of them.
_COLOURS = {"pass": "#14653a", "stale": "#7a5200", "fail": "#a11d26", "unknown": "#4d5560"}
_LABEL_COLOUR = "#24292f"
# The mean width of a letter of the font, and the space on either side of a text, in pixels.
_LETTER, _MARGIN, _HEIGHT = 6.6, 8, 20


def draw_badge(label: str, message: str, verdict: str) -> str:
    """An SVG document: `label`, then `message` on the colour of `verdict`."""
    left, right = (round(len(text) * _LETTER) + 2 * _MARGIN for text in (label, message))
    width = left + right
    shown = escape(f"{label}: {message}")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" \
viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{shown}">
<title>{shown}</title>
<rect width="{width}" height="{_HEIGHT}" rx="3" fill="{_LABEL_COLOUR}"/>
<path d="M{left} 0H{width - 3}a3 3 0 0 1 3 3V{_HEIGHT - 3}a3 3 0 0 1-3 3H{left}z" \
fill="{_COLOURS[verdict]}"/>
<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2}" y="14">{escape(label)}</text>
<text x="{left + right / 2}" y="14">{escape(message)}</text>
</g>
</svg>
"""
