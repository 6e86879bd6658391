"""What the demo asks, of a scripted worker whose router comes as the story says."""

from collections import Counter
from itertools import groupby

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.inference.v1.inference_pb2 import LEARN_NEVER
from neap_client.router.v1.router_pb2 import Canary

from demo import story as module
from demo.requests import LEARNED, MEASURED, PROMPTS
from demo.story import Story, kind_table, lines_of
from neap_engine.cli.connection import connect
from neap_engine.cli.console import out
from shared.errors import Unavailable

QUESTIONS = tuple(PROMPTS.values())


class Checks:
    """A system that ends at a check."""

    def __init__(self) -> None:
        self.num_left = 10_000

    def check(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            raise Unavailable("`neap up` has ended: the worker ended with code -9", reason="SYSTEM_ENDED")


@pytest.fixture
def checks():
    return Checks()


@pytest.fixture
def story(service, checks, monkeypatch):
    """Router 1 comes after some requests, router 2 after LEARNED has been kept. Calibrations have succeeded."""
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    service.calibration.states = [{"state": pb.STATE_SUCCEEDED, "router_version": 7}]

    def answer(request):
        asked = service.inference.requests
        kept = kept_of(asked)
        is_tried = len(kept) == len(LEARNED) and len(asked) > 90
        service.inference.router_version = 2 if is_tried else len(asked) > 24
        service.routers.canary = Canary(version=2, share_per_mille=500) if is_tried and len(asked) <= 110 else None

    service.inference.on_generate = answer
    with connect(service.address) as client:
        yield Story(checks, client, client, "tiny", 12)


def kept_of(requests):
    return [each for each in requests if each.learn != LEARN_NEVER]


def text_of(request) -> str:
    return request.chat.messages[-1].content


def test_it_learns_from_requests_of_one_kind_and_measures_others(service, story, capsys):
    story.day_0()
    story.first_router(1)
    story.one_kind(1, 60.0)
    asked = service.inference.requests
    kept = kept_of(asked)
    assert [text_of(each) for each in kept] == list(LEARNED)
    assert {each.depth.WhichOneof("policy") for each in kept} == {"exact"}
    assert {each.sampling.temperature for each in asked} == {0.0}
    # Every prompt was answered under both policies, but by `exact` alone while a version was on trial.
    sides = [
        sorted(each.depth.WhichOneof("policy") for each in pair) for pair in zip(asked[1::2], asked[2::2], strict=True)
    ]
    tried = len(story.on_trial)
    assert Counter(map(tuple, sides)) == {("exact", "full"): len(story.pairs) + 1, ("exact", "exact"): tried / 2}
    assert tried > 0
    versions = [version for version, _ in groupby(pair.exact.version for pair in story.of_kind)]
    assert versions == [0, 1, 2]
    assert len(story.of_kind[-2 * len(MEASURED) :]) == sum(pair.exact.version == 2 for pair in story.of_kind) - 1
    assert all(pair.is_same for pair in story.pairs)
    said = capsys.readouterr().out
    assert "prompt-lookup (0/30) 4" in said
    assert "router 2 guessed right" in said
    assert f"after {tried} requests: better" in said
    full, *lines = lines_of(story.pairs, story.on_trial)
    assert sum(len(line.points) for line in lines) == len(full.points) + sum(each.has_speed for each in story.on_trial)


def test_a_trial_is_waited_for_so_long(service, story, capsys):
    service.routers.canary = Canary(version=2, share_per_mille=500)
    story.day_0()
    story.first_router(1)
    story.one_kind(1, 0.0)
    assert story.on_trial == []
    assert "undecided after 0 requests; the trial goes on: 1.2x as fast" in capsys.readouterr().out


def test_a_model_without_a_chat_template_is_given_plain_text(service, story, capsys):
    service.inference.has_chat_template = False
    story.day_0()
    assert [each.text for each in service.inference.requests[-8::2]] == list(QUESTIONS)
    assert "plain text" in capsys.readouterr().out


def test_a_calibration_that_failed_ends_it_and_says_why(service, story):
    failure = pb.Failure(reason="DISK_FULL", message="the disk is full")
    service.calibration.states = [{"state": pb.STATE_FAILED, "failure": failure}]
    with pytest.raises(Unavailable, match=r"no router was learned: the disk is full \[DISK_FULL\]") as caught:
        story.first_router(1)
    assert caught.value.reason == "CALIBRATION_FAILED"


def test_a_router_that_does_not_come_ends_it(story, monkeypatch):
    monkeypatch.setattr(module, "LATE_S", -1.0)
    with pytest.raises(Unavailable, match="no router came within 0 s"):
        story.first_router(1)


def test_a_system_that_has_ended_ends_it(story, checks):
    checks.num_left = 3
    with pytest.raises(Unavailable, match="code -9"):
        story.first_router(1)


def test_the_table_tells_routers_apart(pairs, capsys, wide):
    out.print(kind_table(pairs))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row and "router" in row[0]]
    assert rows == [
        ["no router", "2", "10", "15", "1.50x", "2.00"],
        ["router 2", "1", "10", "30", "3.00x", "2.00"],
    ]
