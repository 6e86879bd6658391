"""Where a shared registry is: one URL for its Redis and its bucket.

    redis://[user:password@]host[:6379][/database]?objects=s3://bucket[/prefix][&endpoint=URL][&region=NAME]

`rediss://` is the same over TLS (with `&ssl_ca_certs=FILE` for an authority of one's own), `redis+cluster://` and
`rediss+cluster://` are a cluster, found through any of its nodes. Credentials of the bucket are read by the client library from
the standard AWS_* variables, or from the instance; they are never part of the URL. A user of Redis needs
`~neap:* +@read +@write +@scripting +@connection`.
"""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from shared.errors import InvalidInput

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
_OPTIONS = ("objects", "endpoint", "region", "ssl_ca_certs")
_EXAMPLE = "redis://host:6379/0?objects=s3://bucket/prefix"


@dataclass(frozen=True)
class SharedAddress:
    """`redis_url` may hold a password: it is in no representation, log or error. `prefix` has no slash at its ends."""

    redis_url: str = field(repr=False)
    is_cluster: bool
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    ssl_ca_certs: str | None = None

    @classmethod
    def parse(cls, url: str) -> "SharedAddress":
        """Raises InvalidInput (BAD_REGISTRY), in words that repeat no part of the URL that may be secret."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise _bad("host or port cannot be read") from error
        if parts.scheme not in SCHEMES:
            raise _bad(f"the scheme must be one of {', '.join(SCHEMES)}")
        if not host:
            raise _bad("it names no host")
        if parts.fragment:
            # A password with '#' that was not percent-encoded ends up here.
            raise _bad("it has a fragment; percent-encode '#', '?', '/' and '@' in passwords")
        options = _options(parts.query)
        transport, _, kind = parts.scheme.partition("+")
        database = parts.path.strip("/")
        if database and not (database.isascii() and database.isdigit()):
            raise _bad("the path must be the number of a database")
        if kind and database not in ("", "0"):
            raise _bad("a cluster has database 0 only")
        if "ssl_ca_certs" in options and transport != "rediss":
            raise _bad("ssl_ca_certs goes with rediss:// only")
        bucket, prefix = _bucket(options.pop("objects", ""))
        _check_endpoint(options.get("endpoint"))
        return cls(
            redis_url=urlunsplit((transport, parts.netloc, f"/{database or 0}", "", "")),
            is_cluster=bool(kind),
            bucket=bucket,
            prefix=prefix,
            **options,
        )


def _options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise _bad("what follows '?' must be name=value, joined by '&'") from error
    options = dict(pairs)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown or len(options) != len(pairs):
        raise _bad(f"the options are {', '.join(_OPTIONS)}, each at most once")
    empty = sorted(name for name, value in options.items() if not value)
    if empty:
        raise _bad(f"{empty[0]} is empty")
    return options


def _bucket(text: str) -> tuple[str, str]:
    parts = urlsplit(text)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise _bad("objects=s3://bucket/prefix is missing or is not of that form")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise _bad("credentials of the bucket go into AWS_* variables, its address into endpoint=")
    segments = [segment for segment in parts.path.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise _bad("the bucket's prefix must not hold '.' or '..'")
    return parts.netloc, "/".join(segments)


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError as error:
        raise _bad("endpoint cannot be read") from error
    if not is_right or parts.query or parts.fragment:
        raise _bad("endpoint must be http://host:port or https://host:port")
    if "@" in parts.netloc:
        raise _bad("credentials of the bucket go into AWS_* variables, not into endpoint")


def _bad(what: str) -> InvalidInput:
    return InvalidInput(
        f"the registry's URL is not right: {what} (for example {_EXAMPLE})", reason="BAD_REGISTRY"
    )
