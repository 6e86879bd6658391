"""Generates modules of the package neap_client, for wheels and editable installs: those of neap/**/*.proto, and the
synchronous client from the one for asyncio.

Hatchling runs `ProtosBuildHook` (see pyproject.toml); `python protos/hatch_build.py` does the same by hand. A proto
that does not compile ends the installation. protoc maps the folder `neap` to `neap_client`, so
`neap/inference/v1/inference.proto` becomes `neap_client.inference.v1.inference_pb2`, and no file that it generates is
rewritten. See docs/decisions/001.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "neap_client"
SYNCHRONOUS = {"aio.py": "client.py", "aio_generation.py": "sync_generation.py"}
# Patterns and what takes their place, from asynchronous to synchronous code.
REPLACEMENTS = (
    (r"\b(async|await) ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\bStopAsync", "Stop"),
    (r"__a(enter|exit|next)__", r"__\1__"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bneap_client\.aio_", "neap_client.sync_"),
)


def generate(folder: Path) -> list[Path]:
    """Compile every .proto file under `folder`/neap, and return the paths of what was compiled or rewritten.
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
    for source, made in SYNCHRONOUS.items():
        text = (folder / PACKAGE / source).read_text()
        for pattern, replacement in REPLACEMENTS:
            text = re.sub(pattern, replacement, text)
        (folder / PACKAGE / made).write_text(f"# Made by hatch_build.py from {source}.\n{text}")
    return [*sources, *(folder / PACKAGE / source for source in SYNCHRONOUS)]


class ProtosBuildHook(BuildHookInterface[Any]):
    """Runs only for wheels, which includes editable installs. The sdist ships the protos."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parent):
        print(f"compiled {source.name}")
