"""Compiles protos/ into Python beside the .proto files and csrc/ into a library, for wheel and editable install alike.

Hatchling runs `NeapBuildHook` (see pyproject.toml); `python -m shared.build_hook` and `python -m shared.ops.build` do the same by
hand. What does not compile ends the installation. Protos are compiled with
`-Iprotos` into protos, so `from neap.inference.v1 import inference_pb2_grpc` needs no rewriting: the wheel ships
protos/neap as the package `neap`, the editable install puts protos on the path. See docs/decisions/001.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = "protos"


def generate(root: Path) -> list[Path]:
    """Compiles every .proto under `root`/protos and returns them. Raises `RuntimeError` if there is none or one fails."""
    # Imported here: an environment that only wants the metadata has no compiler.
    import grpc_tools
    from grpc_tools import protoc

    folder = root / PROTOS
    sources = sorted(folder.rglob("*.proto"))
    if not sources:
        raise RuntimeError(f"no .proto file under {folder}")
    includes = [f"-I{folder}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", *includes, *outputs, *map(str, sources)])
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code}")
    return sources


def build_ops(root: Path) -> Path:
    """Builds the library of csrc/ and returns its path. Raises `NeapError` if that fails."""
    if str(root) not in sys.path:  # hatchling loads this file by its path
        sys.path.insert(0, str(root))
    from shared.ops import build

    print(f"csrc is built {build.described()}", file=sys.stderr)
    return build.build()


class NeapBuildHook(BuildHookInterface[Any]):
    """Runs for the wheel target only (an editable install is one); the sdist ships the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        generate(root)
        library = build_ops(root).relative_to(root)
        build_data["artifacts"].append(f"/{library}")
        # Of one platform, but of no Python: the library knows torch's stable interface alone.
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parents[1]):
        print(f"compiled {source.name}")
    sys.exit(0)
