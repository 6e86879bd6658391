"""Commands on a shared registry itself rather than through a service: which one, and its opening."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from shared.config import ServiceSettings, make_settings
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from shared.registry.shared import SharedRegistry

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
    from shared.registry.factory import open_registry
    from shared.registry.shared import SharedRegistry
    from shared.rpc.logs import configure_logging

    given = {} if url is None else {"registry": url}
    configure_logging("warning")  # to standard error
    with closing(open_registry(make_settings(ServiceSettings, **given).registry)) as opened:
        if not isinstance(opened, SharedRegistry):
            raise InvalidInput(
                f"the embedded registry {why_not_embedded}: this is for redis://",
                reason="BAD_REGISTRY",
            )
        yield opened
