"""Opens the registry for commands that work on it directly and not through a service."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from shared.config import ServiceSettings, make_settings
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from shared.registry.shared import SharedRegistry
    from shared.registry.state import ModelState

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="Registry of the services. Default: NEAP_REGISTRY, which is the better place for a URL with a password.",
    ),
]


@contextmanager
def open_shared_registry(url: str | None, why_not_embedded: str) -> Iterator["SharedRegistry"]:
    """Open the shared registry at `url`. None means the services' own setting.

    Raises InvalidInput (BAD_REGISTRY) for an embedded registry; `why_not_embedded` completes its message.
    """
    from shared.registry.address import SharedAddress
    from shared.registry.factory import folder_of
    from shared.registry.shared import SharedRegistry

    address = _address(url)
    if folder_of(address) is not None:
        raise InvalidInput(
            f"the embedded registry {why_not_embedded}; this command is for redis:// registries",
            reason="BAD_REGISTRY",
        )
    with closing(SharedRegistry(SharedAddress.parse(address))) as opened:
        yield opened


def rebuilt(url: str | None, models: Sequence[str]) -> Iterable[tuple[str, "ModelState"]]:
    """Rebuild the index of the registry at `url` and yield the new state of each of `models`. No models means all.

    Raises InvalidInput (BAD_REGISTRY) if models are named for a folder, and the errors of the rebuild itself.
    """
    from shared.registry.factory import folder_of
    from shared.registry.local_rebuild import rebuild_folder

    folder = folder_of(_address(url))
    if folder is None:
        with open_shared_registry(url, "") as opened:
            for model_id in models or opened.models():
                yield model_id, opened.rebuild(model_id)
        return
    if models:
        raise InvalidInput(
            "the index of a folder can only be rebuilt as a whole; leave out --model",
            reason="BAD_REGISTRY",
        )
    yield from sorted(rebuild_folder(folder).items())


def _address(url: str | None) -> str:
    from shared.rpc.logs import configure_logging

    configure_logging("warning")  # to standard error
    return make_settings(ServiceSettings, **({} if url is None else {"registry": url})).registry
