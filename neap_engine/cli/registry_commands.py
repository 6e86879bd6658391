"""`neap routers export`, `import`, `sweep` and `rebuild-index`: commands that open the registry directly."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neap_engine.cli.console import DataDir, Model, RegistryUrl, err, exit_on_error, out, print_line
from neap_engine.cli.routers import current_user, selector
from shared.config import make_settings
from shared.errors import AlreadyExists, Corrupt, NotFound
from shared.service_settings import ServiceSettings

if TYPE_CHECKING:
    from shared.registry.base import PublishedVersion
    from shared.registry.registry import Registry


@exit_on_error
def import_router(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder with manifest.json, ladder.safetensors and, if the router has them, statistics.safetensors."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Id of the model, as configured on the services. Default: the id in the manifest."
        ),
    ] = "",
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            help="Alias to point at the version, for example latest. May be given several times. Default: none.",
        ),
    ] = None,
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Publish a ladder from files.

    Importing the same files again publishes no second version; it only points the given aliases at the existing one.
    """
    published = publish_folder(folder, model, alias or (), registry=registry, data_dir=data_dir)
    print_line(f"published version {published.version} of {published.model_id} ({published.manifest_digest})")
    for name in alias or ():
        print_line(f"{name}: {published.version}")


def publish_folder(
    folder: Path, model: str, aliases: Sequence[str], *, registry: str | None = None, data_dir: Path | None = None
) -> "PublishedVersion":
    """Publish the router in `folder`, or find it published, and point the aliases at it.
    `model`: "" means the manifest's.

    Raises what `read_router_folder`, `unpack_ladder` and the registry raise.
    """
    # Imported here because they need torch, which takes seconds to load. Other commands do not need it.
    from shared.digests import digest_of
    from shared.ladder.artefact import unpack_ladder
    from shared.ladder.blob_names import STATISTICS_BLOB
    from shared.ladder.checks import check_artefact
    from shared.ladder.folder import read_router_folder
    from shared.registry.contents import blob_entries
    from shared.registry.encoding import canonical_json

    manifest, blobs = read_router_folder(folder, with_statistics=True)
    # A registry has added it to the manifest of a router that was copied out of it.
    recorded = manifest.pop("blobs", None)
    if isinstance(recorded, dict) and STATISTICS_BLOB not in blobs:
        recorded.pop(STATISTICS_BLOB, None)  # a router may be copied without them
    if recorded not in (None, blob_entries(blobs)):
        raise Corrupt(f"{folder} does not have the files that its manifest names")
    ladder = unpack_ladder(manifest, blobs)
    manifest = {**manifest, "checks": check_artefact(manifest, blobs)}
    model_id = model or ladder.model.model_id
    contents = {
        "model_id": model_id,
        "manifest": manifest,
        "blobs": {name: digest_of(data) for name, data in blobs.items()},
    }
    print_registry(_named(registry, data_dir))
    with opened_registry(registry, data_dir) as opened:
        published = opened.publish(
            model_id,
            manifest,
            blobs,
            request_id=f"import-{digest_of(canonical_json(contents))}",
            aliases=aliases,
            actor=current_user(),
        )
        for name in aliases:
            # `publish` moves no alias if the version already existed.
            opened.set_alias(model_id, name, published.version, actor=current_user(), reason="imported")
    return published


@exit_on_error
def export_router(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="The folder to write. It must not exist yet.")],
    version: Annotated[str, typer.Argument(help="A version number or an alias.")] = "latest",
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Write a published version to a folder, which `neap routers import` reads.

    Where it is imported, the version has the digest that it has here.
    """
    from shared.ladder.folder import write_router_folder

    if folder.exists():
        raise AlreadyExists(f"{folder} exists; name a new folder")
    with existing_registry(registry, data_dir) as opened:
        chosen = selector(version)
        router = opened.get(model, chosen["version"]) if "version" in chosen else opened.resolve(model, chosen["alias"])
        blobs = {name: opened.read_blob(router, name) for name in router.manifest["blobs"]}
    manifest = {name: value for name, value in router.manifest.items() if name != "blobs"}
    write_router_folder(folder, manifest, blobs)
    print_line(f"wrote version {router.version} of {model} ({router.manifest_digest}) to {folder}")


@exit_on_error
def sweep(
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", min=0, help="Keep objects written within this many hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count.")] = False,
) -> None:
    """Remove objects that no publication refers to from a registry's bucket or folder.

    The services may run meanwhile, but nothing can be published until it ends. It may be killed and repeated.
    """
    with existing_registry(registry, data_dir) as opened:
        done = opened.sweep(grace_s=grace_hours * 3600, is_rehearsal=dry_run)
    out.print(
        f"{done.num_in_use} objects in use, {done.num_removed} unused ({done.num_removed_bytes} bytes)"
        f" {'to remove' if dry_run else 'removed'}, {done.num_in_grace_period} unused but within the grace period",
        markup=False,
    )
    if done.num_damaged:
        out.print(
            f"{done.num_damaged} manifests are damaged, so {done.num_kept} blobs that may belong to them were kept."
            " `neap routers list` shows the damaged versions; publishing their contents again repairs them.",
            markup=False,
        )


@exit_on_error
def rebuild_index(
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Rebuild only this model. May be given several times. Default: all models."),
    ] = None,
) -> None:
    """Rebuild versions, aliases and their history in Redis from the registry's journal.

    The command may be repeated and may run while the services run. Registries without Redis have no index to rebuild.
    """
    with existing_registry(registry, data_dir) as opened:
        models = model or opened.models()
        if not models:
            print_line("no router has been published in it")
        for model_id in models:
            state = opened.rebuild(model_id)
            print_line(
                f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases, {state.num_events} events"
            )


@contextmanager
def opened_registry(url: str | None, data_dir: Path | None) -> Iterator["Registry"]:
    """Open the registry of the services. None means their own settings. Raises what `open_registry` raises."""
    from shared.registry.factory import open_registry
    from shared.rpc.logs import configure_logging

    configure_logging("warning")  # to standard error
    with closing(open_registry(_named(url, data_dir))) as opened:
        yield opened


@contextmanager
def existing_registry(url: str | None, data_dir: Path | None) -> Iterator["Registry"]:
    """As `opened_registry`, after `registry_there`."""
    registry_there(url, data_dir)
    with opened_registry(url, data_dir) as opened:
        yield opened


def registry_there(url: str | None, data_dir: Path | None) -> str:
    """The registry's URL or folder, of which a line says which it is. Raises `NotFound` (REGISTRY_NOT_FOUND) instead of
    making a folder."""
    from shared.registry.factory import folder_of

    name = _named(url, data_dir)
    folder = folder_of(name)
    if folder is not None and not folder.is_dir():
        raise NotFound(
            f"there is no registry in {folder}; name one with --registry, or the services' folder with --data-dir",
            reason="REGISTRY_NOT_FOUND",
        )
    print_registry(name)
    return name


def print_registry(name: str) -> None:
    from shared.registry.address import RegistryAddress
    from shared.registry.factory import folder_of

    if (folder := folder_of(name)) is None:
        address = RegistryAddress.parse(name)  # the name may have a password
        err.print(f"registry: s3://{address.bucket}/{address.prefix}", markup=False)
    else:
        err.print(f"registry: {folder}", markup=False)


def _named(url: str | None, data_dir: Path | None) -> str:
    return make_settings(ServiceSettings, registry=url, data_dir=data_dir).registry
