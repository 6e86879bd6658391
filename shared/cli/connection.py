"""Connects commands to services. The flags before the command's name and the variables `NEAP_CLIENT_*` and `NEAP_TOKEN` say how."""

import shlex
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from neap_client import ClientSecurity, NeapClient

from shared.cli.console import DEFAULT_CALIBRATOR, err
from shared.config import make_settings, unknown_variables
from shared.security_settings import ClientSettings
from shared.version import installed_version

# Fields of ClientSettings and their flags.
_FLAGS = {
    "tls": "--tls",
    "ca": "--tls-ca",
    "cert": "--tls-cert",
    "key": "--tls-key",
    "server_name": "--tls-server-name",
    "token_file": "--token-file",
}
# The flags given before the command's name.
_flags: ContextVar[Mapping[str, Any]] = ContextVar("neap_flags", default={})  # noqa: B039 (never changed)


def _help(name: str) -> str | None:
    return ClientSettings.model_fields[name].description


def print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"neap {installed_version() or '(not installed as a package)'}")
        raise typer.Exit


def global_options(
    context: typer.Context,
    tls: Annotated[bool, typer.Option(_FLAGS["tls"], help=_help("tls"))] = False,
    ca: Annotated[Path | None, typer.Option(_FLAGS["ca"], help=_help("ca"))] = None,
    cert: Annotated[Path | None, typer.Option(_FLAGS["cert"], help=_help("cert"))] = None,
    key: Annotated[Path | None, typer.Option(_FLAGS["key"], help=_help("key"))] = None,
    server_name: Annotated[
        str, typer.Option(_FLAGS["server_name"], help=_help("server_name"))
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(_FLAGS["token_file"], help=_help("token_file"))
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
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


def equivalent_command(*arguments: str, calibrator: str) -> str:
    """Return the command line of `neap ARGUMENTS` that connects as this command does, ready to be pasted into a shell."""
    words = ["neap"]
    for name, value in _flags.get().items():
        words += [_FLAGS[name]] if value is True else [_FLAGS[name], str(value)]
    words += arguments
    if calibrator != DEFAULT_CALIBRATOR:
        words += ["--calibrator", calibrator]
    return shlex.join(words)


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
