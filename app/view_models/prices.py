"""What an override would cost and why, as rows to draw. Differences are against the plan shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.view_models.placements import placements_text
from planner import Explanation, Override, Plan, Relaxation
from planner.reasons import LocalPrice, Term

GIB, MIB = 2**30, 2**20
MOST_PRICES, MOST_TERMS, MOST_LOCAL = 8, 8, 6
NOTHING_US = 0.05
WORTH_A_ROW = 0.005
"""Share of the largest part of a difference from which on a part has a row of its own."""


@dataclass(frozen=True, kw_only=True)
class PriceRow:
    """`step` and `memory` are texts with sign and unit, "" while unknown; `note` says `now`, or why it is impossible."""

    placement: str
    step: str = ""
    memory: str = ""
    note: str = ""
    now: bool = False


def time_text(us: float, largest: float | None = None) -> str:
    """`+1.10 ms`, `-35 µs`, `±0`. In a column the `largest` one gives the unit of all."""
    if abs(us) < NOTHING_US:
        return "±0"
    sign = "+" if us > 0 else "-"
    if max(abs(us), largest or 0.0) >= 1000:
        return f"{sign}{abs(us) / 1000:,.2f} ms"
    return f"{sign}{abs(us):,.{0 if abs(us) >= 10 else 1}f} µs"


def memory_text(num_bytes: int) -> str:
    """`+2.00 GiB`, `-12 MiB`, `±0`"""
    if abs(num_bytes) < 0.5 * MIB:
        return "±0" if not num_bytes else f"{num_bytes:+,d} B"
    sign = "+" if num_bytes > 0 else "-"
    return f"{sign}{abs(num_bytes) / GIB:,.2f} GiB" if abs(num_bytes) >= 0.1 * GIB else f"{sign}{abs(num_bytes) / MIB:,.0f} MiB"


def price_rows(overrides: Iterable[Override], options: Iterable[str]) -> tuple[PriceRow, ...]:
    """Known prices from the cheapest on, then those that are not known yet, then the impossible ones with the reason.

    `options` are all legal placements; a later override of the same placement replaces an earlier one.
    """
    known = {placements_text(override.placements): override for override in overrides}
    priced = sorted((o for o in known.values() if o.delta_us is not None), key=lambda o: (o.delta_us or 0.0, not o.chosen))
    largest = max((abs(override.delta_us or 0.0) for override in priced), default=0.0)
    rows = [_row(override, largest) for override in priced]
    rows += [PriceRow(placement=option) for option in options if option not in known]
    rows += [_row(override, largest) for override in known.values() if override.delta_us is None]
    return tuple(rows)


def _row(override: Override, largest: float) -> PriceRow:
    placement = placements_text(override.placements)
    if override.delta_us is None:
        return PriceRow(placement=placement, note=_reason(override), now=override.chosen)
    return PriceRow(
        placement=placement, step=_step(override, largest), memory=memory_text(override.delta_bytes or 0),
        note="now" if override.chosen else "", now=override.chosen,
    )  # fmt: skip


def first_rows(rows: tuple[PriceRow, ...], picked: str) -> tuple[tuple[PriceRow, ...], tuple[PriceRow, ...]]:
    """(shown at once, behind a fold): the cheapest ones, the one now and the picked one stay in sight."""
    shown = [row for number, row in enumerate(rows) if number < MOST_PRICES or row.now or row.placement == picked]
    folded = tuple(row for row in rows if row not in shown)
    return (tuple(shown), folded) if len(folded) > 1 else (rows, ())


def _reason(override: Override) -> str:
    if override.status == "time_limit":
        return "not settled in time"
    if override.conflicts:
        return f"impossible: cannot be together with {'; '.join(override.conflicts)}"
    return "impossible: no plan has it"


def _step(override: Override, largest: float) -> str:
    """One figure if it is proved, the range in which it lies otherwise."""
    delta = override.delta_us or 0.0
    best = time_text(delta, largest)
    if override.certified or override.bound_us is None or override.objective_us is None:
        return best
    least = time_text(delta - (override.objective_us - override.bound_us), largest)
    return best if least == best else f"{least} to {best}"


# ---- why --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TermRow:
    """One part of a difference: `us` as text with its sign, `count` equal ones, `moves` what it was and what it becomes."""

    us: str
    what: str
    key: str
    count: int
    before: str
    after: str
    here: bool


@dataclass(frozen=True, kw_only=True)
class Why:
    """An explanation in sentences and rows; `rest` says what the rows leave out."""

    sentences: tuple[str, ...]
    terms: tuple[TermRow, ...] = ()
    rest: str = ""


def why(found: Explanation) -> Why:
    sentences = [_verdict(found)]
    sentences += [f"It would take the place of {', '.join(found.replaces)}." for _ in found.replaces[:1]]
    memory = [f"{name.removesuffix('_bytes')} {memory_text(more)}" for name, more in found.memory if more]
    if memory:
        sentences.append(f"Memory per device: {', '.join(memory)}.")
    if found.us_per_byte > 0:
        sentences.append(
            f"Memory is short there: one GiB more would save about {time_text(found.us_per_byte * GIB).lstrip('+')}."
        )
    sentences += [f"Giving up {relaxation_text(relaxation)}." for relaxation in found.relaxations]
    largest = max((abs(term.us) for term in found.terms), default=0.0)
    shown = [term for term in found.terms[:MOST_TERMS] if abs(term.us) >= WORTH_A_ROW * largest]
    left = found.terms[len(shown) :]
    rest = (
        f"{len(left)} smaller part{'s' if len(left) > 1 else ''}: {time_text(sum(term.us for term in left))} together"
        if left
        else ""
    )
    return Why(sentences=tuple(sentences), terms=tuple(_term(term, largest) for term in shown), rest=rest)


def _verdict(found: Explanation) -> str:
    asked, several = placements_text(found.asked), f" ({found.count} tensors)" if found.count > 1 else ""
    delta = time_text(found.override.delta_us or 0.0)
    if found.verdict == "chosen":
        return f"The plan has {asked} here{several}."
    if found.verdict == "unavailable":
        return f"{asked} cannot be had here{several}: {'; '.join(reason.text for reason in found.reasons)}."
    if found.verdict == "tie":
        return f"{asked} is as good{several}: the best plan with it takes just as long."
    if found.verdict == "cheaper":
        return f"{asked} is better{several}: a plan with it takes {delta}. Pin it and solve again."
    split = f"{time_text(found.here_us)} here, {time_text(found.elsewhere_us)} elsewhere"
    return f"The best plan with {asked}{several} takes {delta}: {split}."


def _term(term: Term, largest: float) -> TermRow:
    what = term.what if term.what == "compute" else "moving"
    return TermRow(
        us=time_text(term.us, largest), what=f"{what}, {term.phase}", key=term.key, count=term.count, before=term.before,
        after=term.after, here=term.here,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LocalRow:
    """µs at the op alone, as texts; `-` where a neighbour cannot serve the placement."""

    placement: str
    compute: str
    inputs: str
    outputs: str
    total: str
    now: bool


def local_rows(found: Iterable[LocalPrice]) -> tuple[LocalRow, ...]:
    """The chosen placement first, then the next ones."""
    prices = sorted(found, key=lambda price: not price.chosen)[:MOST_LOCAL]
    return tuple(
        LocalRow(
            placement=placements_text(price.placements), compute=_us(price.compute_us), inputs=_us(price.inputs_us),
            outputs=_us(price.outputs_us), total=_us(price.total_us), now=price.chosen,
        )
        for price in prices
    )  # fmt: skip


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}" if us >= 10 or us == 0 else f"{us:,.1f}"


# ---- conflicts ----------------------------------------------------------------------------------------------------------


def relaxation_text(found: Relaxation) -> str:
    """`pin X = RR: a plan of 612.3 ms with 41.2 GiB`, or what still stands in the way."""
    return f"{found.constraint}: {gain_text(found)}"


def gain_text(found: Relaxation, plan: Plan | None = None) -> str:
    """What giving one member of a conflict up brings; against `plan` if there is one."""
    if found.objective_us is None:
        if found.status == "time_limit":
            return "not settled in time"
        still = "; ".join(found.conflicts)
        return "not enough by itself" + (f", still in the way: {still}" if still else "")
    against = f" ({time_text(found.objective_us - plan.objective_us)} against the plan shown)" if plan is not None else ""
    peak = f", {found.peak_bytes / GIB:,.1f} GiB" if found.peak_bytes is not None else ""
    return f"a step of {found.objective_us / 1000:,.2f} ms{against}{peak}"
