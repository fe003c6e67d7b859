"""Files that leave the app: the report is text whatever names a model has; plan files come back or are refused."""

import base64
import csv
import gzip
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import app.demo
from app.view_models import files
from app.view_models.hotspots import largest
from app.view_models.report import report
from planner import Pin, Plan, PlanFormatError, hardware_profile
from tests.app.synthetic import MESH, make_plan, small_graph

HOSTILE = '<img src=x onerror="alert(1)">\'"&</table><script>alert(2)</script>\n{{7*7}}'
GRAPH = small_graph()
PLAN = make_plan(GRAPH)
PROFILE = hardware_profile("h100_sxm")
PINNED = make_plan(
    GRAPH, MESH, (Pin(where="layers.*.attention.wq", placements=Pin.parse("x=RR", MESH).placements, note=HOSTILE),)
)


class Tags(HTMLParser):
    """What a browser would make of a file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile(plan: Plan) -> Plan:
    """Every name that a model or a user can choose."""
    choices = {key.replace("wo", f"wo{HOSTILE}"): choice for key, choice in plan.choices.items()}
    moves = tuple(replace(r, tensor=(r.tensor[0].replace("wo", f"wo{HOSTILE}"), r.tensor[1])) for r in plan.redistributions)
    return replace(
        plan, choices=choices, redistributions=moves, request=replace(plan.request, model=HOSTILE),
        replicated_for_lack_of_a_rule=(HOSTILE,),
    )  # fmt: skip


def test_hostile_names_are_text() -> None:
    plain, bad = (Tags(report(p, b, PROFILE)) for p, b in ((PINNED, PLAN), (hostile(PINNED), hostile(PLAN))))
    assert "alert(2)" in bad.text and HOSTILE.splitlines()[0] in bad.text
    assert bad.tags == plain.tags and bad.attributes == plain.attributes
    assert not bad.tags & {"script", "img", "iframe", "link"} and not any(name.startswith("on") for name in bad.attributes)


def test_the_report_needs_no_network_and_is_small() -> None:
    folder = Path(app.demo.__file__).parent
    demo = Plan.load(folder / "llama3-8b.plan.json.gz")
    text = report(demo, demo, hardware_profile(demo.hardware_name))
    found = Tags(text)
    assert all(link.startswith("data:") for link in found.links) and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text and len(text.encode()) < 2_000_000


def test_the_plan_inside_is_the_plan() -> None:
    packed = re.search(r'base64,([^"]+)"', report(PINNED, None, PROFILE))
    assert packed is not None
    inside = files.read_plan(base64.b64decode(packed[1]))
    assert inside.dumps() == PINNED.dumps()


def test_the_same_plan_gives_the_same_bytes() -> None:
    again = Plan.from_json(json.loads(PINNED.dumps()))
    assert report(again, PLAN, PROFILE) == report(Plan.from_json(json.loads(again.dumps())), PLAN, PROFILE)


def test_the_report_says_what_a_review_asks() -> None:
    unproved = replace(PINNED, report=replace(PINNED.report, status="feasible", bound_us=0.95 * PINNED.objective_us))
    text = Tags(report(unproved, PLAN, PROFILE)).text
    wanted = (
        "fits, 72.0 GiB free", "Not proven optimal", "within 5 %", "layers.*.attention.wq", "Against base plan", "llama3-tiny",
        "reduce_scatter", "saved activations", "datasheet", PINNED.plan_id, PINNED.fingerprint,
    )  # fmt: skip
    for words in wanted:
        assert words in text, words
    assert "has changed since" in text, "the made-up plan has another profile"
    assert "has changed since" not in Tags(report(replace(PLAN, hardware_hash=PROFILE.content_hash), None, PROFILE)).text


def test_hotspots_are_all_the_communication() -> None:
    spots = largest(PLAN, 1000)
    assert sum(spot.us for spot in spots) == pytest.approx(PLAN.comm_us)
    assert sum(spot.num_bytes for spot in spots) == sum(size for kinds in PLAN.comm_bytes.values() for size in kinds.values())
    assert sum(spot.count for spot in spots) == len(PLAN.redistributions)


# ---- other files --------------------------------------------------------------------------------------------------------


def test_the_table_comes_back_and_runs_no_formula() -> None:
    text = files.csv_text({"key": ["=cmd()", 'a,"b"\nc', "layers.0"], "µs": [1.5, -2.0, None]})
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["key", "µs"], ["'=cmd()", "1.5"], ['a,"b"\nc', "-2.0"], ["layers.0", ""]]


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "compressed"])
def test_a_plan_file_comes_back(pack) -> None:
    assert files.read_plan(pack(PINNED.dumps().encode())).dumps() == PINNED.dumps()


BOMB = gzip.compress(b"[" + b" " * files.MOST_UNPACKED_BYTES + b"]")


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "JSON"), (b"\xff\xfe", "JSON"), (b"[" * 100_000, "JSON"), (b"{}", "schema"), (b"[1]", "schema"),
        (b'{"schema": 99}', "version"), (b'{"schema": 1}', "damaged"), (b"\x1f\x8bnothing", "unpacked"),
        (gzip.compress(PLAN.dumps().encode())[:-40], "unpacked"), (BOMB, "unpacks to more"),
        (b" " * (files.MOST_BYTES + 1), "larger than"),
    ],
    ids=["empty", "binary", "deep", "no plan", "list", "schema", "fields", "gzip", "cut", "bomb", "large"],
)  # fmt: skip
def test_bad_plan_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(PlanFormatError) as error:
        files.read_plan(data)
    assert words in error.value.message


def test_file_names_are_plain() -> None:
    bad = replace(PLAN, request=replace(PLAN.request, model="../../etc/pass wd.py:make"))
    assert re.fullmatch(r"[A-Za-z0-9-]+", files.file_stem(bad))
