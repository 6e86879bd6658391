"""`neap routers try`, `judged`, `hold`, `release`, `forbid` and `allow`: what the judge does and leaves alone."""

from typing import Annotated

import typer
from neap_client.router.v1 import router_pb2 as pb
from rich.table import Table

from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import DEFAULT_CALIBRATOR, Calibrator, Model, out, print_line, table_cell
from neap_engine.cli.routers import Alias, Reason, canary_text, current_user, describe_change

Version = Annotated[int, typer.Argument(help="A version number.", min=1)]


@calls_service
def try_version(
    version: Version,
    model: Model = "",
    alias: Alias = "stable",
    reason: Reason = "",
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
) -> None:
    """Let the judge try a version: it becomes the alias' canary, grows while it is not slower, and is promoted or ended
    by what workers measure."""
    request = pb.BeginTrialRequest(model_id=model, alias=alias, version=version, actor=current_user(), reason=reason)
    with connect(calibrator) as client:
        change = client.begin_trial(request)
    print_line(describe_change(change))


@calls_service
def judged(model: Model = "", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Show what the judge knows of each alias: trials, and the versions that serve."""
    with connect(calibrator) as client:
        answer = client.get_judged(model)
    table = Table("alias", "version", "canary", "state", "figures")
    for entry in answer.aliases:
        canary = canary_text(entry.canary) if entry.HasField("canary") else ""
        cells = map(table_cell, (entry.alias, str(entry.version), canary, entry.state, entry.figures))
        table.add_row(*cells)
    out.print(table)
    if answer.forbidden_versions:
        print_line(f"not tried: {', '.join(map(str, answer.forbidden_versions))}")
    if not answer.is_acting:
        print_line("this service does not judge now: another one of the registry does, or takes over within a minute")


@calls_service
def hold(model: Model = "", alias: Alias = "stable", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Leave an alias as it is, with its canary and share, until it is released. A suspended router serves again."""
    _order(calibrator, pb.OrderJudgeRequest(model_id=model, action=pb.JUDGE_ACTION_HOLD, alias=alias))
    print_line(f"{alias}: held")


@calls_service
def release(model: Model = "", alias: Alias = "stable", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Let the judge go on with an alias."""
    _order(calibrator, pb.OrderJudgeRequest(model_id=model, action=pb.JUDGE_ACTION_RELEASE, alias=alias))
    print_line(f"{alias}: judged")


@calls_service
def forbid(version: Version, model: Model = "", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Never let the judge try a version; its trials end."""
    _order(calibrator, pb.OrderJudgeRequest(model_id=model, action=pb.JUDGE_ACTION_FORBID, version=version))
    print_line(f"version {version} is not tried")


@calls_service
def allow(version: Version, model: Model = "", calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Let the judge try a version again that was forbidden."""
    _order(calibrator, pb.OrderJudgeRequest(model_id=model, action=pb.JUDGE_ACTION_ALLOW, version=version))
    print_line(f"version {version} may be tried")


def _order(calibrator: str, request: pb.OrderJudgeRequest) -> None:
    with connect(calibrator) as client:
        client.order_judge(request)
