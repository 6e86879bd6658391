"""`neap learn`: shows and removes what is kept of served answers. It opens the registry directly."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from neap_engine.cli.console import DataDir, RegistryUrl, exit_on_error, out, print_line
from neap_engine.cli.registry_commands import registry_there
from shared.errors import InvalidInput
from shared.pool_names import check_pool
from shared.registry.names import alias_in_pool

if TYPE_CHECKING:
    from shared.traffic.traffic import Batch

app = typer.Typer(help="What is kept of served answers, for routers to learn from.", no_args_is_help=True)


@app.command("status")
@exit_on_error
def status(registry: RegistryUrl = None, data_dir: DataDir = None) -> None:
    """Show what is kept of each model and pool, and the version that its callers get."""
    from contextlib import closing

    from shared.registry.factory import open_registry
    from shared.traffic.traffic import open_traffic

    name = registry_there(registry, data_dir)
    traffic = open_traffic(name)
    table = Table("model", "pool", "tokens", "objects", "from (UTC)", "to", "router")
    with closing(open_registry(name)) as opened:
        for model in traffic.models():
            aliases = opened.aliases(model)
            for pool in traffic.pools(model):
                if batches := traffic.batches(model, pool):
                    own = aliases.get(alias_in_pool("latest", pool) or "latest")
                    table.add_row(model, pool, *_figures(batches), str(own or "the model's"))
    if table.row_count:
        out.print(table)
    else:
        print_line("nothing is kept: workers keep answers with --learn POOL=SHARE")


def _figures(batches: "list[Batch]") -> tuple[str, ...]:
    hours = (_hour(batches[0].hour), _hour(batches[-1].hour))
    return (str(sum(batch.num_tokens for batch in batches)), str(len(batches)), *hours)


def _hour(hour: int) -> str:
    try:
        return datetime.fromtimestamp(hour * 3600, UTC).strftime("%m-%d %H:00")
    except (OverflowError, ValueError, OSError):  # a name is not to be believed
        return "?"


@app.command("forget")
@exit_on_error
def forget(
    pool: Annotated[str, typer.Option("--pool", help="Pool whose answers are removed.")],
    model: Annotated[str, typer.Option("--model", help="Id of the model. Default: all models.")] = "",
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Remove only hours that began before this time, such as 2026-11-28T12:00, in UTC unless it says "
            "otherwise. Default: everything.",
        ),
    ] = "",
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Remove what is kept of a pool's answers, now.

    What a worker has not written yet comes later, two minutes at most: without --learn for this pool, nothing comes.
    Versions that have been learned from the answers stay.
    """
    from shared.traffic.traffic import open_traffic

    check_pool(pool)
    before_s = _seconds(before) if before else None
    traffic = open_traffic(registry_there(registry, data_dir))
    removed = traffic.forget(pool, model_id=model or None, before_s=before_s)
    print_line(f"{removed.num_objects} objects ({removed.num_bytes} bytes) removed")


def _seconds(text: str) -> float:
    """Raises InvalidInput (BAD_TIME)."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"--before is {text!r}; it must be a time such as 2026-11-28T12:00", reason="BAD_TIME"
        ) from error
