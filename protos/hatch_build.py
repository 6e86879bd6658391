"""Compiles neap/**/*.proto into Python modules of the package neap_client, for wheels and editable installs.

Hatchling runs `ProtosBuildHook` (see pyproject.toml); `python protos/hatch_build.py` does the same by hand. A proto
that does not compile ends the installation. protoc maps the folder `neap` to `neap_client`, so
`neap/inference/v1/inference.proto` becomes `neap_client.inference.v1.inference_pb2`, and no generated file is
rewritten. See docs/decisions/020.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "neap_client"


def generate(folder: Path) -> list[Path]:
    """Compile every .proto file under `folder`/neap and return their paths.
    Raises `RuntimeError` if there is none or one fails."""
    # Imported here because an environment that only builds the metadata has no compiler.
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted((folder / "neap").rglob("*.proto"))
    if not sources:
        raise RuntimeError(f"no .proto file under {folder / 'neap'}")
    names = [str(Path(PACKAGE, source.relative_to(folder / "neap"))) for source in sources]
    includes = [f"-I{PACKAGE}={folder / 'neap'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", *includes, *outputs, *names])
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code}")
    return sources


class ProtosBuildHook(BuildHookInterface[Any]):
    """Runs only for wheels, which includes editable installs. The sdist ships the protos."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parent):
        print(f"compiled {source.name}")
