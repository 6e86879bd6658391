"""Generates command-line flags from the fields of settings classes: name, description, default value, environment
variable.

pydantic-settings' own command line is not used: it adds a flag for every alias (`--NEAP-WORKER-LISTEN`), splits values
at commas (`--model my-model=/a,b`) and reads the word None as no value.
"""

import argparse
import inspect
import re
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

# Metavar by the ending of a field's name, where its `json_schema_extra` names none.
METAVARS = {"_s": "SECONDS", "_mb": "MIB", "listen": "HOST:PORT", "_share": "SHARE"}


def fields_by_group(kind: type[BaseSettings]) -> list[tuple[str, dict[str, FieldInfo]]]:
    """Group the fields of `kind` by the class that declares them: `kind` itself first, base classes later.

    Each group comes with a title, the first line of the class' docstring without the full stop.
    """
    groups = []
    for declaring in kind.__mro__:
        if not issubclass(declaring, BaseSettings) or declaring is BaseSettings:
            continue
        declared = inspect.get_annotations(declaring)
        fields = {name: field for name, field in kind.model_fields.items() if name in declared}
        title = (declaring.__doc__ or declaring.__name__).splitlines()[0].rstrip(".")
        groups.append((title, fields))
    return groups


def variables_of(kind: type[BaseSettings], name: str) -> tuple[str, ...]:
    """Return the environment variables of the field `name`. The first one that is set is used."""
    alias = kind.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (str(alias or f"{kind.model_config['env_prefix']}{name.upper()}"),)


def flag_of(kind: type[BaseSettings], name: str) -> str | None:
    """Return the flag of the field `name`. For a field with several values the flag is in the singular and can be
    repeated.

    Returns None for the variables that OpenTelemetry defines, which have no flag.
    """
    if not variables_of(kind, name)[0].startswith("NEAP_"):
        return None
    singular = re.sub("(?<=s)es$|s$", "", name) if _is_repeated(kind.model_fields[name]) else name
    return "--" + singular.replace("_", "-")


def default_text(field: FieldInfo) -> str:
    """Format the default value. "unset" stands for None, an empty text, an empty list and defaults that depend on the
    machine."""
    value = None if field.default_factory else field.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", ()):
        return "unset"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def add_flags(parser: argparse.ArgumentParser, kind: type[BaseSettings]) -> None:
    """Add a flag for each field of `kind`. In the namespace, a flag that is not given is None."""
    for title, fields in fields_by_group(kind):
        group = parser.add_argument_group(title)
        for name, field in fields.items():
            if (flag := flag_of(kind, name)) is not None:
                group.add_argument(flag, dest=name, **_argument(kind, name, field))


def _argument(kind: type[BaseSettings], name: str, field: FieldInfo) -> dict[str, Any]:
    variables = " or ".join(variables_of(kind, name))
    text = f"{field.description} [default: {default_text(field)}; {variables}]"
    argument: dict[str, Any] = {"help": text.replace("%", "%%")}
    if field.annotation is bool:
        return argument | {"action": "store_const", "const": True}
    if typing.get_origin(field.annotation) is Literal:
        return argument | {"choices": typing.get_args(field.annotation)}
    if _is_repeated(field):
        argument["action"] = "append"
    return argument | {"metavar": _metavar(name, field)}


def _is_repeated(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


def named_value(name: str, field: FieldInfo) -> str | None:
    """Return the metavar of the field, such as SECONDS, if the field or the ending of its name defines one."""
    if isinstance(field.json_schema_extra, dict) and "metavar" in field.json_schema_extra:
        return str(field.json_schema_extra["metavar"])
    return next((word for ending, word in METAVARS.items() if name.endswith(ending)), None)


def _metavar(name: str, field: FieldInfo) -> str:
    types = {field.annotation, *typing.get_args(field.annotation)}
    by_type = "N" if int in types else "FILE" if Path in types else name.rpartition("_")[2].upper()
    return named_value(name, field) or by_type
