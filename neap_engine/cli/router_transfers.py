"""`neap routers push` and `pull`: routers on the Hugging Face Hub and in OCI registries."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from neap_engine.cli.console import DataDir, Model, RegistryUrl, err, exit_on_error, print_line
from neap_engine.cli.registry_commands import (
    Certificates,
    Fingerprint,
    SigningKey,
    Trusted,
    read_published,
    refuse_existing,
    signer_of,
)
from shared.errors import InvalidInput

URL = "hf://OWNER/NAME or oci://HOST/REPOSITORY:TAG"


@exit_on_error
def push(
    model: Model,
    url: Annotated[str, typer.Argument(help=f"Where to: {URL}.")],
    version: Annotated[str, typer.Argument(help="A version number or an alias.")] = "latest",
    revision: Annotated[
        str, typer.Option("--revision", help="Branch of the Hub's repository. It is made if it is missing.")
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="Make a private repository on the Hub, if there is none.")
    ] = False,
    base_model: Annotated[
        str,
        typer.Option(
            "--base-model", help="The model's name on the Hub, for the card. Default: its id, if that is OWNER/NAME."
        ),
    ] = "",
    licence: Annotated[
        str, typer.Option("--license", help="The router's licence on the card, as apache-2.0. Default: none.")
    ] = "",
    sign: SigningKey = None,
    certificate: Certificates = None,
    verify: Trusted = None,
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Push a published version to the Hugging Face Hub or to an OCI registry, with a card that says what it is.

    The Hub's token is that of HF_TOKEN or `hf auth login`, its address HF_ENDPOINT; credentials of OCI registries are
    those of `docker login`. The card is made anew at each push.
    """
    from neap_engine.cli.router_card import write_card
    from shared.exchange.address import HUB, RouterAddress
    from shared.exchange.files import check_weight
    from shared.exchange.signatures import sign as signed
    from shared.exchange.signatures import signed_files, verifier_of
    from shared.ladder.blob_names import SIGNATURE_BLOB, blob_entry
    from shared.ladder.checks import check_artefact
    from shared.ladder.folder import write_router_folder

    address = RouterAddress.parse(url)
    is_hub = address.scheme == HUB
    if revision or private:
        if not is_hub:
            raise InvalidInput(
                "--revision and --private are for hf://; a tag is a part of oci://", reason="BAD_ARGUMENT"
            )
        address = RouterAddress(HUB, address.name, revision or address.version)
    signer, verifier = signer_of(sign, certificate or ()), verifier_of(verify or ())
    router, manifest, blobs = read_published(model, version, registry, data_dir)
    if signer is not None:
        # What an import makes of it, which the signature must cover.
        manifest = {**manifest, "checks": check_artefact(manifest, blobs)}
    files = signed_files(manifest, {name: blob_entry(data) for name, data in blobs.items()})
    if signer is not None:
        blobs[SIGNATURE_BLOB] = signed(files, signer.key, signer.certificates)
    what = f"version {router.version} of {model}"
    if verifier is not None:
        verifier.check(files, blobs.get(SIGNATURE_BLOB), what)
    for name, data in blobs.items():
        check_weight(name, len(data), what)
    with TemporaryDirectory(prefix="neap-push-") as name:
        folder = Path(name)
        write_router_folder(folder, manifest, blobs)
        base = write_card(folder, manifest, url, base_model=base_model, licence=licence)
        if is_hub:
            from shared.exchange import hub

            if not base:
                err.print("the card names no base_model: --base-model OWNER/NAME gives it one", markup=False)
            pushed = hub.push(folder, address, private=private, message=f"neap router {router.manifest_digest}")
        else:
            from shared.exchange import oci

            identity = manifest["model"]
            annotations = {oci.MODEL_ID: identity["id"], oci.FINGERPRINT: identity["fingerprint"]}
            licences = {"org.opencontainers.image.licenses": licence} if licence else {}
            pushed = oci.push(folder, address, annotations | licences)
    print_line(f"pushed {what} ({router.manifest_digest}) as {pushed}")


@exit_on_error
def pull(
    url: Annotated[str, typer.Argument(help=f"Where the router is: {URL}.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write. It must not exist yet.")],
    verify: Trusted = None,
    fingerprint: Fingerprint = "",
) -> None:
    """Fetch a router into a folder, checked as a worker checks it. `neap routers import` reads the folder, or a URL."""
    from shared.exchange.address import RouterAddress
    from shared.exchange.router_files import check_folder, fetched
    from shared.exchange.signatures import verifier_of

    refuse_existing(folder)
    address, verifier = RouterAddress.parse(url), verifier_of(verify or ())
    with fetched(str(address)) as found:
        _, _, model = check_folder(found, url, verifier=verifier, fingerprint=fingerprint)
        folder.mkdir(parents=True)  # with the rights of a new folder, which the temporary one does not have
        for path in filter(Path.is_file, found.iterdir()):
            shutil.copy(path, folder)
    print_line(f"pulled {address} to {folder}: a router of {model.model_id} ({model.fingerprint})")
