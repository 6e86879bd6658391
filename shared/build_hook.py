"""Compiles protos/ into Python beside the .proto files, for wheel and editable install alike.

Hatchling runs `ProtoBuildHook` (see pyproject.toml); `python -m shared.build_hook` does the same by hand. Compiled with
`-Iprotos` into protos, so `from neap.inference.v1 import inference_pb2_grpc` needs no rewriting: the wheel ships
protos/neap as the package `neap`, the editable install puts protos on the path. See docs/decisions/001.
"""

import sys
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


class ProtoBuildHook(BuildHookInterface[Any]):
    """Runs for the wheel target only (an editable install is one); the sdist ships the .proto files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parents[1]):
        print(f"compiled {source.name}")
    sys.exit(0)
