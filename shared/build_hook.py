"""Compiles protos/ into Python modules beside the .proto files, and csrc/ into a library, for wheels and editable installs.

Hatchling runs `NeapBuildHook` (see pyproject.toml); `python -m shared.build_hook` and `python -m shared.ops.build` do the same by
hand. A compile error ends the installation. Protos are compiled with `-Iprotos` into protos, so that
`from neap.inference.v1 import inference_pb2_grpc` needs no rewriting: the wheel ships protos/neap as the package `neap`, and the
editable install puts protos on the path. See docs/decisions/001.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = "protos"


def generate(root: Path) -> list[Path]:
    """Compile every .proto file under `root`/protos and return their paths. Raises `RuntimeError` if there is none or one fails."""
    # Imported here because an environment that only builds the metadata has no compiler.
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
    """Build the library of csrc/ and return its path. Raises `NeapError` if that fails."""
    if str(root) not in sys.path:  # hatchling loads this file by its path
        sys.path.insert(0, str(root))
    from shared.ops import build

    print(f"csrc is built {build.described()}", file=sys.stderr)
    return build.build()


class NeapBuildHook(BuildHookInterface[Any]):
    """Runs only for wheels, which includes editable installs. The sdist ships the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        generate(root)
        library = build_ops(root).relative_to(root)
        build_data["artifacts"].append(f"/{library}")
        # The library depends on the platform but not on the Python version, because it uses only torch's stable ABI.
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parents[1]):
        print(f"compiled {source.name}")
    sys.exit(0)
