"""The check of lines of code against budget.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/budget.py"
PYTHON = '''"""Docstring
of two lines."""

# A comment.
import a  # counts

TEXT = """one

three"""  # the blank line does not count


class A:
    """Docstring."""

    def f(self):
        """Docstring."""
        "a string that is no docstring"
        return [
            # A comment.
            1,
        ]
'''
CPP = """// A comment.
#include "a.h"  /* counts */
/* of
two lines */
const char* url = "http://x/*";

int f() { return 1; }  // counts
"""


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    """A repository with 9 lines in `b`, 3 in `a/c` and 100 elsewhere in `a`, all within budget."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    for folder in ("a/c", "a/d", "b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "b/b.py").write_text(PYTHON)
    (tmp_path / "a/c/c.cpp").write_text(CPP)
    (tmp_path / "a/d/d.py").write_text("x = 1\n" * 100)
    (tmp_path / ".gitignore").write_text("made.py\n")
    (tmp_path / "budget.toml").write_text('# Why.\n"a" = 100\n"a/c" = 3\n"b" = 9\n')
    subprocess.run(["git", "add", "."], check=True)
    return tmp_path


def budget(*arguments: str) -> tuple[int, list[str]]:
    result = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def test_blanks_comments_and_docstrings_do_not_count():
    assert budget() == (0, ["112 lines of code"])


def test_a_planted_file_fails(tree):
    (tree / "a/c/planted.py").write_text("x = 1\n" * 50)
    assert budget() == (1, ["a/c has 53 lines of code, 50 above its budget of 3"])
    assert budget("--lower")[0] == 1


def test_a_new_folder_needs_a_number(tree):
    (tree / "new").mkdir()
    (tree / "new/planted.proto").write_text("message A {}\n")
    assert budget() == (1, ["new has 1 lines of code, 1 above its budget of 0"])


def test_a_room_far_below_its_number_fails_until_the_number_is_lowered(tree):
    for lines, code in ((98, 0), (97, 1)):
        (tree / "a/d/d.py").write_text("x = 1\n" * lines)
        assert budget()[0] == code
    assert budget()[1] == ["a has 97 lines of code, fewer than its budget of 100: lower the number"]
    assert budget("--lower") == (0, ["109 lines of code"])
    assert (tree / "budget.toml").read_text() == '# Why.\n"a" = 97\n"a/c" = 3\n"b" = 9\n'


def test_what_git_ignores_and_what_is_gone_do_not_count(tree):
    (tree / "a/made.py").write_text("x = 1\n" * 50)
    (tree / "a/c/c.cpp").unlink()
    assert budget() == (1, ["a/c has 0 lines of code, fewer than its budget of 3: lower the number"])
