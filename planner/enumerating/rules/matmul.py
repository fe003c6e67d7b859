"""Products stated as an einsum equation of two operands: the rule is the equation."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code


def einsum_rows(equation: str) -> list[Row]:
    """One row per letter: sharded where it occurs, P out if it is summed over. A product is linear in each operand, so P of
    one operand passes beside a replicated other."""
    terms, out = equation.split("->")
    left, right = terms.split(",")

    def at(term: str, letter: str) -> int:
        return shard_code(term.index(letter)) if letter in term else R

    rows: list[Row] = [(R, R, R), (P, P, R), (P, R, P)]
    for letter in dict.fromkeys(left + right):
        rows.append((at(out, letter) if letter in out else P, at(left, letter), at(right, letter)))
    return rows


@rule("planner.einsum.default")
def einsum(signature: OpSignature) -> list[Row]:
    return einsum_rows(signature.args[0])


@rule("aten.mm.default")
def mm(signature: OpSignature) -> list[Row]:
    return einsum_rows("mk,kn->mn")


@rule("aten.bmm.default")
def bmm(signature: OpSignature) -> list[Row]:
    return einsum_rows("bmk,bkn->bmn")
