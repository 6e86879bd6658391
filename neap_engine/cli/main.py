"""The application `neap`, assembled from the commands."""

import typer

from neap_engine.cli import (
    calibrate,
    chat,
    connection,
    doctor,
    evaluate,
    generate,
    jobs,
    judge_commands,
    loaded_models,
    models,
    registry_commands,
    router_transfers,
    routers,
    serve,
    tokens,
    tune,
    up,
)

app = typer.Typer(
    name="neap",
    help="Serve frozen causal language models with early exits that really skip layers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(connection.global_options)
app.command("doctor")(doctor.doctor)
app.command("calibrate")(calibrate.calibrate)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("ps")(loaded_models.ps)
app.command("tune")(tune.tune)
app.command("up")(up.up)
app.command("evaluate")(evaluate.evaluate)
app.add_typer(serve.app, name="serve")
routers.app.command("allow")(judge_commands.allow)
routers.app.command("export")(registry_commands.export_router)
routers.app.command("forbid")(judge_commands.forbid)
routers.app.command("hold")(judge_commands.hold)
routers.app.command("import")(registry_commands.import_router)
routers.app.command("judged")(judge_commands.judged)
routers.app.command("pull")(router_transfers.pull)
routers.app.command("push")(router_transfers.push)
routers.app.command("rebuild-index")(registry_commands.rebuild_index)
routers.app.command("release")(judge_commands.release)
routers.app.command("sweep")(registry_commands.sweep)
routers.app.command("try")(judge_commands.try_version)
app.add_typer(jobs.app, name="jobs")
app.add_typer(models.app, name="models")
app.add_typer(routers.app, name="routers")
app.add_typer(tokens.app, name="tokens")

if __name__ == "__main__":
    app()
