"""Which requests of an alias its canary gets: the same ones on every worker, and again when a request is repeated."""

import hashlib

from shared.registry.base import Canary

_SCALE = 1000


def takes_canary(request_id: str, model_id: str, alias: str, canary: Canary) -> bool:
    """Whether this request is among the canary's share.

    A keyed hash (BLAKE2b, RFC 7693) puts the request at one of 1000 places, of which the canary has the first ones: a share
    that grows keeps the requests it has. The key is model, alias and candidate, so that another rollout tries other requests
    first, and who is in one says nothing about who is in the next.
    """
    scope = f"{model_id}\0{alias}\0{canary.version}".encode()
    # The key may have 64 bytes at most, and model ids may be longer.
    key = hashlib.blake2b(scope, digest_size=32).digest()
    digest = hashlib.blake2b(request_id.encode(), key=key, digest_size=8).digest()
    # 2**64 places folded onto 1000: the error is below 1e-16.
    return int.from_bytes(digest) % _SCALE < canary.share_per_mille
