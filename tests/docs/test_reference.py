"""docs/reference.md is what the protos and the source say."""

import ast
from pathlib import Path

import pytest

from neap_engine.reference import reasons
from neap_engine.reference.__main__ import reference_page
from neap_engine.reference.source import Place

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated_from_the_protos_and_the_source():
    assert (ROOT / "docs/reference.md").read_text() == reference_page(), (
        "run: python -m neap_engine.reference > docs/reference.md"
    )


def collected(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, reasons.Reason]:
    """The reasons of a program."""
    tree = ast.parse(source)
    places = []

    def visit(node: ast.AST, functions: tuple[ast.FunctionDef, ...]) -> None:
        functions = (*functions, node) if isinstance(node, ast.FunctionDef) else functions
        if isinstance(node, ast.Call):
            places.append(Place("m.py", tree, node, functions))
        for child in ast.iter_child_nodes(node):
            visit(child, functions)

    visit(tree, ())
    monkeypatch.setattr(reasons, "calls", lambda: places)
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
