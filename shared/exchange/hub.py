"""Routers on the Hugging Face Hub, as repositories of models. The endpoint is HF_ENDPOINT, and the token that of
huggingface_hub: HF_TOKEN, HF_TOKEN_PATH or the file that `hf auth login` writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from shared.errors import Corrupt, InvalidInput, NeapError, NotFound, PermissionDenied, Unauthenticated, Unavailable
from shared.exchange.address import RouterAddress
from shared.exchange.files import CARD, MAX_BYTES, PICTURE, wanted
from shared.model.source import HTTP_ERROR

TIMEOUT_S = 30.0


def push(folder: Path, address: RouterAddress, *, private: bool, message: str) -> RouterAddress:
    """Uploads the files of `folder` as one commit, and makes the repository and the branch if they are missing. Files
    of an earlier router that this one lacks are removed in the same commit. Returns the address of the commit.

    Raises Unauthenticated and PermissionDenied (HUB_DENIED), NotFound, InvalidInput (HUB_REFUSED), Unavailable
    (HUB_UNAVAILABLE).
    """
    api = HfApi()
    branch = address.version or constants.DEFAULT_REVISION
    with _hub_errors(address):
        api.create_repo(address.name, private=private or None, exist_ok=True)
        if branch != constants.DEFAULT_REVISION:
            api.create_branch(address.name, branch=branch, exist_ok=True)
        info = api.model_info(address.name, revision=branch, timeout=TIMEOUT_S)
        there = {sibling.rfilename for sibling in info.siblings or ()}
        paths = sorted(folder.iterdir())
        stale = (there & {*MAX_BYTES, CARD, PICTURE}) - {path.name for path in paths}
        done = api.create_commit(
            address.name,
            [
                *(CommitOperationAdd(path.name, path) for path in paths),
                *(CommitOperationDelete(name) for name in sorted(stale)),
            ],
            commit_message=message,
            revision=branch,
        )
    return RouterAddress(address.scheme, address.name, done.oid)


def fetch(address: RouterAddress, folder: Path) -> None:
    """Downloads a router's files, all of one commit, into `folder`.

    Raises NotFound (ROUTER_NOT_FOUND, REVISION_NOT_FOUND), Corrupt (ROUTER_TOO_LARGE), Unauthenticated and
    PermissionDenied (HUB_DENIED), Unavailable (HUB_UNAVAILABLE).
    """
    api = HfApi()
    with _hub_errors(address):
        info = api.model_info(address.name, revision=address.version or None, files_metadata=True, timeout=TIMEOUT_S)
        sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
        for name in wanted(sizes, address):
            path = Path(api.hf_hub_download(address.name, name, revision=info.sha, local_dir=folder))
            if path.stat().st_size != sizes[name]:
                raise Corrupt(f"{name} of {address} has {path.stat().st_size} bytes, not {sizes[name]}")


@contextmanager
def _hub_errors(address: RouterAddress) -> Iterator[None]:
    try:
        yield
    except NeapError:
        raise
    except (HfHubHTTPError, HTTP_ERROR, OSError, ValueError) as error:
        raise _translated(address, error) from error


def _translated(address: RouterAddress, error: Exception) -> NeapError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return Unavailable(f"{address} is on the Hub, which HF_HUB_OFFLINE forbids to ask", reason="HUB_UNAVAILABLE")
    if isinstance(error, HFValidationError):
        return InvalidInput(f"{address} is no name of the Hugging Face Hub", reason="BAD_ROUTER_URL")
    if isinstance(error, RevisionNotFoundError):
        return NotFound(f"{address}: there is no such revision", reason="REVISION_NOT_FOUND")
    if isinstance(error, GatedRepoError):
        return PermissionDenied(f"{address} is gated: its owner must admit your account", reason="HUB_DENIED")
    # The other kind means that no answer came, and that the file is not in a cache.
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return NotFound(f"{address} has lost a file meanwhile", reason="ROUTER_NOT_FOUND")
    if isinstance(error, RepositoryNotFoundError):
        return NotFound(
            f"the Hub has no {address} that this token may read; HF_TOKEN or `hf auth login` gives a token",
            reason="ROUTER_NOT_FOUND",
        )
    if status == 401:
        return Unauthenticated(f"the Hub does not know the token that was sent for {address}", reason="HUB_DENIED")
    if status == 403:
        return PermissionDenied(f"the token may not do this with {address}", reason="HUB_DENIED")
    if isinstance(error, ValueError) or (isinstance(status, int) and 400 <= status < 500 and status != 429):
        # Also what the Hub's check of the card says.
        return InvalidInput(
            f"the Hub refuses this for {address}: {' '.join(str(error).split())[:300]}", reason="HUB_REFUSED"
        )
    return Unavailable(f"{constants.ENDPOINT} does not answer, or fails, for {address}", reason="HUB_UNAVAILABLE")
