"""Tells which addresses are on this machine, and completes targets."""

import ipaddress
import re


def is_loopback(host: str) -> bool:
    """Return whether `host` is certainly this machine. Names other than localhost are not, because they may resolve elsewhere."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def with_scheme(target: str) -> str:
    """Return `target` with the scheme dns:///, unless it has one of gRPC's schemes."""
    has_scheme = re.match(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock):|[a-z][a-z0-9+.-]*://", target)
    return target if has_scheme else f"dns:///{target}"


def is_loopback_target(target: str) -> bool:
    """Return whether all addresses of `target` are on this machine. False if an address cannot be interpreted.

    `target` has one of gRPC's forms: HOST:PORT, dns:///HOST:PORT, ipv4:ADDRESS:PORT,ADDRESS:PORT, ipv6:.., unix:PATH.
    """
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    rest = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target)
    hosts = [re.sub(r":\d+$", "", address) for address in rest.split(",")]
    return all(map(is_loopback, hosts))
