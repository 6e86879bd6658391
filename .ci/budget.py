"""Compares lines of code with budget.toml, which has a number for each room: `python .ci/budget.py [--lower]`.

A room is a folder that budget.toml names, without the folders in it that have a number of their own. A line of code is
one of Python, C++, CUDA or a proto that is neither blank nor comment nor docstring, in a file that git does not ignore.

A room above its number fails. One that is more than 2 % below its number fails too: a warning of a check that passes is
read by nobody, and code that left could come back unnoticed. `--lower` sets the numbers of rooms that have become
smaller. A number is raised by hand, in the commit that needs it and says why.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

BUDGET = Path("budget.toml")
SLACK = 0.02
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_lines(text: str) -> int:
    lines = text.split("\n")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            code -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return sum(1 for number in code if lines[number - 1].strip())


def other_lines(text: str) -> int:
    bare = STRING_OR_COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else "\n" * found[0].count("\n"), text)
    return sum(1 for line in bare.split("\n") if line.strip())


COUNTERS = {".py": python_lines} | dict.fromkeys((".h", ".cpp", ".cu", ".cuh", ".proto"), other_lines)


def counted(rooms: dict[str, int]) -> Counter[str]:
    """Return the lines of each room. Code outside of all rooms counts for its top-level folder."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True)
    found = Counter(dict.fromkeys(rooms, 0))
    for path in map(Path, filter(None, {*listed.split("\0")})):
        if path.suffix in COUNTERS and path.exists():
            room = next((str(folder) for folder in path.parents if str(folder) in rooms), path.parts[0])
            found[room] += COUNTERS[path.suffix](path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    rooms: dict[str, int] = tomllib.loads(BUDGET.read_text())
    found = counted(rooms)
    if "--lower" in sys.argv[1:]:
        smaller = {room: lines for room, lines in found.items() if lines < rooms.get(room, 0)}
        rooms |= smaller
        for room, lines in smaller.items():
            BUDGET.write_text(re.sub(rf'(?m)^"{room}" = \d+', f'"{room}" = {lines}', BUDGET.read_text()))
    failures = []
    for room, lines in sorted(found.items()):
        budget = rooms.get(room, 0)
        if lines > budget:
            failures.append(f"{room} has {lines} lines of code, {lines - budget} above its budget of {budget}")
        elif lines < budget * (1 - SLACK):
            failures.append(f"{room} has {lines} lines of code, fewer than its budget of {budget}: lower the number")
    print("\n".join(failures) or f"{found.total()} lines of code")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
