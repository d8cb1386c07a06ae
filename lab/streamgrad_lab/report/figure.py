"""A matplotlib figure as an inline SVG that follows the page: its colours, its font, its width."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import Any

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# What stands for ink and paper in a figure becomes the page's, which has two of each: light and dark.
INK, PAPER = "currentColor", "var(--paper)"
_GREY = re.compile(r"#([0-9a-f]{2})\1\1(?![0-9a-f])")
_FONT = re.compile(r"'DejaVu Sans'[^;]*")
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def standalone_svg(figure: Any) -> str:
    """The figure as the text of an SVG file, the same for the same figure.

    Args:
      figure: a matplotlib figure.

    Returns:
      A whole SVG document; its text is text.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "streamgrad"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def narrow_svg(figure: Any, inches: float = 4.2, least: float = 0.6) -> str:
    """The figure once more, laid out again for a phone: less wide, with text of the same size.

    Args:
      figure: a matplotlib figure; is left as it was.
      inches: how wide.
      least: by what factor it is made less wide at most; panels side by side need some room.

    Returns:
      As `standalone_svg`.
    """
    width, height = figure.get_size_inches()
    factor = min(1.0, max(inches / width, least))
    columns = [(legend, legend._ncols) for legend in figure.legends]
    try:
        figure.set_size_inches(factor * width, (0.5 + 0.5 * factor) * height)
        for legend, count in columns:
            while count > 1 and legend.get_window_extent().width > figure.bbox.width:
                count -= 1
                legend.set_ncols(count)
                figure.draw_without_rendering()
        return standalone_svg(figure)
    finally:
        figure.set_size_inches(width, height)
        for legend, count in columns:
            legend.set_ncols(count)


def inline_svg(document: str, prefix: str, label: str, kind: str = "") -> str:
    """An SVG document as an element of the page.

    Its ids and the references to them get a prefix, since an id must be unique within a page; dark and light greys
    become the page's ink and paper: the figure stays readable in the page's dark form.

    Args:
      document: from `standalone_svg`.
      prefix: of the ids, unique within the page.
      label: what the figure shows, for those who cannot see it.
      kind: the element's class.

    Returns:
      An `<svg>` element as text, with its width in CSS pixels as `--natural`.

    Example:
      >>> drawing = f'<svg xmlns="{SVG}" viewBox="0 0 9 9"><path id="a" style="stroke: #000000"/></svg>'
      >>> element = inline_svg(drawing, "f1-", "a line")
      >>> element[element.index("<path") :]
      '<path id="f1-a" style="stroke: currentColor" /></svg>'
    """
    ET.register_namespace("", SVG)
    root = ET.fromstring(document)
    for parent in root.iter():
        for child in list(parent):
            # The style sheet in it would hold for the whole page, whose own says the same.
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        element.attrib.update({name: _rewrite(name, value, prefix) for name, value in element.attrib.items()})
        if (target := element.attrib.pop(f"{{{XLINK}}}href", None)) is not None:
            element.set("href", target)
        element.tail = None  # line breaks between elements
    box = root.get("viewBox", "").split()
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.set("style", f"--natural: {float(box[2]) * 4 / 3:.0f}px")  # points to pixels
    if kind:
        root.set("class", kind)
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


def _rewrite(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return prefix + value
    if name in ("href", f"{{{XLINK}}}href"):
        return f"#{prefix}{value[1:]}" if value.startswith("#") else value
    if name == "d":
        return " ".join(value.split())
    value = _REFERENCE.sub(rf"url(#{prefix}\1)", value)
    return _GREY.sub(_ink_or_paper, _FONT.sub("sans-serif", value)) if name == "style" else value


def _ink_or_paper(grey: re.Match[str]) -> str:
    level = int(grey[1], 16)
    return INK if level < 0x60 else PAPER if level > 0xF0 else grey[0]


def dark_rules(elements: Iterable[str], least: float = 0.2) -> str:
    """CSS rules that lighten those colours of figures which are too dark for a dark page.

    Args:
      elements: from `inline_svg`.
      least: the relative luminance that is light enough.

    Returns:
      The rules; a colour is mixed with white until it is light enough, and so keeps its hue.

    Example:
      >>> dark_rules(['<path style="stroke: #440154; fill: none" />', '<path style="fill: #ffcc00" />'])
      '.figure [style*="stroke: #440154"] { stroke: #9873a1 !important; }'
    """
    found = sorted({match.groups() for element in elements for match in _COLOUR.finditer(element)})
    rules = []
    for what, colour in found:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        share = next(k / 20 for k in range(21) if _luminance(_mix(rgb, k / 20)) >= least)
        if share:
            lighter = "#" + "".join(f"{round(x):02x}" for x in _mix(rgb, share))
            rules.append(f'.figure [style*="{what}: {colour}"] {{ {what}: {lighter} !important; }}')
    return "\n".join(rules)


def _mix(rgb: list[int], share: float) -> list[float]:
    return [(1 - share) * x + share * 255 for x in rgb]


def _luminance(rgb: list[float]) -> float:
    """Relative luminance, as WCAG defines it."""
    linear = [x / 255 / 12.92 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
