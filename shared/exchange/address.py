"""Where a router comes from or goes to: a folder, hf://OWNER/NAME@REVISION or oci://HOST/REPOSITORY:TAG."""

import re
from dataclasses import dataclass
from typing import Self

from shared.errors import InvalidInput

HUB, OCI = "hf", "oci"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PATTERNS = {
    HUB: re.compile(rf"(?P<name>{_NAME}/{_NAME})(@(?P<version>[\w./-]{{1,200}}))?"),
    # The grammar of names, tags and digests in the OCI distribution specification.
    OCI: re.compile(
        r"(?P<name>([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+)"
        r"(:(?P<version>[A-Za-z0-9_][\w.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?"
    ),
}
_FORMS = {HUB: "hf://OWNER/NAME or hf://OWNER/NAME@REVISION", OCI: "oci://HOST/REPOSITORY:TAG or ..@sha256:DIGEST"}


def is_url(source: str) -> bool:
    """Whether `source` is meant as a URL; otherwise it is a folder."""
    return "://" in source


@dataclass(frozen=True)
class RouterAddress:
    """`name`: OWNER/NAME, or HOST/REPOSITORY. `version`: a revision or a tag, "" for the newest; or a digest."""

    scheme: str
    name: str
    version: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises InvalidInput (BAD_ROUTER_URL)."""
        scheme, _, rest = url.partition("://")
        if scheme not in _PATTERNS:
            raise InvalidInput(
                f"{url[:200]!r} is no place for a router: it must be {' or '.join(_FORMS.values())}",
                reason="BAD_ROUTER_URL",
            )
        match = _PATTERNS[scheme].fullmatch(rest)
        if match is None or ".." in rest:
            raise InvalidInput(f"{url[:200]!r} is not valid: it must be {_FORMS[scheme]}", reason="BAD_ROUTER_URL")
        parts = match.groupdict()
        return cls(scheme, parts["name"], parts["version"] or parts.get("digest") or "")

    @property
    def is_digest(self) -> bool:
        return ":" in self.version

    def __str__(self) -> str:
        mark = "@" if self.scheme == HUB or self.is_digest else ":"
        return f"{self.scheme}://{self.name}{mark * bool(self.version)}{self.version}"
