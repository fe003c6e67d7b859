"""A draft belongs to the browser that began it; with its address others open a copy."""

from __future__ import annotations

from app import drafts, opening, owners
from app.view_models.pins import plan_event, replay
from tests.app.synthetic import make_plan, small_graph
from tests.app.test_pages import address, document, pin_everywhere, press, session


def test_the_mark_of_a_browser_survives_another_mask_of_its_token() -> None:
    token = bytes(range(16))

    def cookie(mask: bytes) -> str:
        return f"2|{mask.hex()}|{bytes(b ^ mask[i % 4] for i, b in enumerate(token)).hex()}|1796031607"

    one, two = owners.mark_of(cookie(b"abcd")), owners.mark_of(cookie(b"wxyz"))
    assert one == two != owners.mark_of("something else") and len(one) == 12
    assert owners.mark_of("") == "" and owners.mark_of("2|zz|1|2") and owners.mark_of("a||b")


def test_only_what_is_known_to_be_anothers_is() -> None:
    assert owners.is_of_another("ann", "bob")
    assert not any(owners.is_of_another(*pair) for pair in (("ann", "ann"), ("", "bob"), ("ann", "")))


def test_the_log_remembers_who_began_it() -> None:
    graph = small_graph()
    plan = make_plan(graph)
    log = [plan_event(plan, None, graph, None, "ann"), plan_event(plan, plan, graph, None)]
    assert replay(log).owner == "ann"
    assert "owner" not in plan_event(plan, None, graph, None)


def test_another_browser_gets_a_copy_and_the_draft_stays_as_it_was(open_app, monkeypatch):
    def be(mark: str) -> None:
        for module in (opening, drafts):
            monkeypatch.setattr(module, "browser_mark", lambda: mark)

    be("ann")
    at = pin_everywhere(open_app())
    link, pins = address(at), document(at).history.pins
    be("bob")
    other = open_app(**link)
    assert document(other).history.pins == pins and document(other).draft != link["draft"]
    assert session(other).note == opening.COPY and any("copy" in caption.value for caption in other.caption)
    press(other, "clear")
    be("ann")
    again = open_app(**link)
    assert document(again).history.pins == pins and document(again).draft == link["draft"] and not session(again).note
