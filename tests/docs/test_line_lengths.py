"""Text has at most 120 columns. ruff and clang-format see to Python and C++; this sees to the rest."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 120
FENCE = re.compile(r"^\s*```")
# Tables and pictures cannot be broken.
UNBREAKABLE = re.compile(r"\s*(\||!\[)")
# What the examples' tools leave.
INSTALLED = {"node_modules"}
DOCUMENTS = ("*.md", "docs/**/*.md", "bench/*.md", "protos/*.md")
# Files of which the comments are read.
SOURCES = ("Makefile", "*.toml", "*.yaml", ".ci/*", "k8s/Dockerfile", "k8s/**/*.yaml", "protos/neap/**/*.proto")


def found(patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file() and not INSTALLED & {*path.parts}
    )


def too_long(lines: list[tuple[int, str]]) -> list[int]:
    return [number for number, line in lines if len(line) > MAX_COLUMNS]


def prose(text: str) -> list[tuple[int, str]]:
    """The numbered lines outside of code, tables and pictures."""
    lines, is_code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code and not UNBREAKABLE.match(line):
            lines.append((number, line))
    return lines


@pytest.mark.parametrize("path", found(DOCUMENTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(path: Path) -> None:
    assert not too_long(prose(path.read_text()))


@pytest.mark.parametrize("path", found(SOURCES), ids=lambda path: str(path.relative_to(ROOT)))
def test_comments(path: Path) -> None:
    comments = [
        (n, line) for n, line in enumerate(path.read_text().splitlines(), start=1) if line.lstrip()[:1] in ("#", "/")
    ]
    assert not too_long(comments)


def test_a_long_line_is_found_where_it_is_prose() -> None:
    long = "word " * 30
    text = f"{long}\n| {long} |\n```\n{long}\n```\n![{long}](x.png)\n{long}"
    assert too_long(prose(text)) == [1, 7]
