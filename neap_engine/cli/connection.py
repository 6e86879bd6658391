"""Connects commands to services. The flags before the command's name and the variables `NEAP_CLIENT_*` and `NEAP_TOKEN`
say how."""

import inspect
import math
import shlex
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from neap_client import Answer, ClientSecurity, GenerationStream, NeapClient
from neap_client.addresses import is_loopback_target
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from neap_engine.cli.console import DEFAULT_CALIBRATOR, err, exit_on_error, with_flags
from neap_engine.cli.interruption import interruptible_call
from neap_engine.version import installed_version
from shared.config import make_settings, unknown_variables
from shared.errors import NeapError, Unavailable
from shared.security_settings import ClientSettings
from shared.termination import unwinding_on_sigterm

# Fields of ClientSettings and their flags.
_FLAGS = {
    "tls": "--tls",
    "ca": "--tls-ca",
    "cert": "--tls-cert",
    "key": "--tls-key",
    "server_name": "--tls-server-name",
    "token_file": "--token-file",
}
# How long a process on this machine may take until it answers. A worker imports torch first.
START_S = 60.0
# The system's words in gRPC's text, for TCP and for a Unix socket.
NOBODY_LISTENS = ("Connection refused", "No such file or directory")
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.2
# Each look is a line in the log of a service that loads.
POLL_GROWTH, MAX_POLL_S = 1.3, 5.0
T = TypeVar("T")
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        min=0,
        metavar="SECONDS",
        help="How long to wait for a service that is starting; 0 does not wait. Default: on this machine, "
        f"{START_S:.0f} until it answers, then as long as it loads its models; 0 for other machines.",
    ),
]
# The flag --wait of the command. 0 outside of commands that have it.
_wait_s: ContextVar[float | None] = ContextVar("neap_wait_s", default=0.0)
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
    server_name: Annotated[str, typer.Option(_FLAGS["server_name"], help=_help("server_name"))] = "",
    token_file: Annotated[Path | None, typer.Option(_FLAGS["token_file"], help=_help("token_file"))] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
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
    context.with_resource(unwinding_on_sigterm())


def calls_service(command: Callable[..., T]) -> Callable[..., T]:
    """Wrap a command that calls a service: it fails as `exit_on_error` says, and its flag --wait applies to
    `connect`."""

    def run(*args: Any, wait: float | None = None, **kwargs: Any) -> T:
        token = _wait_s.set(wait)
        try:
            return command(*args, **kwargs)
        finally:
            _wait_s.reset(token)

    flag = inspect.Parameter("wait", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Wait)
    return exit_on_error(with_flags(run, command, [flag]))


class InterruptibleClient(NeapClient):
    """Begins every call in another thread (see `interruption`). What reads a stream is `interruptible` itself."""

    def _call(self, *args: Any, **options: Any) -> Any:
        return interruptible_call(lambda: super(InterruptibleClient, self)._call(*args, **options))

    def generate(self, *args: Any, **options: Any) -> GenerationStream:
        return interruptible_call(lambda: super(InterruptibleClient, self).generate(*args, **options))

    def answer(self, *args: Any, **options: Any) -> Answer:
        return interruptible_call(lambda: super(InterruptibleClient, self).answer(*args, **options))


def connect(target: str, **options: Any) -> NeapClient:
    """Return a client of `target`, once it serves or the time for that is over. `options` are those of NeapClient.

    Raises InvalidInput for settings that cannot work.
    """
    client = InterruptibleClient(target, security=client_security(), **options)
    try:
        _wait_until_serving(client, _wait_s.get())
    except BaseException:
        client.close()
        raise
    return client


def _wait_until_serving(client: NeapClient, wait_s: float | None) -> None:
    """Wait, and say so, while nothing answers or the health is NOT_SERVING. `wait_s`: the flag --wait.

    Returns without an error when the time is over, because the command's own call says best what is wrong.
    """
    if wait_s is None and not is_loopback_target(client.target):
        return
    began_s = time.monotonic()
    limits_s = (START_S, math.inf) if wait_s is None else (wait_s, wait_s)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    last_state, has_answered, pause_s = "", False, POLL_S
    progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = progress.add_task("")
    try:
        while True:
            try:
                if client.is_serving(timeout_s=HEALTH_TIMEOUT_S):
                    return
                has_answered = True
                state, limit_s = _loading(client), limits_s[1]
            except Unavailable as error:
                # By default only where nobody listens. A peer that speaks something else would not change.
                if wait_s is None and not any(text in error.message for text in NOBODY_LISTENS):
                    return
                if has_answered:  # it could not start, and its own output says why
                    return
                state, limit_s = "nobody answers yet", limits_s[0]
            except NeapError:  # it answers
                return
            if time.monotonic() - began_s >= limit_s:
                return
            if state != last_state:
                last_state = state
                say(f"waiting for {client.target}: {state} (--wait 0 does not wait)")
                progress.update(task, description=state)
                progress.start()
            time.sleep(pause_s)
            pause_s = min(POLL_GROWTH * pause_s, MAX_POLL_S)
    finally:
        progress.stop()


def _loading(client: NeapClient) -> str:
    """Return what a service that is not ready does. A worker says which of its models it loads."""
    try:
        client.list_models()
    except NeapError as error:
        if error.reason == "NOT_READY":
            return error.message
    return "the service is not ready yet"


def say(line: str) -> None:
    err.print(line, markup=False, style="dim")


def equivalent_command(*arguments: str, calibrator: str) -> str:
    """Return the command line of `neap ARGUMENTS` that connects as this command does, ready to be pasted into a
    shell."""
    words = ["neap"]
    for name, value in _flags.get().items():
        words += [_FLAGS[name]] if value is True else [_FLAGS[name], str(value)]
    words += arguments
    if calibrator != DEFAULT_CALIBRATOR:
        words += ["--calibrator", calibrator]
    return shlex.join(words)


def client_security() -> ClientSecurity:
    """Return the security settings from flags and variables. Raises InvalidInput (BAD_CONFIGURATION)."""
    return make_settings(ClientSettings, **_flags.get()).client_security()
