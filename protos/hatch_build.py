"""Generates modules of the package neap_client, for wheels and editable installs: those of neap/**/*.proto, a table of
the fields of requests with what the protos say of them, and the synchronous client from the one for asyncio.

Hatchling runs `ProtosBuildHook` (see pyproject.toml); `python protos/hatch_build.py` does the same by hand. A proto
that does not compile ends the installation. protoc maps the folder `neap` to `neap_client`, so
`neap/inference/v1/inference.proto` becomes `neap_client.inference.v1.inference_pb2`, in copies whose imports of one
another say so, and no file that it generates is rewritten. See docs/decisions/001.
"""

import re
import runpy
import tempfile
from collections.abc import Iterator
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
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "described"
        names = []
        for source in sources:
            names.append(str(Path(PACKAGE, source.relative_to(folder / "neap"))))
            copy = Path(scratch, names[-1])
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text().replace('import "neap/', f'import "{PACKAGE}/'))
        includes = [f"-I{scratch}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        outputs += ["--include_source_info", f"--descriptor_set_out={described}"]
        code = protoc.main(["protoc", *includes, *outputs, *names])
        if code != 0:
            raise RuntimeError(f"protoc ended with code {code}")
        (folder / PACKAGE / "fields.py").write_text(field_table(folder, described.read_bytes()))
    for source, made in SYNCHRONOUS.items():
        text = (folder / PACKAGE / source).read_text()
        for pattern, replacement in REPLACEMENTS:
            text = re.sub(pattern, replacement, text)
        (folder / PACKAGE / made).write_text(f"# Made by hatch_build.py from {source}.\n{text}")
    return [*sources, *(folder / PACKAGE / source for source in SYNCHRONOUS)]


# Messages of which requests consist, and whose fields are keywords of the client, flags and members of bodies.
REQUEST = ("Sampling", "Stopping", "DepthPolicy", "Exact", "Relaxed", "GenerateRequest")
# And those of a calibration, whose flags and checks are made from them, too.
TABLED = (*REQUEST, "CalibrationSpec", "ParentRouter", "SelfGenerated")
KEYWORDS = {"double": "float", "bool": "bool", "string": "str"}
TABLE = '''"""Made by hatch_build.py: what the protos say of the fields of requests, by message and name."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from neap_client.rules import Field

FIELDS: Mapping[str, Mapping[str, Field]] = {{
{fields}
}}


class DepthFields(TypedDict, total=False):
    """Keywords: None leaves a field absent."""

{depth}


class RequestFields(DepthFields, total=False):
    """Keywords: None leaves a field absent."""

{others}
'''


def field_table(folder: Path, described: bytes) -> str:
    """Return the module `neap_client.fields` from what protoc has described. It knows no protobuf."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

    # What is imported as the package may be an older one, which is installed.
    options = runpy.run_path(str(folder / PACKAGE / "options/v1/options_pb2.py"))
    fields: list[str] = []
    keywords: dict[bool, list[str]] = {True: [], False: []}

    def rows(file: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """(message, field, arguments of Field) of the fields that have plain values."""
        comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
        for number, message in enumerate(file.message_type):
            maps = {one.name: one.field[1] for one in message.nested_type if one.options.map_entry}
            for place, field in enumerate(message.field if message.name in TABLED else ()):
                value = maps.get(field.type_name.rsplit(".", 1)[-1], field)
                kind = FieldDescriptorProto.Type.Name(value.type).removeprefix("TYPE_").lower()
                rule = field.options.Extensions[options["rule"]]
                if kind in ("enum", "message") and not rule.ListFields():
                    continue
                if (message.name == "GenerateRequest" or field.HasField("oneof_index")) and not field.proto3_optional:
                    continue
                help_text = " ".join(comments[4, number, 2, place].split("\n\n")[0].split())
                arguments = {"name": field.name, "kind": kind, "help": help_text, "is_optional": field.proto3_optional}
                arguments |= {"is_map": value is not field}
                arguments |= {"is_list": value is field and field.label == FieldDescriptorProto.LABEL_REPEATED}
                arguments |= {"least": 0} if kind[0] == "u" else {}
                arguments |= {option.name: number for option, number in rule.ListFields()}
                yield message.name, field, {name: each for name, each in arguments.items() if each is not False}

    for file in FileDescriptorSet.FromString(described).file:
        of_message: dict[str, list[str]] = {}
        for message, field, arguments in rows(file):
            text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            of_message.setdefault(message, []).append(f'        "{field.name}": Field({text}),')
            kind = KEYWORDS.get(arguments["kind"], "int")
            if arguments["kind"] == "message" or message not in REQUEST:
                continue
            if arguments.get("is_map"):
                kind = f"Mapping[int, {kind}]"
            elif arguments.get("is_list"):
                kind = f"Sequence[{kind}]"
            keywords[message in ("DepthPolicy", "Exact", "Relaxed")].append(f"    {field.name}: {kind} | None")
        fields += [f'    "{message}": {{\n' + "\n".join(lines) + "\n    }," for message, lines in of_message.items()]
    return TABLE.format(fields="\n".join(fields), depth="\n".join(keywords[True]), others="\n".join(keywords[False]))


class ProtosBuildHook(BuildHookInterface[Any]):
    """Runs only for wheels, which includes editable installs. The sdist ships the protos."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    for source in generate(Path(__file__).resolve().parent):
        print(f"compiled {source.name}")
