"""`neap routers export`, `import`, `sweep` and `rebuild-index`: commands that open the registry directly."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neap_engine.cli.console import DataDir, Model, RegistryUrl, err, exit_on_error, out, print_line
from neap_engine.cli.routers import current_user, selector
from shared.config import make_settings
from shared.errors import AlreadyExists, InvalidInput, NotFound
from shared.service_settings import ServiceSettings

if TYPE_CHECKING:
    from shared.exchange.router_files import Signer
    from shared.registry.base import PublishedVersion
    from shared.registry.registry import Registry


Trusted = Annotated[
    list[Path] | None,
    typer.Option(
        "--verify",
        metavar="FILE",
        help="Refuse a router that is not signed by this public key, or by a certificate that these authorities have "
        "issued. May be given several times: one is enough.",
    ),
]
SigningKey = Annotated[
    Path | None,
    typer.Option("--sign", metavar="FILE", help="Sign the router with this private key, a PEM file of a NIST curve."),
]
Certificates = Annotated[
    list[Path] | None,
    typer.Option(
        "--certificate",
        metavar="FILE",
        help="Certificate of the key of --sign; then, given again, those between it and its authority.",
    ),
]
Fingerprint = Annotated[
    str, typer.Option("--fingerprint", help="Refuse a router of other weights than those of this fingerprint.")
]
SOURCES = "a folder, hf://OWNER/NAME@REVISION or oci://HOST/REPOSITORY:TAG"


@exit_on_error
def import_router(
    source: Annotated[str, typer.Argument(help=f"Where the router is: {SOURCES}.")],
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
    verify: Trusted = None,
    sign: SigningKey = None,
    certificate: Certificates = None,
    fingerprint: Fingerprint = "",
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Publish a router from its files.

    Importing the same files again publishes no second version; it only points the given aliases at the existing one.
    """
    published = publish_files(
        source,
        model,
        alias or (),
        registry=registry,
        data_dir=data_dir,
        fingerprint=fingerprint,
        trusted=verify or (),
        key=sign,
        certificates=certificate or (),
    )
    print_line(f"published version {published.version} of {published.model_id} ({published.manifest_digest})")
    for name in alias or ():
        print_line(f"{name}: {published.version}")


def publish_files(
    source: str,
    model: str,
    aliases: Sequence[str],
    *,
    registry: str | None = None,
    data_dir: Path | None = None,
    fingerprint: str = "",
    trusted: Sequence[Path] = (),
    key: Path | None = None,
    certificates: Sequence[Path] = (),
) -> "PublishedVersion":
    """Publish the router in a folder or at a URL, or find it published, and point the aliases at it.
    `model`: "" means the manifest's. `trusted`, `key`, `certificates`: as the options of `import_router`.

    Raises what `read_files` and the registry raise.
    """
    # Imported here because they need torch, which takes seconds to load. Other commands do not need it.
    from shared.exchange.router_files import read_files
    from shared.exchange.signatures import verifier_of

    files = read_files(
        source,
        model,
        fingerprint=fingerprint,
        verifier=verifier_of(trusted),
        signer=signer_of(key, certificates),
    )
    print_registry(_named(registry, data_dir))
    with opened_registry(registry, data_dir) as opened:
        published = files.publish(opened, aliases, current_user())
        for name in aliases:
            # `publish` moves no alias if the version already existed.
            opened.set_alias(published.model_id, name, published.version, actor=current_user(), reason="imported")
    return published


def signer_of(key: Path | None, certificates: Sequence[Path]) -> "Signer | None":
    """Raises InvalidInput for certificates without a key."""
    from shared.exchange.router_files import Signer

    if key is None and certificates:
        raise InvalidInput("--certificate needs --sign", reason="BAD_ARGUMENT")
    return None if key is None else Signer(key, certificates)


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

    refuse_existing(folder)
    router, manifest, blobs = read_published(model, version, registry, data_dir)
    write_router_folder(folder, manifest, blobs)
    print_line(f"wrote version {router.version} of {model} ({router.manifest_digest}) to {folder}")


def refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise AlreadyExists(f"{folder} exists; name a new folder")


def read_published(
    model: str, version: str, registry: str | None, data_dir: Path | None
) -> tuple["PublishedVersion", dict[str, Any], dict[str, bytes]]:
    """A version, by number or alias, with its manifest and blobs as `write_router_folder` takes them. Raises what the
    registry raises."""
    with existing_registry(registry, data_dir) as opened:
        chosen = selector(version)
        router = opened.get(model, chosen["version"]) if "version" in chosen else opened.resolve(model, chosen["alias"])
        blobs = {name: opened.read_blob(router, name) for name in router.manifest["blobs"]}
    return router, {name: value for name, value in router.manifest.items() if name != "blobs"}, blobs


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
