from __future__ import annotations

from autoprec.tuning.events import Listeners


class Loud:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def phase(self, name: str, detail: str = "") -> None:
        self.heard.append(f"phase {name} {detail}".strip())

    def note(self, text: str) -> None:
        self.heard.append(f"note {text}")


class Broken:
    def phase(self, name: str, detail: str = "") -> None:
        raise RuntimeError("no disk")


def test_every_member_hears_everything_in_order() -> None:
    one, two = Loud(), Loud()
    listeners = Listeners(one, two)  # type: ignore[arg-type]
    listeners.phase("graph")
    listeners.note("hello")
    assert one.heard == two.heard == ["phase graph", "note hello"]


def test_a_member_that_raises_is_dropped_and_named_and_the_others_go_on() -> None:
    one = Loud()
    listeners = Listeners(Broken(), one)  # type: ignore[arg-type]
    listeners.phase("graph")
    listeners.phase("search")
    said = "note Broken failed and is told no more (no disk); the search goes on"
    assert one.heard == ["phase graph", said, "phase search"]
    assert listeners.dropped == ["Broken.phase: RuntimeError: no disk"]
