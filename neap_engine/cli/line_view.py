"""The line of a router: what it learned from, and the routers that it goes on from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neap_client import NeapClient
from neap_client.router.v1 import router_pb2 as pb

from neap_engine.cli.console import format_time, print_line
from neap_engine.cli.learned_view import as_mapping

# Enough for a calibration a day over years. A registry with a damaged manifest must not make an endless line.
MAX_ANCESTORS = 1000


def print_ancestry(lines: Sequence[str]) -> None:
    """Print what `ancestry` yielded; nothing for a router without a parent."""
    if len(lines) > 1:
        print_line("line, the youngest first")
        for line in lines:
            print_line(f"  {line}")


def ancestry(client: NeapClient, router: pb.RouterVersion) -> Iterator[str]:
    """Describe the router and, as far as its registry has them, the routers that it goes on from.

    A parent is found by its digest, because in a registry that it was imported to it may have another number.
    """
    numbers: dict[str, int] | None = None
    for _ in range(MAX_ANCESTORS):
        spec = as_mapping(_calibration(router).get("spec"))
        yield _describe(router, spec)
        parent = as_mapping(spec.get("parent"))
        if not parent:
            return
        digest = str(parent.get("manifest_digest", ""))
        if numbers is None:
            versions = client.list_versions(router.model_id)
            numbers = {version.manifest_digest: version.version for version in versions}
        if digest not in numbers:
            yield f"a router that is not in this registry, {digest or 'of files'}"
            return
        router = client.get_version(router.model_id, version=numbers[digest])


def _describe(router: pb.RouterVersion, spec: Mapping[str, Any]) -> str:
    calibration = _calibration(router)
    tokens = as_mapping(calibration.get("tokens")).get("total")
    line = f"version {router.version}, {format_time(router.create_time)}"
    line += f": {tokens:,} tokens of {_source(spec)}" if isinstance(tokens, int) else ""
    parent = as_mapping(spec.get("parent"))
    if not parent:
        return line
    line += ", added to the next"
    line += f", which was {parent['alias']} then" if parent.get("alias") else ""
    share = parent.get("share")
    return f"{line} (share {share:g})" if isinstance(share, float) and share < 1 else line


def _source(spec: Mapping[str, Any]) -> str:
    source = as_mapping(spec.get("source"))
    named = source.get("name") or str(source.get("digest", ""))[:19]
    return " ".join(filter(None, (str(source.get("kind", "unknown text")), str(named or ""))))


def _calibration(router: pb.RouterVersion) -> Mapping[str, Any]:
    return as_mapping(as_mapping(json.loads(router.manifest_json or "{}")).get("calibration"))
