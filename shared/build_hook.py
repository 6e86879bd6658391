"""Compiles csrc/ into a library, for wheels and editable installs.

Hatchling runs `NeapBuildHook` (see pyproject.toml); `python -m shared.ops.build` does the same by hand. A compile error
ends the installation. The protos are compiled by the client's distribution: see protos/hatch_build.py.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def build_ops(root: Path) -> Path:
    """Build the library of csrc/ and return its path. Raises `NeapError` if that fails."""
    for folder in (root, root / "protos"):  # hatchling loads this file by its path
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from shared.ops import build

    print(f"csrc is built {build.described()}", file=sys.stderr)
    return build.build()


class NeapBuildHook(BuildHookInterface[Any]):
    """Runs only for wheels, which includes editable installs. The sdist ships the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        library = build_ops(root).relative_to(root)
        build_data["artifacts"].append(f"/{library}")
        # The library depends on the platform but not on the Python version, because it uses only torch's stable ABI.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
