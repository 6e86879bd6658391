"""Parses the URL of a registry in a bucket, with or without an index in Redis.

    s3://bucket[/prefix][?endpoint=URL][&region=NAME]
    redis://[user:password@]host[:6379][/database]?objects=s3://bucket[/prefix][&endpoint=URL][&region=NAME]

`rediss://` uses TLS (`&ssl_ca_certs=FILE` names a private authority). `redis+cluster://` and `rediss+cluster://` are a
cluster, found through any of its nodes. The client library reads the credentials of the bucket from the standard AWS_*
variables or from the instance; they are never part of the URL. The Redis user needs the permissions
`~neap:* +@read +@write +@scripting +@connection`.
"""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from shared.errors import InvalidInput

BUCKET_SCHEME = "s3"
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
_BUCKET_OPTIONS = ("endpoint", "region")
_REDIS_OPTIONS = ("objects", *_BUCKET_OPTIONS, "ssl_ca_certs")
_EXAMPLES = "s3://bucket/prefix, redis://host:6379/0?objects=s3://bucket/prefix"


@dataclass(frozen=True)
class RegistryAddress:
    """A parsed URL. `prefix` has no outer slashes.

    `redis_url`, "" without Redis, may contain a password, so it is left out of repr, logs and errors.
    """

    bucket: str
    prefix: str = ""
    redis_url: str = field(default="", repr=False)
    is_cluster: bool = False
    endpoint: str | None = None
    region: str | None = None
    ssl_ca_certs: str | None = None

    @classmethod
    def parse(cls, url: str) -> "RegistryAddress":
        """Parse a URL. Raises InvalidInput (BAD_REGISTRY), whose message repeats no part of the URL that may be
        secret."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise _bad("host or port cannot be read") from error
        if parts.scheme == BUCKET_SCHEME:
            options = _options(parts.query, _BUCKET_OPTIONS)
            _check_endpoint(options.get("endpoint"))
            bucket, prefix = _bucket(urlunsplit(parts._replace(query="")))
            return cls(bucket, prefix, "", False, **options)
        if parts.scheme not in REDIS_SCHEMES:
            raise _bad(f"the scheme must be one of {', '.join((BUCKET_SCHEME, *REDIS_SCHEMES))}")
        if not host:
            raise _bad("it has no host")
        if parts.fragment:
            # Happens if a password contains '#' that is not percent-encoded.
            raise _bad("it has a fragment; percent-encode '#', '?', '/' and '@' in passwords")
        options = _options(parts.query, _REDIS_OPTIONS)
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
            bucket, prefix, urlunsplit((transport, parts.netloc, f"/{database or 0}", "", "")), bool(kind), **options
        )


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise _bad("the options after '?' must be name=value, separated by '&'") from error
    options = dict(pairs)
    unknown = sorted(set(options) - set(known))
    if unknown or len(options) != len(pairs):
        raise _bad(f"the options are {', '.join(known)}, each at most once")
    empty = sorted(name for name, value in options.items() if not value)
    if empty:
        raise _bad(f"{empty[0]} is empty")
    return options


def _bucket(text: str) -> tuple[str, str]:
    parts = urlsplit(text)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise _bad("s3://bucket/prefix is missing or does not have this form")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise _bad("give the credentials of the bucket in AWS_* variables and its address in endpoint=")
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
    return InvalidInput(f"the registry's URL is invalid: {what} (examples: {_EXAMPLES})", reason="BAD_REGISTRY")
