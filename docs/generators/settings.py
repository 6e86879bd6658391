"""Prints docs/settings.md, which `make docs` writes."""

import sys
import typing
from pathlib import Path
from typing import Literal

import annotated_types
import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from neap_engine.cli.connection import global_options
from shared.calibrator_settings import CalibratorSettings
from shared.config import default_text, fields_by_group, flag_of, named_value, variables_of
from shared.gateway_settings import GatewaySettings
from shared.security_settings import ClientSettings
from shared.worker_settings import WorkerSettings

PREFACE = """# Settings

This page is made from the code by `make docs`.

`neap serve worker` (or `python -m inference_service`), `neap serve calibrator` (or `python -m calibrator_service`) and
`neap serve gateway` (or `python -m neap_engine.gateway`) read each setting from its flag, else from its environment
variable, else they use the default. `--help` shows the same texts. A flag with several values is repeated; its variable
takes them as a comma-separated list. A value that is out of range ends the service with exit status 2.
"""

# The word for values of a field, by its type.
WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", SecretStr: "text", Path: "path"}
LIMITS = (
    (annotated_types.Ge, "ge", "at least"),
    (annotated_types.Gt, "gt", "above"),
    (annotated_types.Le, "le", "at most"),
    (annotated_types.Lt, "lt", "below"),
)


def settings_page() -> str:
    """Return the page in Markdown. It does not depend on the machine or the environment."""
    parts = [PREFACE]
    seen: set[str] = set()
    for kind in (WorkerSettings, CalibratorSettings, GatewaySettings, ClientSettings):
        for title, fields in fields_by_group(kind):
            if not fields:
                continue
            if title not in seen:
                seen.add(title)
                parts.append(_section(kind, title, fields))
            elif kind is GatewaySettings:
                # The same fields, but with variables of the gateway's own.
                parts.append(_section(kind, f"{title}: as variables of the gateway", fields))
    return "\n".join(parts)


def _section(kind: type[BaseSettings], title: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"## {title}\n", "| flag | variable | values | default | meaning |", "|---|---|---|---|---|"]
    for name, field in fields.items():
        flag = client_flag(name) if kind is ClientSettings else flag_of(kind, name)
        cells = (
            f"`{flag}`" if flag else "",
            " or ".join(f"`{variable}`" for variable in variables_of(kind, name)),
            _values(name, field),
            default_text(field),
            field.description or "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def client_flag(name: str) -> str | None:
    """Return the flag of `neap` for a field of ClientSettings. None if there is only a variable, as for the token."""
    app = typer.Typer()
    app.callback()(global_options)
    flags = {option.name: option.opts[0] for option in typer.main.get_command(app).params}
    return flags.get(name)


def _values(name: str, field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is Literal:
        return ", ".join(typing.get_args(field.annotation))
    types = (field.annotation, *typing.get_args(field.annotation))
    word = next((word for kind, word in WORDS.items() if kind in types), "")
    if int in types or float in types:
        limits = [
            f"{words} {getattr(limit, attribute):.15g}"
            for limit in field.metadata
            for kind, attribute, words in LIMITS
            if isinstance(limit, kind)
        ]
        return ", ".join([word, *limits])
    return named_value(name, field) or word


if __name__ == "__main__":
    sys.stdout.write(settings_page())
