"""`python3 requirements.py EXTRA..`, in the repository's root: prints what an installation needs, a line each, without
neap itself.

The Dockerfile installs it before it copies the source, so that a change of the source does not install everything
again.
"""

import sys
import tomllib
from pathlib import Path


def requirements(root: Path, extras: list[str]) -> list[str]:
    """The dependencies, those of the extras, and those of the build, of the services and of the client."""
    listed: list[str] = []
    for folder in (root, root / "protos"):
        table = tomllib.loads((folder / "pyproject.toml").read_text())
        listed += [*table["project"]["dependencies"], *table["build-system"]["requires"]]
        for extra in extras:
            listed += table["project"].get("optional-dependencies", {}).get(extra, [])
    return [line for line in listed if not line.startswith("neap-client")]


if __name__ == "__main__":
    print("\n".join(requirements(Path(), sys.argv[1:])))
