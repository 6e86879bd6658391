"""docs/reference.md is what the protos and the source say."""

import ast
from pathlib import Path

import pytest

from docs.generators import reasons
from docs.generators.reference import reference_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated_from_the_protos_and_the_source():
    assert (ROOT / "docs/reference.md").read_text() == reference_page(), (
        "run: python -m docs.generators.reference > docs/reference.md"
    )


def collected(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, reasons.Reason]:
    """The reasons of a program."""
    monkeypatch.setattr(reasons, "sources", lambda: [("m.py", ast.parse(source))])
    return reasons.collect_reasons()


def test_reasons_are_followed_to_where_they_are_written(monkeypatch):
    found = collected(
        """
GONE = "WORKER_GONE"
def check(value, *, reason="BAD_VALUE"):
    raise InvalidInput(f"{value} is bad", reason=reason)
def refuse(why, reason):
    return Exhausted(why, reason=reason)
def run(error):
    check(1)
    check(2, reason="BAD_NUMBER")
    refuse("no room", "QUEUE_FULL" if error else "DISK_FULL")
    raise Unavailable("gone", reason=GONE)
    raise NotFound("nothing")
    raise Unavailable("as before", reason=error.reason)
""",
        monkeypatch,
    )
    assert {name: (reason.codes, reason.messages) for name, reason in found.items()} == {
        "BAD_NUMBER": ({"INVALID_ARGUMENT"}, {"… is bad"}),
        "BAD_VALUE": ({"INVALID_ARGUMENT"}, {"… is bad"}),
        "DISK_FULL": ({"RESOURCE_EXHAUSTED"}, {"no room"}),
        "NOT_FOUND": ({"NOT_FOUND"}, {"nothing"}),
        "QUEUE_FULL": ({"RESOURCE_EXHAUSTED"}, {"no room"}),
        "WORKER_GONE": ({"UNAVAILABLE"}, {"gone"}),
    }


@pytest.mark.parametrize("reason", ["REASONS[name]", "unknown", "make()"])
def test_a_reason_that_cannot_be_followed_is_an_error(reason, monkeypatch):
    with pytest.raises(ValueError, match=r"m\.py:1: "):
        collected(f"raise InvalidInput('no', reason={reason})", monkeypatch)
