"""A profile as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import prod

from cute_sharding._words import bytes_text, seconds_text
from cute_sharding.tools.profile import flame
from cute_sharding.tools.profile.report import Line, MovedTensor, Report
from cute_sharding.tools.profile.table import callers_text, head, kinds_text, place_text, source

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --back: #fff; --text: #222; --soft: #f4f4f6;
  --box0: #c9d6ea; --box1: #b9d8c2; --box2: #ecd9a8; --box3: #eebfae; }
@media (prefers-color-scheme: dark) { :root { --back: #17181b; --text: #e6e6e6; --soft: #222429;
  --box0: #34465f; --box1: #2f5540; --box2: #6a5523; --box3: #743b2b; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 1200px; padding: 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left;
  vertical-align: top }
th { cursor: pointer; white-space: nowrap; background: var(--soft) }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
code { font-family: ui-monospace, monospace; font-size: 12px }
.change { white-space: nowrap }
.said { margin-top: .2rem; max-width: min(30rem, 62vw); opacity: .85 }
.flame { position: relative; font-size: 12px }
.box { position: absolute; height: 24px; line-height: 24px; overflow: hidden; padding: 0 4px;
  box-sizing: border-box; white-space: nowrap; text-overflow: ellipsis; border: 1px solid
  var(--back); border-radius: 3px }
.row0 { background: var(--box0) } .row1 { background: var(--box1) }
.row2 { background: var(--box2) } .row3 { background: var(--box3) }
figure { margin: 1rem 0; background: #fff; color: #222; padding: .5rem; overflow-x: auto }
"""
_SORT = """
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
  const down = head.dataset.down = head.dataset.down === "1" ? "0" : "1";
  const key = row => { const cell = row.cells[at];
    return "value" in cell.dataset ? +cell.dataset.value : cell.textContent; };
  const rows = [...body.rows].sort((a, b) => { const x = key(a), y = key(b);
    return (x < y ? -1 : x > y ? 1 : 0) * (down === "1" ? -1 : 1); });
  body.append(...rows);
});
"""
# What is received comes first: it is on a narrow screen as well.
_COLUMNS = (
    ("received", True),
    ("line", False),
    ("op", False),
    ("placements", False),
    ("collectives", False),
    ("model", True),
    ("measured", True),
)


def html(report: Report) -> str:
    """The page."""
    drawn = pictures(report.lines)
    figures = "".join(
        f"<h3>{escape(str(moved.shape))}: {escape(moved.change)} on "
        f"{escape(moved.where)}</h3><figure>{svg}</figure>"
        for moved, svg in drawn
    )
    shown = f"<h2>Who sends what to whom</h2>{figures}" if drawn else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Communication by line</title><style>{_STYLE}</style></head><body>"
        f"<h1>Communication by line</h1>{fragment(report)}"
        "<h2>Lines, as wide as what they receive</h2>"
        f"{flame.html(report.lines)}{shown}<script>{_SORT}</script></body></html>"
    )


def fragment(report: Report) -> str:
    """What it says first, and its table."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in head(report))
    if not report.lines:
        return said
    heads = "".join(
        f'<th{" class=number" if is_number else ""} title="click to sort">{name}</th>'
        for name, is_number in _COLUMNS
    )
    rows = "".join(map(_row, report.lines))
    return (
        f'{said}<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(line: Line) -> str:
    cause = line.cause
    code = source(cause)
    where = escape(place_text(cause)) + (f"<br><code>{escape(code)}</code>" if code else "")
    changes = "<br>".join(
        f'{escape(str(each.shape))} <span class="change">{escape(each.change)}</span>'
        for each in cause.moved
    )
    said = ". ".join(filter(None, (cause.text, callers_text(line))))
    where += f'<div class="said">{escape(said)}</div>'
    numbers = [
        (line.received, bytes_text(line.received)),
        (line.model, seconds_text(line.model)),
        (line.measured, seconds_text(line.measured)),
    ]
    received, *others = [
        f'<td class="number" data-value="{value}">{text}</td>' for value, text in numbers
    ]
    return (
        f"<tr>{received}<td>{where}</td><td>{escape(cause.op)}</td>"
        f"<td>{changes}</td><td>{escape(kinds_text(line))}</td>{''.join(others)}</tr>"
    )


# Of how many redistributions pictures are made: those that receive the most.
MOST = 8
# Larger meshes make no picture that can be read.
DEVICES = 64


def pictures(lines: Sequence[Line]) -> list[tuple[MovedTensor, str]]:
    """(redistribution, its picture as the text of an SVG) of the lines that receive the most; none
    without matplotlib. Partial placements of other kinds than torch's own make none.
    """
    wanted = [moved for line in lines for moved in line.cause.moved]
    found = []
    for moved in list(dict.fromkeys(wanted))[:MOST]:
        drawn = None if prod(moved.mesh) > DEVICES else _drawn(moved)
        if drawn is not None:
            found.append((moved, drawn))
    return found


def _drawn(moved: MovedTensor) -> str | None:
    from cute_sharding import dtensor
    from cute_sharding.tools.drawing import draw

    before, after = (", ".join(side) for side in (moved.before, moved.after))
    try:
        plan = dtensor.plan_redistribution(moved.shape, moved.mesh, before, after)
        svg = draw(plan.named(moved.names)).svg()
    except (ImportError, ValueError, RuntimeError, NotImplementedError):
        return None
    return svg[svg.index("<svg") :]
