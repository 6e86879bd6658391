"""`neap routers import`: publishes a ladder from files. It opens the registry directly, as `rebuild-index` does."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shared.cli.console import RegistryUrl, exit_on_error, out
from shared.cli.routers import current_user
from shared.config import ServiceSettings, make_settings


@exit_on_error
def import_router(
    folder: Annotated[
        Path, typer.Argument(help="Folder with manifest.json and ladder.safetensors.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Id of the model, as configured on the services. Default: the id in the manifest.",
        ),
    ] = "",
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            help="Alias to point at the version, for example latest. May be given several times. "
            "Default: none.",
        ),
    ] = None,
    registry: RegistryUrl = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Data folder of the services. It holds the registry if none is named. "
            "Default: the user's data folder.",
        ),
    ] = None,
) -> None:
    """Publish a ladder from files.

    Importing the same files again publishes no second version; it only points the given aliases at the existing one.
    """
    # Imported here because they need torch, which takes seconds to load. Other commands do not need it.
    from shared.ladder.artefact import unpack_ladder
    from shared.ladder.checks import check_artefact
    from shared.ladder.folder import read_router_folder
    from shared.registry.canonical import canonical_json, digest_of
    from shared.registry.factory import open_registry
    from shared.rpc.logs import configure_logging

    given: dict[str, Any] = {"registry": registry, "data_dir": data_dir}
    settings = make_settings(
        ServiceSettings, **{name: value for name, value in given.items() if value is not None}
    )
    manifest, blobs = read_router_folder(folder)
    ladder = unpack_ladder(manifest, blobs)
    manifest = {**manifest, "checks": check_artefact(manifest, blobs)}
    model_id = model or ladder.model.model_id
    contents = {
        "model_id": model_id,
        "manifest": manifest,
        "blobs": {name: digest_of(data) for name, data in blobs.items()},
    }
    configure_logging("warning")  # to standard error
    opened = open_registry(settings.registry)
    try:
        made = opened.publish(
            model_id,
            manifest,
            blobs,
            request_id=f"import-{digest_of(canonical_json(contents))}",
            aliases=alias or (),
            actor=current_user(),
        )
        out.print(
            f"published version {made.version} of {model_id} ({made.manifest_digest})", markup=False
        )
        for name in alias or ():
            # `publish` moves no alias if the version already existed.
            opened.set_alias(model_id, name, made.version, actor=current_user(), reason="imported")
            out.print(f"{name}: {made.version}", markup=False)
    finally:
        opened.close()
