"""Every program in bench/ says how it is called, and has the flags with which documents call it."""

import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.test_links import DOCUMENTS, FLAG, code_of

FOLDER = Path(__file__).parents[2] / "bench"
PROGRAMS = sorted(
    "bench." + ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "def main(" in path.read_text()
)
CALL = re.compile(r"python -m (bench[\w.]*\w)((?: [^ #;&|]+)*)")


@cache
def help_of(program: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(sys, "argv", [program, "--help"])
        patch.setattr(sys.stdout, "write", said.append)
        with pytest.raises(SystemExit) as ended:
            import_module(program).main()
    assert ended.value.code == 0
    return "".join(said)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_how_it_is_called(program: str) -> None:
    assert "usage: " in help_of(program)


def test_documents_call_programs_by_flags_that_they_have() -> None:
    calls = [call for document in DOCUMENTS for line in code_of(document) for call in CALL.findall(line)]
    assert len(calls) > 30
    for module, arguments in calls:
        program = f"{module}.__main__" if f"{module}.__main__" in PROGRAMS else module
        known = set(FLAG.findall(help_of(program)))
        if program == "bench.__main__":  # passes others on
            continue
        assert set(FLAG.findall(arguments)) <= known, (module, arguments)
