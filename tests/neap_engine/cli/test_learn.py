"""`neap learn`: what is kept of served answers is shown, and removed."""

import time
from contextlib import closing

import pytest

from shared.registry.base import Canary
from shared.registry.factory import open_registry
from shared.registry.names import learning_note
from shared.registry.speeds import Speeds
from shared.served import NOTHING
from shared.traffic.answer import ServedAnswer
from shared.traffic.traffic import open_traffic
from tests.registry_servers import SERVERS, new_place
from tests.tiers import tiered

HOUR = 480_000  # 2024-10-04 00:00 UTC


@pytest.fixture(params=tiered(["folder", "bucket", SERVERS[0]], {"folder"}))
def place(request, monkeypatch):
    url = new_place(request.param, request)
    monkeypatch.setenv("NEAP_REGISTRY", url)
    with closing(open_registry(url)) as registry:
        registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
        registry.publish("tiny", {}, {"x": b"2"}, request_id="two", aliases=["latest@legal"])
    open_traffic(url).write(
        [ServedAnswer("tiny", pool, 1, "n", HOUR + n, [1, 2], [3]) for pool in ("legal", "default") for n in range(3)]
    )
    return url


def test_status_shows_each_pool_and_its_router(neap, place):
    lines = neap("learn", "status").stdout.splitlines()
    rows = {words[3]: words for line in lines if len(words := line.split()) > 3 and words[1] == "tiny"}
    legal, default = ([word for word in rows[pool] if word != "│"] for pool in ("legal", "default"))
    assert legal == ["tiny", "legal", "9", "3", "10-04", "00:00", "10-04", "02:00", "2"]
    assert default[-1] == "1"


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ({}, "no job yet; the next with ? new tokens (9 are there), not before ? UTC"),
        (
            {"last_job": "cal-1", "began_s": HOUR * 3600.0, "next_s": HOUR * 3600 + 1800.0, "why": "60 new tokens"}
            | {"outcome": "failed DISK_FULL", "least_tokens": 50, "counted_s": 1e11},
            "cal-1 began 10-04 00:00 UTC (60 new tokens): failed DISK_FULL; the next with 50 new tokens (0 are there), "
            "not before 10-04 00:30 UTC",
        ),
        ({"last_job": "cal-1", "began_s": "x", "why": "w"}, "cal-1 began ? UTC (w): not ended yet; the next with ?"),
    ],
)
def test_status_says_what_the_schedule_has_noted(neap, place, note, expected):
    assert "no calibration service has looked" in neap("learn", "status").stdout
    with closing(open_registry(place)) as registry:
        registry.keep_note(learning_note("tiny", "legal"), {"model_id": "tiny", **note})
    assert f"tiny, pool legal: {expected}" in neap("learn", "status").stdout


def test_the_picture_has_what_workers_have_reported_of_an_alias(neap, place, tmp_path):
    drawn = tmp_path / "new" / "speeds.svg"
    assert "NOT_FOUND" in neap("learn", "status", "--picture", drawn, "--alias", "latest@legal", code=1).output
    neap("learn", "status", "--picture", tmp_path / "speeds.txt", code=2)
    with closing(open_registry(place)) as registry:
        registry.set_canary("tiny", "latest@legal", Canary(1, 50))
        speeds = Speeds()
        for number in range(4):
            speeds.observe(1 + number % 2, NOTHING._replace(num_tokens=10, seconds=1), time.time() + 60 * number)
        speeds.keep(registry, "tiny", "latest@legal")
    result = neap("learn", "status", "--picture", drawn, "--alias", "latest@legal", "--model", "tiny")
    assert "speeds.svg" in result.stdout
    text = drawn.read_text()
    assert all(words in text for words in ("tiny, latest@legal", ">router 1<", ">router 2<", "canary: router 1"))
    assert "ALIAS_NOT_FOUND" in neap("learn", "status", "--picture", drawn, "--alias", "absent", code=1).output


def test_forget_removes_a_pool_or_what_is_before_a_time(neap, place):
    traffic = open_traffic(place)
    assert "1 objects" in neap("learn", "forget", "--pool", "legal", "--before", "2024-10-04T03:00+02:00").stdout
    assert len(traffic.read("tiny", "legal").answers) == 2
    assert "0 objects" in neap("learn", "forget", "--pool", "legal", "--model", "other").stdout
    assert "2 objects" in neap("learn", "forget", "--pool", "legal").stdout
    assert traffic.read("tiny", "legal").answers == ()
    assert len(traffic.read("tiny", "default").answers) == 3
    assert "legal" not in neap("learn", "status").stdout
    assert "BAD_TIME" in neap("learn", "forget", "--pool", "default", "--before", "yesterday", code=1).stderr
    assert "BAD_POOL" in neap("learn", "forget", "--pool", "../x", code=1).stderr
    neap("learn", "forget", code=2)
    assert len(traffic.read("tiny", "default").answers) == 3


def test_nothing_kept_is_said_and_no_registry_made(neap, tmp_path, monkeypatch):
    monkeypatch.delenv("NEAP_REGISTRY", raising=False)
    result = neap("learn", "status", "--data-dir", tmp_path / "data", code=1)
    assert "REGISTRY_NOT_FOUND" in result.output
    assert not (tmp_path / "data").exists()
    with closing(open_registry(str(tmp_path / "data" / "registry"))):
        pass
    assert "--learn" in neap("learn", "status", "--data-dir", tmp_path / "data").stdout
