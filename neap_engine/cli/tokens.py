"""`neap tokens`: creates bearer tokens for callers and lists the token file of the services."""

from pathlib import Path
from typing import Annotated

import typer
from neap_client.channel import read_capped
from rich.table import Table

from neap_engine.cli.console import err, exit_on_error, fail, out
from shared.pool_names import DEFAULT_POOL
from shared.rpc.callers import Role
from shared.rpc.tokens import new_token, parse_tokens

app = typer.Typer(help="Bearer tokens for callers of the services.", no_args_is_help=True)


@app.command("create")
@exit_on_error
def create(
    name: Annotated[str, typer.Argument(help="Name of the caller, shown in logs and histories.")],
    role: Annotated[list[Role], typer.Option("--role", help="Role of the caller. May be given several times.", min=1)],
    pool: Annotated[
        str,
        typer.Option(
            "--pool",
            help="With whom the caller shares a router, cached prefixes and what is learned; '*': each request says.",
        ),
    ] = DEFAULT_POOL,
    append: Annotated[
        Path | None, typer.Option("--append", help="Append the entry to this token file instead of printing it.")
    ] = None,
) -> None:
    """Create a token and print it, then print its entry for the services' token file. The token is not shown again."""
    token, entry = new_token(name, role, pool)
    if append is not None:
        _append(append, entry.to_line())
    err.print("the token, which is not stored anywhere:", style="dim")
    print(token, flush=True)
    if append is None:
        err.print("the entry for the services' token file (--auth-tokens):", style="dim")
        print(entry.to_line(), flush=True)


@app.command("list")
@exit_on_error
def list_tokens(file: Annotated[Path, typer.Argument(help="Token file of the services.")]) -> None:
    """Check a token file and list its callers and their roles."""
    table = Table("name", "roles", "pool", "digest")
    for entry in parse_tokens(read_capped(file), str(file)):
        roles = " ".join(role for role in Role if role in entry.caller.roles)
        table.add_row(entry.caller.name, roles, entry.caller.pool, entry.digest[:19])
    out.print(table)


def _append(path: Path, line: str) -> None:
    before = read_capped(path) if path.exists() else b""
    if before.strip():
        parse_tokens(before, str(path))
    if path.is_symlink():
        fail(f"{path} is a symbolic link; name the file itself")
    with path.open("a", encoding="utf-8") as file:
        path.chmod(path.stat().st_mode if before else 0o600)
        file.write(("\n" if before and not before.endswith(b"\n") else "") + line + "\n")
