import xml.etree.ElementTree as ET

from neap_engine.cli import learning_picture
from neap_engine.cli.learning_picture import Line, draw
from shared.registry.base import AliasChange, Canary

BEGAN_S = 1000.0


def change(before: int, after: int, at_s: float, canary: int = 0, share: int = 50) -> AliasChange:
    tried = Canary(canary, share) if canary else None
    return AliasChange("tiny", "latest", before or None, after, "me", "", BEGAN_S + at_s, tried)


CHANGES = [
    change(0, 1, 10.0),
    change(1, 1, 20.0, canary=2),
    change(1, 1, 25.0, canary=2, share=200),
    change(1, 2, 30.0),
]
LINES = [
    Line("full", "C0", [(BEGAN_S + 12, 10.0), (BEGAN_S + 31, 11.0)]),
    Line("exact", "C1", [(BEGAN_S + 13, 12.0)]),
    Line("exact", "C1", [(BEGAN_S + 32, 30.0)]),
]


def texts(path, began_s, lines=LINES) -> list[str]:
    draw(path, "tiny: 3 prompts", lines, CHANGES, began_s, lambda version: f"v{version}")
    found = ["".join(element.itertext()).strip() for element in ET.parse(path).iter() if element.tag.endswith("text")]
    return [text for text in found if text.strip("-\N{MINUS SIGN}0123456789.")]


def test_versions_are_marks_and_canaries_are_bands(tmp_path):
    found = texts(tmp_path / "demo.svg", BEGAN_S)
    assert [text for text in found if text.startswith("v")] == ["v0", "v1", "v2"]
    assert {"tiny: 3 prompts", "seconds after the start", "canary: router 2"} <= set(found)
    assert (found.count("full"), found.count("exact")) == (1, 1)


def test_what_was_before_the_left_end_is_the_version_there(tmp_path):
    found = texts(tmp_path / "later.svg", BEGAN_S + 22, [Line("router 1", "C0", [(BEGAN_S + 4 * 86_400, 1.0)])])
    assert [text for text in found if text.startswith("v")] == ["v1", "v2"]
    assert {"days after the start", "canary: router 2"} <= set(found)


def test_a_run_without_a_router_is_drawn_too(tmp_path):
    assert draw(tmp_path / "demo.svg", "tiny", [], [], BEGAN_S, str).is_file()


def test_a_canary_lasts_until_it_or_its_version_ends():
    [(first, last, version)] = learning_picture.canaries(CHANGES)
    assert (first.change_time_s, last.change_time_s, version) == (BEGAN_S + 20, BEGAN_S + 30, 2)
    others = [change(1, 1, 40.0, canary=3), change(1, 1, 50.0, canary=4)]
    assert [(last and last.change_time_s, version) for _, last, version in learning_picture.canaries(others)] == [
        (BEGAN_S + 50, 3),
        (None, 4),
    ]
    assert [move.to_version for move in learning_picture.moves(CHANGES)] == [1, 2]
