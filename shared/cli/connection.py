"""Connects commands to services. The flags before the command's name and the variables `NEAP_CLIENT_*` and `NEAP_TOKEN` say how."""

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from neap_client import ClientSecurity, NeapClient

from shared.cli.console import err
from shared.config import make_settings, unknown_variables
from shared.security_settings import ClientSettings

# The flags given before the command's name.
_flags: ContextVar[Mapping[str, Any]] = ContextVar("neap_flags", default={})  # noqa: B039 (never changed)


def _help(name: str) -> str | None:
    return ClientSettings.model_fields[name].description


def global_options(
    context: typer.Context,
    tls: Annotated[bool, typer.Option("--tls", help=_help("tls"))] = False,
    ca: Annotated[Path | None, typer.Option("--tls-ca", help=_help("ca"))] = None,
    cert: Annotated[Path | None, typer.Option("--tls-cert", help=_help("cert"))] = None,
    key: Annotated[Path | None, typer.Option("--tls-key", help=_help("key"))] = None,
    server_name: Annotated[str, typer.Option("--tls-server-name", help=_help("server_name"))] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help=_help("token_file"))
    ] = None,
) -> None:
    """Serve frozen causal language models with early exits that really skip layers."""
    for problem in unknown_variables():
        err.print(f"warning: {problem}", markup=False, style="yellow")
    flags = {
        "tls": tls or None,
        "ca": ca,
        "cert": cert,
        "key": key,
        "server_name": server_name or None,
        "token_file": token_file,
    }
    token = _flags.set({name: value for name, value in flags.items() if value is not None})
    context.call_on_close(lambda: _flags.reset(token))


def connect(target: str, **options: Any) -> NeapClient:
    """Return a client of `target`. `options` are those of NeapClient. Raises InvalidInput for settings that cannot work."""
    return NeapClient(target, security=client_security(), **options)


def client_security() -> ClientSecurity:
    """Return the security settings from flags and variables. Raises InvalidInput (BAD_CONFIGURATION)."""
    settings = make_settings(ClientSettings, **_flags.get())
    return ClientSecurity(
        tls=settings.tls,
        ca=settings.ca,
        certificate=settings.cert,
        key=settings.key,
        server_name=settings.server_name,
        token=settings.token.get_secret_value().strip(),
        token_file=settings.token_file,
        allow_plaintext_token=settings.allow_plaintext_tokens,
    )
