import xml.etree.ElementTree as ET

from neap_client.router.v1.router_pb2 import AliasChange, Canary

from demo import picture

BEGAN_S = 1000.0


def change(before: int, after: int, at_s: float, canary: int = 0, share: int = 50) -> AliasChange:
    made = AliasChange(
        alias="latest", to_version=after, canary=Canary(version=canary, share_per_mille=share) if canary else None
    )
    if before:
        made.from_version = before
    made.change_time.FromMilliseconds(round(1000 * (BEGAN_S + at_s)))
    return made


CHANGES = [
    change(0, 1, 10.0),
    change(1, 1, 20.0, canary=2),
    change(1, 1, 25.0, canary=2, share=200),
    change(1, 2, 30.0),
]


def test_versions_are_marks_and_canaries_are_bands(tmp_path, pairs):
    path = picture.draw(tmp_path / "demo.svg", "tiny: 3 prompts", pairs, CHANGES, BEGAN_S)
    texts = {"".join(element.itertext()).strip() for element in ET.parse(path).iter() if element.tag.endswith("text")}
    assert {"tiny: 3 prompts", "no router", "exact 1.50x full", "router 1", "router 2", "exact 3.00x full"} <= texts
    assert {"full", "exact", "canary: router 2"} <= texts


def test_a_run_without_a_router_is_drawn_too(tmp_path):
    assert picture.draw(tmp_path / "demo.svg", "tiny", [], [], BEGAN_S).is_file()


def test_a_canary_lasts_until_it_or_its_version_ends():
    [(first, last, version)] = picture.canaries(CHANGES)
    assert (picture.seconds_of(first), picture.seconds_of(last), version) == (BEGAN_S + 20, BEGAN_S + 30, 2)
    others = [change(1, 1, 40.0, canary=3), change(1, 1, 50.0, canary=4)]
    assert [(last and picture.seconds_of(last), version) for _, last, version in picture.canaries(others)] == [
        (BEGAN_S + 50, 3),
        (None, 4),
    ]
    assert [move.to_version for move in picture.moves(CHANGES)] == [1, 2]
