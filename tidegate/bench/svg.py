"""Line charts as SVG text: for reports that are one file and need nothing else to be read.

Lines differ in colour (Okabe and Ito's palette, told apart by colour-blind readers) and in dashes and markers (told
apart in print). Axes start at 0 unless logarithmic, and carry their unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 560
HEIGHT = 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 46, 50
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 4", "12 4", "1 4")
_NUM_TICKS = 6
_MARK_REACH = 5.0  # a mark within this multiple of the data stretches the axis; beyond that it would squeeze the lines

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    has_markers: bool = False
    is_step: bool = False


@dataclass(frozen=True)
class Chart:
    """`marks` are vertical lines with a label: objectives, capacity."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    is_log_x: bool = False
    y_max: float | None = None
    marks: Sequence[tuple[float, str]] = field(default=())

    def svg(self) -> str:
        x_axis, y_axis = self._axes()
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}" '
            'xmlns="http://www.w3.org/2000/svg">',
            f'<text x="{_LEFT}" y="17" class="title">{escape(self.title)}</text>',
        ]
        parts += self._grid(x_axis, y_axis)
        for place, (x, label) in enumerate(self.marks):
            if x_axis.low <= x <= x_axis.high:
                px = x_axis.place(x)
                parts.append(f'<line x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{HEIGHT - _BOTTOM}" class="mark"/>')
                parts.append(
                    f'<text x="{px + 4:.1f}" y="{_TOP + 12 + 13 * place}" class="small">{escape(label)}</text>'
                )
        for place, line in enumerate(self.lines):
            parts += _drawn(line, place, x_axis, y_axis)
        parts += self._legend()
        return "\n".join([*parts, "</svg>"])

    def _axes(self) -> tuple[_Axis, _Axis]:
        xs = [x for line in self.lines for x, _ in line.points if not self.is_log_x or x > 0]
        farthest = _MARK_REACH * max(xs, default=0.0)
        xs += [x for x, _ in self.marks if x <= farthest]
        ys = [y for line in self.lines for _, y in line.points]
        y_high = self.y_max if self.y_max is not None else max(ys, default=1.0) * 1.08
        if self.is_log_x:
            low = min(xs, default=1.0)
            x_axis = _Axis(low, max(*xs, low * 1.1) if xs else 10.0, _LEFT, WIDTH - _RIGHT, is_log=True)
        else:
            x_axis = _Axis(0.0, max(xs, default=1.0) or 1.0, _LEFT, WIDTH - _RIGHT)
        return x_axis, _Axis(0.0, y_high or 1.0, HEIGHT - _BOTTOM, _TOP)

    def _grid(self, x_axis: _Axis, y_axis: _Axis) -> list[str]:
        left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value in y_axis.ticks():
            py = y_axis.place(value)
            parts.append(f'<line x1="{left}" y1="{py:.1f}" x2="{right}" y2="{py:.1f}" class="grid"/>')
            parts.append(f'<text x="{left - 7}" y="{py + 4:.1f}" class="small end">{_label(value)}</text>')
        for value in x_axis.ticks():
            px = x_axis.place(value)
            parts.append(f'<line x1="{px:.1f}" y1="{bottom}" x2="{px:.1f}" y2="{bottom + 4}" class="axis"/>')
            parts.append(f'<text x="{px:.1f}" y="{bottom + 17}" class="small middle">{_label(value)}</text>')
        middle_y = (_TOP + bottom) / 2
        return [
            *parts,
            f'<path d="M{left} {_TOP}V{bottom}H{right}" class="axis"/>',
            f'<text x="{(left + right) / 2}" y="{HEIGHT - 12}" class="label middle">{escape(self.x_label)}</text>',
            f'<text x="14" y="{middle_y}" class="label middle" transform="rotate(-90 14 {middle_y})">'
            f"{escape(self.y_label)}</text>",
        ]

    def _legend(self) -> list[str]:
        """A row between title and plot, where no line can run through it; none for a single line."""
        if len(self.lines) < 2:
            return []
        parts = []
        x = float(_LEFT)
        for place, line in enumerate(self.lines):
            parts.append(f'<line x1="{x:.0f}" y1="32" x2="{x + 26:.0f}" y2="32" {_stroke(place)}/>')
            parts.append(f'<text x="{x + 32:.0f}" y="36" class="small">{escape(line.name)}</text>')
            x += 48 + 6.2 * len(line.name)
        return parts


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.is_log:
            step = _nice((self.high - self.low) / _NUM_TICKS)
            return [step * i for i in range(int(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        span = math.log10(self.high / self.low)
        digits = (1, 1.5, 2, 3, 4, 5, 6, 8) if span < 1 else (1, 2, 5) if span < 3 else (1,)
        return [d * 10.0**e for e in decades for d in digits if self.low <= d * 10.0**e <= self.high]


def _nice(value: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    magnitude = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(digit * magnitude for digit in (1, 2, 5, 10) if digit * magnitude >= value * 0.999)


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.6g}"


def _stroke(place: int) -> str:
    dash = _DASHES[place % len(_DASHES)]
    return f'class="line" stroke="{_COLOURS[place % len(_COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _drawn(line: Line, place: int, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    if not line.points:
        return []
    pixels = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
    path = f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"
    for px, py in pixels[1:]:
        path += f"H{px:.1f}V{py:.1f}" if line.is_step else f"L{px:.1f} {py:.1f}"
    parts = [f'<path d="{path}" {_stroke(place)}/>']
    if line.has_markers:
        colour = _COLOURS[place % len(_COLOURS)]
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"/>' for px, py in pixels]
    return parts
