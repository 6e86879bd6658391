"""`python3 requirements.py pyproject.toml EXTRA..`: prints what an installation needs, a line each, without the package itself.

The Dockerfile installs it before it copies the source, so that a change of the source does not install everything again.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The dependencies, those of the extras, and those of the build."""
    table = tomllib.loads(pyproject)
    project = table["project"]
    listed = [*project["dependencies"], *table["build-system"]["requires"]]
    for extra in extras:
        listed += project["optional-dependencies"][extra]
    return listed


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(), sys.argv[2:])))
