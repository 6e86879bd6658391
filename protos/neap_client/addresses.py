"""Tells which addresses are on this machine, and completes targets."""

import ipaddress
import re

from neap_client.errors import InvalidInput

_NAME = r"([^\s:/,\[\]]+|\[[^\s/,\[\]]+\]):[0-9]+"
# gRPC's forms, and HOST:PORT. Where gRPC can do without a port, it takes 443.
_TARGET = re.compile(
    rf"(dns:(//[^\s/]*/)?)?{_NAME}|ipv[46]:{_NAME}(,{_NAME})*|(unix|unix-abstract|vsock):\S+|(xds|google-c2p):///\S+"
)


def is_loopback(host: str) -> bool:
    """Return whether `host` is certainly this machine.
    Names other than localhost are not, because they may resolve elsewhere."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def with_scheme(target: str) -> str:
    """Return `target` with the scheme dns:///, unless it has one of gRPC's schemes.

    Raises InvalidInput (BAD_ADDRESS) for what is no target, or has no port.
    """
    if not _TARGET.fullmatch(target):
        raise InvalidInput(
            f"{target!r} is not an address HOST:PORT (a worker's port is 7071 and a calibration service's 7070, unless "
            "set)",
            reason="BAD_ADDRESS",
        )
    has_scheme = re.match(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock):|[a-z0-9-]+://", target)
    return target if has_scheme else f"dns:///{target}"


def hosts_of(target: str) -> list[tuple[str, int]]:
    """Return hosts and ports of a target that this machine's resolver can resolve. Empty for gRPC's other forms."""
    if re.match(r"dns://[^/]|(unix|unix-abstract|vsock|xds|google-c2p):", target):
        return []
    rest = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target)
    split = [address.rpartition(":") for address in rest.split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in split]


def is_loopback_target(target: str) -> bool:
    """Return whether all addresses of `target` are on this machine. False if an address cannot be interpreted.

    `target` has one of gRPC's forms: HOST:PORT, dns:///HOST:PORT, ipv4:ADDRESS:PORT,ADDRESS:PORT, ipv6:.., unix:PATH.
    """
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    rest = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target)
    hosts = [re.sub(r":\d+$", "", address) for address in rest.split(",")]
    return all(map(is_loopback, hosts))
