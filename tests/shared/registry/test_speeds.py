"""How fast an alias' versions were, over time."""

import random

import pytest

from shared.registry.factory import open_registry
from shared.registry.names import speeds_note
from shared.registry.speeds import FIRST_S, LAST_S, MAX_POINTS, Speeds, kept_speeds
from shared.served import NOTHING

WEEK_S = 7 * 86_400


def served(tokens: float, seconds: float):
    return NOTHING._replace(num_tokens=tokens, seconds=seconds)


@pytest.fixture
def registry(tmp_path):
    opened = open_registry(str(tmp_path / "registry"))
    yield opened
    opened.close()


def test_a_version_has_a_point_for_each_part_of_time(registry):
    speeds = Speeds()
    for at_s, version, tokens, seconds in [(0, 1, 100, 10), (59, 1, 100, 40), (61, 2, 50, 1), (62, 1, 30, 3)]:
        speeds.observe(version, served(tokens, seconds), at_s)
    expected = [(1, 30.0, 4.0), (1, 90.0, 10.0), (2, 90.0, 50.0)]
    assert list(speeds.points()) == expected
    speeds.keep(registry, "tiny", "latest")
    assert list(kept_speeds(registry, "tiny", "latest").points()) == expected
    assert list(kept_speeds(registry, "tiny", "stable").points()) == []


def test_a_long_life_takes_as_much_as_a_short_one_and_loses_no_token():
    speeds, draw = Speeds(), random.Random(0)
    for at_s in range(0, WEEK_S, 60):
        speeds.observe(draw.choice((1, 2)), served(10, 1), at_s)
        assert len(speeds.sums) <= MAX_POINTS
    assert sum(tokens for tokens, _ in speeds.sums.values()) == 10 * WEEK_S / 60
    assert speeds.part_s > FIRST_S
    assert {round(speed) for *_, speed in speeds.points()} == {10}


def test_versions_without_number_and_clocks_that_jump_end_nowhere():
    speeds = Speeds()
    for version in range(2 * MAX_POINTS):
        speeds.observe(version, served(10, 1), random.Random(version).choice((0, 1e9, 2e9, 4e12)))
    assert len(speeds.sums) <= MAX_POINTS
    assert speeds.part_s <= LAST_S


@pytest.mark.parametrize(
    "record", [{}, {"part_s": "x", "sums": []}, {"part_s": 60, "sums": [[1, 2]]}, {"part_s": 60, "sums": 3}]
)
def test_what_another_build_has_kept_counts_as_nothing(registry, record):
    registry.keep_note(speeds_note("tiny", "latest"), record)
    assert list(kept_speeds(registry, "tiny", "latest").points()) == []
