"""Where settings of the services and of the gateway come from. Only this module reads the environment for them.

Every field has a variable `NEAP_<NAME>`. The listen addresses are `NEAP_WORKER_LISTEN` and `NEAP_CALIBRATOR_LISTEN`
(and `NEAP_WORKER_HEALTH_LISTEN`, `NEAP_CALIBRATOR_HEALTH_LISTEN`, `NEAP_CALIBRATOR_METRICS_LISTEN`), so that both
services can run from one environment. Variables of the gateway's own settings begin with `NEAP_GATEWAY_`. Lists are
comma-separated in variables; their flags are repeated. Flags win over variables, variables over defaults. A service
does not start if a variable NEAP_.. is set that nothing reads, because a misspelt name would leave a setting at its
default.

`description` of a field is its help text and its entry in the page of settings (`make docs`): it gives the unit and the
meaning of the default. Flags are generated from the fields, too. pydantic-settings' own command line is not used: it
adds a flag for every alias (`--NEAP-WORKER-LISTEN`), splits values at commas (`--model my-model=/a,b`) and reads the
word None as no value.

Whether traces are exported is decided here, from OpenTelemetry's own variables.
The SDK reads its other variables itself.
"""

import argparse
import difflib
import inspect
import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from shared.calibrator_settings import CalibratorSettings
from shared.errors import InvalidInput
from shared.gateway_settings import GatewaySettings
from shared.process_settings import ProcessSettings
from shared.security_settings import ClientSettings
from shared.worker_settings import WorkerSettings

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


PREFIX = "NEAP_"
# Variables that the command line, the build and the tests read.
_OTHER_VARIABLES = frozenset({"NEAP_TRACEBACK", "NEAP_BUILD_CUDA", "NEAP_FUZZ_S", "NEAP_FUZZ_SEED"})
# Kubernetes sets these in every pod for each Service whose name begins with "neap-" (NEAP_WORKER_SERVICE_HOST,
# NEAP_WORKER_PORT, ..).
_SERVICE_LINK = re.compile(
    r"NEAP_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

B = TypeVar("B", bound=BaseSettings)
S = TypeVar("S", bound=ProcessSettings)


def settings_from_command_line(kind: type[S], program: str, argv: Sequence[str] | None = None) -> S:
    """Build settings from flags, then environment variables, then defaults.
    Exits with a usage text for flags that do not parse.

    Raises InvalidInput (reason BAD_CONFIGURATION) for values that are out of range, and for a variable NEAP_.. that
    nothing reads.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    add_flags(parser, kind)
    flags = vars(parser.parse_args(argv))
    if problems := unknown_variables():
        raise InvalidInput("; ".join(problems), reason="BAD_CONFIGURATION")
    return make_settings(kind, **flags)


def known_variables() -> frozenset[str]:
    """Every variable NEAP_.. that a service, a client, the build or a test reads."""
    names = set(_OTHER_VARIABLES)
    for kind in (WorkerSettings, CalibratorSettings, GatewaySettings, ClientSettings):
        for name, field in kind.model_fields.items():
            alias: Any = field.validation_alias or kind.model_config["env_prefix"] + name
            names |= {str(choice) for choice in getattr(alias, "choices", [alias])}
    return frozenset(name.upper() for name in names if name.upper().startswith(PREFIX))


def unknown_variables() -> list[str]:
    """Return a sentence for each variable NEAP_.. that nothing reads, with the most similar known name.
    Values are never shown."""
    known = known_variables()
    problems = []
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known or _SERVICE_LINK.fullmatch(upper):
            continue
        ends = sorted(other.removeprefix(PREFIX) for other in known)
        near = difflib.get_close_matches(upper.removeprefix(PREFIX), ends, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        problems.append(f"the variable {name} is not known{hint}")
    return problems


def make_settings(kind: type[B], **values: Any) -> B:
    """Build `kind` from keyword values that are not None, then environment variables, then defaults.
    Raises InvalidInput (reason BAD_CONFIGURATION)."""
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}" for problem in error.errors()
        )
        raise InvalidInput(problems, reason="BAD_CONFIGURATION") from error
