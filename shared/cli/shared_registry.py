"""For commands that work on a registry itself rather than through a service."""

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
        help="The services' registry; better in NEAP_REGISTRY where it holds a password.",
    ),
]


@contextmanager
def opened_shared_registry(url: str | None, why_not_embedded: str) -> Iterator["SharedRegistry"]:
    """The registry at `url`, None: the services' own setting. Raises InvalidInput (BAD_REGISTRY) for an embedded one."""
    from shared.registry.address import SharedAddress
    from shared.registry.factory import folder_of
    from shared.registry.shared import SharedRegistry

    address = _address(url)
    if folder_of(address) is not None:
        raise InvalidInput(
            f"the embedded registry {why_not_embedded}: this is for redis://", reason="BAD_REGISTRY"
        )
    with closing(SharedRegistry(SharedAddress.parse(address))) as opened:
        yield opened


def rebuilt(url: str | None, models: Sequence[str]) -> Iterable[tuple[str, "ModelState"]]:
    """Makes the index of the registry at `url` anew and yields what each of `models`, all where there are none, holds afterwards.

    Raises InvalidInput (BAD_REGISTRY) where a folder's is to be made for some models only, and what rebuilding raises.
    """
    from shared.registry.factory import folder_of
    from shared.registry.local_rebuild import rebuild_folder

    folder = folder_of(_address(url))
    if folder is None:
        with opened_shared_registry(url, "") as opened:
            for model_id in models or opened.models():
                yield model_id, opened.rebuild(model_id)
        return
    if models:
        raise InvalidInput("a folder's index is made anew as a whole", reason="BAD_REGISTRY")
    yield from sorted(rebuild_folder(folder).items())


def _address(url: str | None) -> str:
    from shared.rpc.logs import configure_logging

    configure_logging("warning")  # to standard error
    return make_settings(ServiceSettings, **({} if url is None else {"registry": url})).registry
