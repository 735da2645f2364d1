"""The HTML page of a report: one responsive file without network access."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any

from dptrain.errors import printable

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222;
       background: #fff; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; display: block; overflow-x: auto; overflow-wrap: normal; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.55rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sortable td, th { white-space: nowrap; }
figure { margin: 1rem 0 2rem; }
.box { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; border: 1px solid #bbb; border-radius: 6px;
       padding: 0.8rem 1rem; }
.box div { display: flex; flex-direction: column; }
.box strong { font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.box span { color: #555; }
svg { max-width: 100%; height: auto; display: block; }
svg.narrow { display: none; }
figcaption { color: #555; }
pre { background: #f3f3f3; padding: 0.7rem; overflow-x: auto; white-space: pre-wrap; }
.interactive th, .interactive tr[data-trial], .interactive [id*="-trial-"] { cursor: pointer; }
.lit { stroke-width: 3; }
tr.lit { background: #e6f0fa; }
svg:has(.lit) [id*="-trial-"]:not(.lit) { opacity: 0.12; }
@media (max-width: 700px) { svg.wide { display: none; } svg.narrow { display: block; } }
@media print { svg { break-inside: avoid; } }
"""

# The page's script: sorts the ranking, and highlights a trial's lines. The page is complete without it.
_SCRIPT = """
document.body.classList.add("interactive");
const order = (a, b, sign) => {
  const number = (text) => Number(text.replaceAll(/,(?=\\d{3})/g, ""));
  const [x, y] = [number(a), number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
  return Number.isNaN(x) - Number.isNaN(y) || sign * a.localeCompare(b); // a dash is last, whichever way
};
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", ({ target }) => {
    const head = target.closest("th");
    if (!head) return;
    const rising = head.ariaSort !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
    head.ariaSort = rising ? "ascending" : "descending";
    const text = (row) => row.cells[head.cellIndex].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => order(text(a), text(b), rising ? 1 : -1));
    table.tBodies[0].append(...rows);
  });
}
let kept = null;
const trial = (element) => {
  const part = element.closest("tr[data-trial], [id*='-trial-']");
  return part && (part.dataset.trial ?? part.id.split("-trial-")[1]);
};
const light = (number) => {
  for (const element of document.querySelectorAll(".lit")) element.classList.remove("lit");
  if (number === null) return;
  for (const element of document.querySelectorAll(`tr[data-trial="${number}"], [id$="-trial-${number}"]`))
    element.classList.add("lit");
};
document.addEventListener("mouseover", ({ target }) => light(trial(target) ?? kept));
document.addEventListener("click", ({ target }) => {
  const number = trial(target);
  kept = number === kept ? null : number;
  light(kept);
});
"""


def page(title: str, parts: Sequence[str], style: str = "") -> str:
    """Return a page, `style` added to its own; its policy lets no browser load anything or run another script."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n{''.join(parts)}<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Return text as HTML, without characters that control how others are shown."""
    return escape(printable(text, "\n\N{NO-BREAK SPACE}"))


class Number(str):
    """A number as text, to be aligned right."""


def encoded(text: str) -> bytes:
    """Return a page as UTF-8; characters that it cannot encode, of a command line in another encoding, are escaped."""
    return text.encode("utf-8", "backslashreplace")


def box(facts: Sequence[tuple[str, str]]) -> str:
    """Return what to see first: a label and a text each; nothing without any."""
    cells = "".join(
        f"<div><strong>{_text(value)}</strong><span>{_text(label)}</span></div>\n" for label, value in facts
    )
    return f'<div class="box">\n{cells}</div>\n' if facts else ""


def figure(picture: str, caption: str) -> str:
    """Return a picture by `drawing.draw` with a caption, which is text."""
    return f"<figure>\n{picture}\n<figcaption>{_text(caption)}</figcaption></figure>\n"


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], trials: Sequence[int] = (), *, sortable: bool = False
) -> str:
    """Return a table; numbers and `Number` align right, and `trials` (one per row) makes it sortable too."""
    head = f"<thead><tr>{''.join(f'<th>{_text(name)}</th>' for name in header)}</tr></thead>\n" if any(header) else ""
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td class="number">{escape(str(value))}</td>'
            if isinstance(value, Number) or not isinstance(value, str)
            else f"<td>{_text(value)}</td>"
            for value in row
        )
        which = f' data-trial="{trials[number]}"' if trials else ""
        lines.append(f"<tr{which}>{cells}</tr>\n")
    kind = ' class="sortable"' if trials or sortable else ""
    return f"<table{kind}>\n{head}<tbody>\n{''.join(lines)}</tbody>\n</table>\n"
