"""`neap routers`: lists published routers and moves their aliases."""

import getpass
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from neap_client import NeapClient
from neap_client.router.v1 import router_pb2 as pb
from rich.table import Table

from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import (
    DEFAULT_CALIBRATOR,
    Calibrator,
    Model,
    format_time,
    out,
    print_line,
    print_message,
    table_cell,
)
from neap_engine.cli.job_progress import LEAST_POSITIONS_SHOWN
from neap_engine.cli.learned_view import as_mapping, print_learned
from neap_engine.cli.relaxed_view import print_relaxed
from shared.errors import InvalidInput

app = typer.Typer(help="List, inspect, import and roll out published routers.", no_args_is_help=True)

Alias = Annotated[str, typer.Option("--alias", help="Name of the alias.")]
Expect = Annotated[
    int | None,
    typer.Option(
        "--expect",
        help="Refuse the change unless the alias names this version now. 0 means that the alias must not exist. "
        "Default: no check.",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Reason to record in the alias' history.")]


@app.command("list")
@calls_service
def list_routers(
    model: Model = "",
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print each version as one line of JSON.")] = False,
) -> None:
    """List the versions of a model, newest first, with their aliases."""
    with connect(calibrator) as client:
        versions = list(client.list_versions(model))
        names = aliases_by_version(client.list_aliases(model))
    if as_json:
        for version in versions:
            print_message(version, aliases=names.get(version.version, []))
        return
    if not versions:
        print_line(f"no router is published{f' for {model}' * bool(model)}")
        return
    table = Table("version", "aliases", "published", "proposers", "MB", "speed-up")
    for version in versions:
        table.add_row(
            str(version.version),
            table_cell(" ".join(names.get(version.version, []))),
            format_time(version.create_time),
            table_cell("DAMAGED" if version.damage else " ".join(proposer.name for proposer in version.proposers)),
            f"{version.size_bytes / 1e6:.2f}",
            f"{version.speed_up:.2f}x" if version.speed_up else "",
        )
    out.print(table)
    for version in versions:
        if version.damage:
            print_line(f"version {version.version} is damaged: {version.damage}")


@app.command("show")
@calls_service
def show(
    model: Model = "",
    version: Annotated[str, typer.Argument(help="A version number or an alias.")] = "latest",
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    manifest: Annotated[bool, typer.Option("--manifest", help="Print only the manifest, as JSON.")] = False,
) -> None:
    """Show one version: its held-out figures per proposer, the routers that it goes on from, and how often answers
    by the policy relaxed differed."""
    with connect(calibrator) as client:
        router = client.get_version(model, **selector(version))
        line = [] if manifest else list(ancestry(client, router))
    if manifest:
        out.print(router.manifest_json, markup=False, soft_wrap=True)
        return
    print_line(f"{router.model_id} version {router.version}")
    out.print(f"  published {format_time(router.create_time)}, {router.size_bytes / 1e6:.2f} MB")
    print_line(f"  manifest  {router.manifest_digest}")
    print_line(f"  model     {router.model_fingerprint}")
    contents = json.loads(router.manifest_json)
    num_positions = positions_by_proposer(contents)
    table = Table("proposer", "depth", "agreement", "coverage", "confidence AUC", "Brier", "precision")
    for proposer in router.proposers:
        figures = (
            proposer.agreement,
            proposer.coverage,
            proposer.confidence_auc,
            proposer.confidence_brier,
            proposer.confidence_precision,
        )
        cells = [f"{figure:.3f}" for figure in figures]
        count = num_positions.get(proposer.name, LEAST_POSITIONS_SHOWN)
        if count < LEAST_POSITIONS_SHOWN:
            cells = ["not known", *("-" for _ in cells[1:])]
            print_line(f"  {proposer.name}: {count} held-out positions are too few for figures")
        table.add_row(table_cell(proposer.name), str(proposer.depth), *cells)
    out.print(table)
    print_learned(contents)
    print_ancestry(line)
    print_relaxed(contents)


@app.command("promote")
@calls_service
def promote(
    model: Model = "",
    version: Annotated[
        int | None, typer.Argument(help="Version to point the alias at. Default: the version of its canary.", min=1)
    ] = None,
    alias: Alias = "stable",
    reason: Reason = "",
    expect: Expect = None,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
) -> None:
    """Point an alias at a version. Without a version, point it at the version of its canary and end the canary."""
    if version is None and expect is not None:
        raise InvalidInput("--expect needs a version", reason="BAD_ARGUMENT")
    with connect(calibrator) as client:
        if version is None:
            promotion = pb.PromoteCanaryRequest(model_id=model, alias=alias, actor=current_user(), reason=reason)
            change = client.promote_canary(promotion)
        else:
            change = client.set_alias(
                model, alias, version, expected_version=expect, actor=current_user(), reason=reason
            )
    print_line(describe_change(change))


@app.command("canary")
@calls_service
def canary(
    version: Annotated[int, typer.Argument(help="Version that gets a share of the requests.", min=1)],
    share: Annotated[str, typer.Option("--share", help="Share of the alias' requests, in steps of 0.1%: 10% or 2.5%.")],
    model: Model = "",
    alias: Alias = "stable",
    reason: Reason = "",
    expect: Expect = None,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
) -> None:
    """Give a second version (a canary) a share of an alias' requests, or change that share."""
    per_mille = share_per_mille(share)
    request = pb.SetCanaryRequest(
        model_id=model,
        alias=alias,
        canary=pb.Canary(version=version, share_per_mille=per_mille),
        expected_version=expect,
        actor=current_user(),
        reason=reason,
    )
    with connect(calibrator) as client:
        change = client.set_canary(request)
    print_line(describe_change(change))


@app.command("abort")
@calls_service
def abort(
    model: Model = "", alias: Alias = "stable", reason: Reason = "", calibrator: Calibrator = DEFAULT_CALIBRATOR
) -> None:
    """End an alias' canary. All requests get the alias' own version again."""
    request = pb.SetCanaryRequest(model_id=model, alias=alias, actor=current_user(), reason=reason)
    with connect(calibrator) as client:
        change = client.set_canary(request)
    print_line(describe_change(change))


@app.command("rollback")
@calls_service
def rollback(
    model: Model = "",
    alias: Alias = "stable",
    reason: Reason = "",
    expect: Expect = None,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
) -> None:
    """Undo the last change: end the alias' canary or, if it has none, point the alias at its previous version again."""
    with connect(calibrator) as client:
        change = client.rollback_alias(model, alias, expected_version=expect, actor=current_user(), reason=reason)
    print_line(describe_change(change))


@app.command("history")
@calls_service
def history(model: Model = "", alias: Alias = "stable", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """List every change of an alias, newest first."""
    with connect(calibrator) as client:
        changes = client.alias_history(model, alias)
    table = Table("when", "from", "to", "canary", "by", "reason")
    for change in changes:
        before = str(change.from_version) if change.HasField("from_version") else "-"
        canary = canary_text(change.canary) if change.HasField("canary") else ""
        table.add_row(
            format_time(change.change_time),
            before,
            str(change.to_version),
            canary,
            table_cell(change.actor),
            table_cell(change.reason),
        )
    out.print(table)


def positions_by_proposer(contents: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of held-out positions that a manifest's figures stand on. Only a calibration's report tells
    them."""
    positions = {}
    for proposer in contents.get("proposers", []):
        figures = proposer.get("figures")
        if isinstance(figures, dict) and isinstance(figures.get("positions"), int):
            positions[proposer.get("name")] = figures["positions"]
    return positions


def selector(version: str) -> dict[str, Any]:
    """Return keyword arguments for `NeapClient.get_version`: digits are a version, other text is an alias.
    Raises InvalidInput."""
    if version.isdigit():
        return {"version": int(version)}
    if not version:
        raise InvalidInput("the version is empty; give a number or an alias")
    return {"alias": version}


def current_user() -> str:
    """Return the user name to record in the history, or "unknown": in a container the user id may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def aliases_by_version(aliases: Iterable[Any]) -> dict[int, list[str]]:
    """Map each version to the names of its aliases, in order. A canary's name carries its share: "stable:10%"."""
    names: dict[int, list[str]] = {}
    for alias in aliases:
        names.setdefault(alias.version, []).append(alias.name)
        if alias.HasField("canary"):
            share = percent_text(alias.canary.share_per_mille)
            names.setdefault(alias.canary.version, []).append(f"{alias.name}:{share}")
    return names


def describe_change(change: Any) -> str:
    """Describe an AliasChange in one line."""
    before = str(change.from_version) if change.HasField("from_version") else "nothing"
    line = f"{change.alias}: {before} -> {change.to_version}"
    if before == str(change.to_version):
        line = f"{change.alias}: {before}"
        line += "" if change.HasField("canary") else ", no canary"
    return f"{line}, {canary_text(change.canary)}" if change.HasField("canary") else line


def canary_text(canary: Any) -> str:
    return f"{percent_text(canary.share_per_mille)} to {canary.version}"


def percent_text(per_mille: int) -> str:
    return f"{per_mille / 10:g}%"


def share_per_mille(text: str) -> int:
    """Parse "10%" or "2.5%" to thousandths in [1, 1000].

    The service decides whether it accepts the number. Raises InvalidInput (BAD_SHARE).
    """
    number = text.strip()
    try:
        scaled = 10 * float(number.removesuffix("%"))
    except ValueError:
        scaled = -1.0
    if not number.endswith("%") or not 0 < scaled <= 1000 or abs(scaled - round(scaled)) > 1e-9:
        raise InvalidInput(
            f"the share {text!r} is invalid: give a percentage in steps of 0.1, such as 2.5%", reason="BAD_SHARE"
        )
    return round(scaled)


# Enough for a calibration a day over years. A registry with a damaged manifest must not make an endless line.
MAX_ANCESTORS = 1000


def print_ancestry(lines: Sequence[str]) -> None:
    """Print what `ancestry` yielded; nothing for a router without a parent."""
    if len(lines) > 1:
        print_line("line, the youngest first")
        for line in lines:
            print_line(f"  {line}")


def ancestry(client: NeapClient, router: pb.RouterVersion) -> Iterator[str]:
    """Describe the router and, as far as its registry has them, the routers that it goes on from.

    A parent is found by its digest, because in a registry that it was imported to it may have another number.
    """
    numbers: dict[str, int] | None = None
    for _ in range(MAX_ANCESTORS):
        spec = as_mapping(_calibration(router).get("spec"))
        yield _describe(router, spec)
        parent = as_mapping(spec.get("parent"))
        if not parent:
            return
        digest = str(parent.get("manifest_digest", ""))
        if numbers is None:
            versions = client.list_versions(router.model_id)
            numbers = {version.manifest_digest: version.version for version in versions}
        if digest not in numbers:
            yield f"a router that is not in this registry, {digest or 'of files'}"
            return
        router = client.get_version(router.model_id, version=numbers[digest])


def _describe(router: pb.RouterVersion, spec: Mapping[str, Any]) -> str:
    calibration = _calibration(router)
    tokens = as_mapping(calibration.get("tokens")).get("total")
    line = f"version {router.version}, {format_time(router.create_time)}"
    line += f": {tokens:,} tokens of {_source(spec)}" if isinstance(tokens, int) else ""
    parent = as_mapping(spec.get("parent"))
    if not parent:
        return line
    line += ", added to the next"
    line += f", which was {parent['alias']} then" if parent.get("alias") else ""
    share = parent.get("share")
    return f"{line} (share {share:g})" if isinstance(share, float) and share < 1 else line


def _source(spec: Mapping[str, Any]) -> str:
    source = as_mapping(spec.get("source"))
    named = source.get("name") or str(source.get("digest", ""))[:19]
    return " ".join(filter(None, (str(source.get("kind", "unknown text")), str(named or ""))))


def _calibration(router: pb.RouterVersion) -> Mapping[str, Any]:
    return as_mapping(as_mapping(json.loads(router.manifest_json or "{}")).get("calibration"))
