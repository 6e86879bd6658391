"""Describes services, messages and enums from the protos and their comments."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc
from neap_client.fields import FIELDS

from docs.generators.reasons import ROOT
from shared.rpc.access import METHOD_ROLES

# Numbers of fields in FileDescriptorProto, DescriptorProto, EnumDescriptorProto and ServiceDescriptorProto, of which
# paths consist.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _VALUES, _METHODS = 2, 2, 2

_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def proto_files() -> list[FileDescriptorProto]:
    """Compile the protos and return them with their comments."""
    folder = ROOT / "protos"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    includes = [f"-I{folder}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "protos"
        command = ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={output}"]
        code = protoc.main([*command, *names])
        if code != 0:
            raise RuntimeError(f"protoc ended with code {code}")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def file_section(file: FileDescriptorProto) -> str:
    """Return one proto in Markdown."""
    return "\n".join([f"## {file.package}\n", *_File(file).parts()])


def _paragraph(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


class _File:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split()).replace("|", "\\|")
            for location in file.source_code_info.location
        }

    def parts(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICES, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGES, index))
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUMS, index))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {service.name}\n\n{_paragraph(self._comments[path])}\n"
        yield "| RPC | request | response | roles | what it does |\n|---|---|---|---|---|"
        for index, method in enumerate(service.method):
            full = f"/{self._file.package}.{service.name}/{method.name}"
            roles = ", ".join(sorted(METHOD_ROLES[full]))
            response = self._link(method.output_type)
            if method.server_streaming:
                response = f"stream of {response}"
            comment = self._comments[*path, _METHODS, index]
            yield f"| `{method.name}` | {self._link(method.input_type)} | {response} | {roles} | {comment} |"
        yield ""

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {message.name}\n\n{_paragraph(self._comments[path])}\n"
        if not message.field:
            return
        yield "| field | number | type | meaning |\n|---|---|---|---|"
        for index, field in enumerate(message.field):
            meaning = self._comments[*path, _FIELDS, index]
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneof = message.oneof_decl[field.oneof_index].name
                meaning = f"One of `{oneof}`. {meaning}"
            if (rule := FIELDS.get(message.name, {}).get(field.name)) is not None:
                meaning = meaning.replace(rule.help, rule.described)
            yield f"| `{field.name}` | {field.number} | {self._type(field, message)} | {meaning} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {enum.name}\n\n{_paragraph(self._comments[path])}\n"
        yield "| value | number | meaning |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            comment = self._comments[*path, _VALUES, index]
            yield f"| `{value.name}` | {value.number} | {comment} |"
        yield ""

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        name = self._link(field.type_name) if field.type_name else _SCALARS[field.type]
        entry = next((n for n in message.nested_type if field.type_name.endswith(f".{n.name}")), None)
        if entry is not None and entry.options.map_entry:
            return f"map of {' to '.join(self._type(part, entry) for part in entry.field)}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if field.proto3_optional else name

    def _link(self, name: str) -> str:
        """Return a link to a message or enum of this file; the protos of neap refer to no other file of theirs."""
        package = f".{self._file.package}."
        if not name.startswith(package):
            return f"`{name.removeprefix('.')}`"
        short = name.removeprefix(package)
        return f"[{short}](#{short.lower()})"
