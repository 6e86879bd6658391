"""The afternoon path of docs/architecture.md can be read in an afternoon."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 1500


def test_the_afternoon_path_is_short() -> None:
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition("\n## Afternoon path\n")
    section, _, _ = rest.partition("\n## ")
    files = re.findall(r"^\| `([^`]+\.(?:py|cpp|h))`", section, re.MULTILINE)
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in files}
    assert len(lines) >= 5
    assert {"shared/engine/scheduler.py", "shared/engine/step.py", "shared/engine/verification.py"} <= lines.keys()
    assert sum(lines.values()) < MAX_LINES, lines
