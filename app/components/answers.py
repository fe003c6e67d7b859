"""HTML of the inspector's answers: the price of every override, why, what each placement costs at the op."""

from __future__ import annotations

from html import escape

from app.components.markup import STYLE, chips
from app.view_models.prices import LocalRow, PriceRow, TermRow, Why

_ANSWER_STYLE = """
<style>
.px .num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.px th { font-weight: 500; opacity: 0.75; }
.px th.num { text-align: right; }
.px tr.now td { background: color-mix(in srgb, currentColor 8%, transparent); }
.px td:first-child { padding-left: 4px; }
.px p { margin: 0 0 4px; font-size: inherit; }
.px summary { cursor: pointer; padding: 4px; }
.px details td.num, .px details td:first-child { width: 28%; }
.px td.key { overflow-wrap: anywhere; }
</style>
"""


def price_table(rows: tuple[PriceRow, ...], folded: tuple[PriceRow, ...] = ()) -> str:
    """`folded` ones are a click away."""
    body = "".join(map(_price_row, rows))
    head = '<tr><th>placement</th><th class="num">step</th><th class="num">memory</th><th></th></tr>'
    return f'{STYLE}{_ANSWER_STYLE}<div class="px"><table>{head}{body}</table>{_fold(folded)}</div>'


def _fold(rows: tuple[PriceRow, ...]) -> str:
    if not rows:
        return ""
    return f"<details><summary>{len(rows)} more</summary><table>{''.join(map(_price_row, rows))}</table></details>"


def _price_row(row: PriceRow) -> str:
    mark = ' class="now"' if row.now else ""
    if row.note and not row.step:
        return f'<tr{mark}><td>{chips(row.placement)}</td><td colspan="3" class="soft">{escape(row.note)}</td></tr>'
    step, memory = (escape(text) or '<span class="soft">…</span>' for text in (row.step, row.memory))
    note = f"<b>{escape(row.note)}</b>" if row.note else ""
    return (
        f'<tr{mark}><td>{chips(row.placement)}</td><td class="num">{step}</td><td class="num">{memory}</td><td>{note}</td></tr>'
    )


def why(found: Why) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.sentences)
    terms = "".join(map(_term, found.terms))
    rest = f'<p class="soft">{escape(found.rest)}</p>' if found.rest else ""
    table = f"<table>{terms}</table>" if terms else ""
    return f'{STYLE}{_ANSWER_STYLE}<div class="px">{sentences}{table}{rest}</div>'


def _term(row: TermRow) -> str:
    times = f" <b>×{row.count}</b>" if row.count > 1 else ""
    here = " · here" if row.here else ""
    return (
        f'<tr><td class="num">{escape(row.us)}</td><td><code>{escape(row.key)}</code>{times}<br>'
        f'<span class="soft">{escape(row.what)}{here}<br>was {escape(row.before)}<br>becomes {escape(row.after)}</span></td></tr>'
    )


def local_table(rows: tuple[LocalRow, ...]) -> str:
    head = "".join(f'<th class="num">{name}</th>' for name in ("compute", "in", "out", "total µs"))
    body = "".join(
        f"<tr{' class=now' if row.now else ''}><td>{chips(row.placement)}</td>"
        + "".join(f'<td class="num">{escape(text)}</td>' for text in (row.compute, row.inputs, row.outputs, row.total))
        + "</tr>"
        for row in rows
    )
    return f'{STYLE}{_ANSWER_STYLE}<div class="px"><table><tr><th>placement</th>{head}</tr>{body}</table></div>'
