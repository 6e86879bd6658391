"""Parses the URL of a shared registry, which names its Redis and its bucket.

    redis://[user:password@]host[:6379][/database]?objects=s3://bucket[/prefix][&endpoint=URL][&region=NAME]

`rediss://` uses TLS (`&ssl_ca_certs=FILE` names a private authority). `redis+cluster://` and `rediss+cluster://` are a cluster,
found through any of its nodes. The client library reads the credentials of the bucket from the standard AWS_* variables or from the
instance; they are never part of the URL. The Redis user needs the permissions
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
    """A parsed URL. `redis_url` may contain a password, so it is left out of repr, logs and errors. `prefix` has no outer slashes."""

    redis_url: str = field(repr=False)
    is_cluster: bool
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    ssl_ca_certs: str | None = None

    @classmethod
    def parse(cls, url: str) -> "SharedAddress":
        """Parse a URL. Raises InvalidInput (BAD_REGISTRY), whose message repeats no part of the URL that may be secret."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise _bad("host or port cannot be read") from error
        if parts.scheme not in SCHEMES:
            raise _bad(f"the scheme must be one of {', '.join(SCHEMES)}")
        if not host:
            raise _bad("it has no host")
        if parts.fragment:
            # Happens if a password contains '#' that is not percent-encoded.
            raise _bad("it has a fragment; percent-encode '#', '?', '/' and '@' in passwords")
        options = _options(parts.query)
        transport, _, kind = parts.scheme.partition("+")
        database = parts.path.strip("/")
        if database and not (database.isascii() and database.isdigit()):
            raise _bad("the path must be a database number")
        if kind and database not in ("", "0"):
            raise _bad("a cluster has only database 0")
        if "ssl_ca_certs" in options and transport != "rediss":
            raise _bad("ssl_ca_certs needs rediss://")
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
        raise _bad("the options after '?' must be name=value, separated by '&'") from error
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
        raise _bad("objects=s3://bucket/prefix is missing or does not have this form")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise _bad(
            "give the credentials of the bucket in AWS_* variables and its address in endpoint="
        )
    segments = [segment for segment in parts.path.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise _bad("the bucket's prefix must not contain '.' or '..'")
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
        raise _bad("give the credentials of the bucket in AWS_* variables, not in endpoint")


def _bad(what: str) -> InvalidInput:
    return InvalidInput(
        f"the registry's URL is invalid: {what} (example: {_EXAMPLE})", reason="BAD_REGISTRY"
    )
