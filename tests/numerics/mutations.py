"""Every wrong line of an exported file that its own --check and --dry-run must notice; run in a process of its own:

    python -m tests.numerics.mutations train.py [--every N --part K] [--others N]

The file is loaded once; each mutant is compiled into a forked child, so that nothing of a failed run is left for the next one.
The child runs what --dry-run runs, on the last rank, then what --check runs, with threads as ranks, and stops at the first that
notices. Prints one JSON line: how many mutants of each kind were noticed by what, and the lines that nothing noticed.

Kinds: `drop` a redistribution or one half of it; another `target` or `source` layout of the file; `late`: the line stands behind
its first reader, a call of the step one statement later; `whole` and `half`: awaited at once what should only be begun, and the
reverse; a `call` of the step that begins or ends redistributions is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import re
import select
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LIMIT_S = 120.0
LINE = re.compile(r"^(?P<indent> +)(?P<name>\w+) = (?P<how>redistribute(?:_begin|_end)?)\((?P<source>\w+), (?P<chain>[\w, ]+)\)$")
Mutant = tuple[str, str, str]
"""(kind, the line in words, text of the whole file)"""


def mutants(text: str, others: int) -> Iterator[Mutant]:
    """`others`: how many other layouts to try for each target and each source."""
    lines = text.splitlines(keepends=True)
    layouts = re.findall(r"^([A-Z]\w*) = \((?:\"(?:R|P|Pmax|S\d+)\",? ?)+\)$", text, flags=re.M)
    for at, line in enumerate(lines):
        found = LINE.match(line.rstrip("\n"))
        if found is not None:
            yield from _of_line(lines, at, found, _some(layouts, line, others))
    yield from _of_step(lines)


def _some(layouts: list[str], line: str, number: int) -> list[str]:
    """A few layouts, others for other lines, of those with the same number of axes."""
    start = zlib.crc32(line.encode()) % len(layouts)
    return [*layouts[start:], *layouts[:start]][: number + 1]


def _with(lines: list[str], changes: dict[int, str]) -> str:
    return "".join(changes.get(at, line) for at, line in enumerate(lines))


def _of_line(lines: list[str], at: int, found: re.Match[str], layouts: list[str]) -> Iterator[Mutant]:
    indent, name, how, source = (found[group] for group in ("indent", "name", "how", "source"))
    chain, line = found["chain"].split(", "), found[0].strip()

    def written(function: str, passed: list[str]) -> str:
        return f"{indent}{name} = {function}({source}, {', '.join(passed)})\n"

    yield "drop", line, _with(lines, {at: f"{indent}{name} = {source}\n"})
    for other in [x for x in layouts if x != chain[-1]][: len(layouts) - 1]:
        yield "target", f"{line}, as {other}", _with(lines, {at: written(how, [*chain[:-1], other])})
    for other in [x for x in layouts if x != chain[0]][: len(layouts) - 1]:
        yield "source", f"{line}, from {other}", _with(lines, {at: written(how, [other, *chain[1:]])})
    if how == "redistribute_begin":
        yield "whole", line, _with(lines, {at: written("redistribute", chain)})
    if how == "redistribute" and _communicates(chain):
        yield "half", line, _with(lines, {at: written("redistribute_begin", chain)})
    reader = _first_reader(lines, at, name)
    yield "late", line, _with(lines, {at: "", reader: lines[reader] + lines[at]})


def _communicates(chain: list[str]) -> bool:
    """Some axis goes from a split or pending sum to something else; `R` to anything is done without sending."""
    marks = [layout.rstrip("_").split("_") for layout in chain]
    return any(a not in (b, "R") for one, two in itertools.pairwise(marks) for a, b in zip(one, two, strict=True))


def _first_reader(lines: list[str], at: int, name: str) -> int:
    """The last line of the statement behind `at` that reads `name`, or that returns."""
    reader = next(n for n in range(at + 1, len(lines)) if re.search(rf"[=(,] ?.*\b{name}\b|^ +return\b", lines[n]))
    return next(n for n in range(reader, len(lines)) if _balanced("".join(lines[reader : n + 1])))


def _balanced(text: str) -> bool:
    return text.count("(") == text.count(")")


def _of_step(lines: list[str]) -> Iterator[Mutant]:
    """Calls of the step that begin or end redistributions: left out, or one statement later than planned."""
    begin = next(n for n, line in enumerate(lines) if line.startswith("class PlannedStep"))
    end = next(n for n, line in enumerate(lines) if line.startswith("# ---- the model"))
    statements = list(_statements(lines, begin, end))
    for (first, last), after in zip(statements, [*statements[1:], None], strict=True):
        text = "".join(lines[first : last + 1])
        if not re.search(r"\w_(unshard|reduce|collect)\w*\(", text):
            continue
        words = " ".join(text.split())[:90]
        yield (
            "call",
            words,
            _with(
                lines,
                {
                    n: "pass\n".rjust(len(lines[first]) - len(lines[first].lstrip()) + 5) if n == first else ""
                    for n in range(first, last + 1)
                },
            ),
        )
        if after is not None and _indent(lines[after[0]]) == _indent(lines[first]) and "return" not in lines[after[0]]:
            moved = dict.fromkeys(range(first, last + 1), "")
            yield "late", words, _with(lines, {**moved, after[1]: lines[after[1]] + text})


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _statements(lines: list[str], begin: int, end: int) -> Iterator[tuple[int, int]]:
    at = begin
    while at < end:
        last = next(n for n in range(at, end) if _balanced("".join(lines[at : n + 1])))
        if lines[at].strip():
            yield at, last
        at = last + 1


# ---- running ---------------------------------------------------------------------------------------------------------
class Checked:
    """An exported file, loaded once, with the truth of its one-rank run."""

    def __init__(self, path: Path) -> None:
        self.text, self.path = path.read_text(), path
        self.names = ModuleType("exported").__dict__
        self.names["__file__"] = str(path)
        exec(compile(self.text, str(path), "exec"), self.names)
        self.names["configure"](["--check"])
        self.names["install_threads"]()
        ((self.loss, self.grads, *_),) = self.names["step_on_threads"]((1,) * len(self.names["MESH_SHAPE"])).values()
        self.names["configure"](["--dry-run"])
        self.last_rank = math.prod(self.names["MESH_SHAPE"]) - 1
        self.warm_up()

    def warm_up(self) -> None:
        """A dry run fills the caches of fake tensors for the children; its counting is taken back."""
        own = dict(self.names)
        with contextlib.redirect_stdout(io.StringIO()):
            assert self.names["dry_run"]() == 0, "the file as it is does not pass its dry-run"
        self.names.update(own)

    def verdict(self, text: str) -> str:
        """What notices that this text is not the planned program: `raised`, `numbers`, the name of a count, or `nothing`."""
        said = io.StringIO()
        try:
            exec(compile(definition(self.text, text), str(self.path), "exec"), self.names)
            with contextlib.redirect_stdout(said):
                self.names["configure"](["--dry-run", "--ranks", str(self.last_rank)])
                passed = self.names["dry_run"]() == 0
                if passed:
                    self.names["configure"](["--check"])
                    found = self.names["step_on_threads"](self.names["MESH_SHAPE"])
                    passed = self.names["compare"]("check", found, self.loss, self.grads)
        except BaseException:
            return "raised"
        return "nothing" if passed else reason(said.getvalue())


def reason(said: str) -> str:
    for telling in ("another order", "not awaited", "before it is awaited", "collectives ", "redistributions ", "differ"):
        if re.search(rf"^  .*{telling}", said, flags=re.M):
            return telling.strip()
    return "numbers"


def definition(text: str, other: str) -> str:
    """The top-level function or class in which two texts of a file differ, as the second has it; "" if they are equal."""
    lines, changed = text.splitlines(keepends=True), other.splitlines(keepends=True)
    pairs = zip(lines, changed, strict=False)
    first = next((n for n, (one, two) in enumerate(pairs) if one != two), None)
    if first is None:
        return ""
    begin = next(n for n in range(first, -1, -1) if re.match(r"(def|class) ", lines[n]))
    end = next(n for n in range(first + 1, len(changed)) if re.match(r"[^\s)]", changed[n]))
    return "".join(changed[begin:end])


def in_child(run: Callable[[], str]) -> str:
    """The answer of a function in a forked child; `hung` if there is none in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # before there are threads: PyTorch makes its pool anew after a fork, and two at once break it
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
            os.write(write, run().encode())
        os._exit(0)
    os.close(write)
    there = select.select([read], [], [], LIMIT_S)[0]
    answer = os.read(read, 100).decode() if there else ""
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer or ("raised" if there else "hung")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take only each N-th mutant of a kind")
    parser.add_argument("--part", type=int, default=1, help="which of each N: several processes share the work")
    parser.add_argument("--others", type=int, default=1, help="how many other layouts to try for each target and each source")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    checked = Checked(asked.script)
    clean = in_child(lambda: checked.verdict(checked.text))
    assert clean == "nothing", f"the file as it is does not pass: {clean}"
    noticed: dict[str, Counter[str]] = {}
    missed, seen = [], Counter[str]()
    for kind, line, text in mutants(checked.text, asked.others):
        seen[kind] += 1
        if seen[kind] % asked.every != asked.part % asked.every:
            continue
        verdict = in_child(lambda text=text: checked.verdict(text))  # type: ignore[misc]
        noticed.setdefault(kind, Counter())[verdict] += 1
        if verdict in ("nothing", "hung"):
            missed.append(f"{kind} ({verdict}): {line}")
            print(missed[-1], file=sys.stderr, flush=True)
    clean = in_child(lambda: checked.verdict(checked.text))
    assert clean == "nothing", f"the file as it is does not pass any more: {clean}"
    found: dict[str, Any] = {"noticed": {kind: dict(counts) for kind, counts in noticed.items()}, "missed": missed}
    print(json.dumps({**found, "mutants": sum(c.total() for c in noticed.values()), "cpu_s": round(sum(os.times()[:4]))}))
    return 1 if missed else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
