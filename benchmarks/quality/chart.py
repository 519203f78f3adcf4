"""Draws the frontier: AUC difference to `off` against the share of its bytes that is saved, one panel per stream.

Pillow draws, since nothing else here needs a plotting library. Contestants that cost more than the panel shows stand at
its lower edge with their figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.quality.comparison import Compared

_PANEL = (760, 520)
_MARGIN = (86, 56, 24, 60)  # left, top, right, bottom
_COLUMNS = 2
_TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
_FLOORS = (-0.25, -0.5, -1.0, -2.0, -4.0)
_OURS = {"idle", "idle-16", "compact", "compact-2", "topk"}
_CONTROLS = {"random", "cold"}
_COLOURS = {"ours": (20, 90, 170), "control": (150, 150, 150), "rival": (190, 80, 30)}
_BLACK, _GRID = (30, 30, 30), (225, 225, 225)


def draw_frontier(panels: Mapping[str, Sequence[Compared]], path: Path) -> None:
    """panels: by title, the contestants of one stream, optimizer and data pass. Writes a PNG."""
    width, height = _PANEL
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    image = Image.new("RGB", (width * columns, height * rows), "white")
    for k, (title, compared) in enumerate(panels.items()):
        origin = ((k % columns) * width, (k // columns) * height)
        _Panel(image, origin, compared).draw(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


class _Panel:
    def __init__(self, image: Image.Image, origin: tuple[int, int], compared: Sequence[Compared]) -> None:
        self._draw = ImageDraw.Draw(image)
        self._font, self._large = ImageFont.load_default(14), ImageFont.load_default(18)
        left, top, right, bottom = _MARGIN
        self._left, self._top = origin[0] + left, origin[1] + top
        self._right, self._bottom = origin[0] + _PANEL[0] - right, origin[1] + _PANEL[1] - bottom
        self._compared = compared
        #: the lowest floor that no rival or policy of ours falls through; controls may
        worst = min((c.difference.low for c in compared if c.contestant not in _CONTROLS), default=0.0)
        self._floor = next((floor for floor in _FLOORS if floor <= worst), _FLOORS[-1])
        self._ceiling = max(0.05, max((c.difference.high for c in compared), default=0.0)) - self._floor * 0.08

    def draw(self, title: str) -> None:
        self._draw.text((self._left, self._top - 40), title, _BLACK, self._large)
        self._axes()
        taken: list[tuple[float, float]] = []
        for c in sorted(self._compared, key=lambda c: -c.difference.mean):
            self._contestant(c, taken)

    def _axes(self) -> None:
        for tenth in range(11):
            x = self._x(tenth / 10)
            self._draw.line([(x, self._top), (x, self._bottom)], _GRID)
            self._draw.text((x - 12, self._bottom + 6), f"{tenth * 10}%", _BLACK, self._font)
        step = next(step for step in _TICKS if (self._ceiling - self._floor) / step <= 8)
        for k in range(math.ceil(self._floor / step), math.floor(self._ceiling / step) + 1):
            value = k * step
            y = self._y(value)
            self._draw.line([(self._left, y), (self._right, y)], _BLACK if k == 0 else _GRID)
            self._draw.text((self._left - 56, y - 8), f"{value:+.2f}", _BLACK, self._font)
        self._draw.text((self._left, self._bottom + 28), "bytes saved against off, at the end", _BLACK, self._font)
        self._draw.text((self._left - 80, self._top - 16), "AUC difference x 100", _BLACK, self._font)

    def _contestant(self, c: Compared, taken: list[tuple[float, float]]) -> None:
        kind = "ours" if c.contestant in _OURS else "control" if c.contestant in _CONTROLS else "rival"
        colour = _COLOURS[kind]
        x, y = self._x(c.saved_end), self._y(c.difference.mean)
        self._draw.line([(x, self._y(c.difference.low)), (x, self._y(c.difference.high))], colour, 2)
        self._draw.ellipse([(x - 4, y - 4), (x + 4, y + 4)], colour)
        name = c.contestant if c.difference.mean >= self._floor else f"{c.contestant} {c.difference.mean:+.2f}"
        length = self._draw.textlength(name, self._font)
        at_x = x + 8 if x + 8 + length < self._right else x - 8 - length
        at_y = y - 8
        while any(abs(at_y - other_y) < 15 and abs(at_x - other_x) < 110 for other_x, other_y in taken):
            at_y += 15
        taken.append((at_x, at_y))
        self._draw.text((at_x, at_y), name, colour, self._font)

    def _x(self, share: float) -> float:
        return self._left + max(-0.02, min(1.0, share)) * (self._right - self._left)

    def _y(self, difference: float) -> float:
        inside = max(self._floor, min(self._ceiling, difference))
        return self._top + (self._ceiling - inside) / (self._ceiling - self._floor) * (self._bottom - self._top)
