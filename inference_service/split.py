"""Decides which requests of an alias its canary gets.
The choice is the same on every worker and for a repeated request."""

import hashlib

from shared.registry.base import Canary

_SCALE = 1000


def takes_canary(request_id: str, model_id: str, alias: str, canary: Canary) -> bool:
    """Return whether this request belongs to the canary's share.

    A keyed hash (BLAKE2b, RFC 7693) maps the request to one of 1000 places, and the canary has the first
    `share_per_mille` places. A growing share therefore keeps its requests. The key consists of model, alias and canary
    version, so another rollout selects other requests, independently of this one.
    """
    scope = f"{model_id}\0{alias}\0{canary.version}".encode()
    # A BLAKE2b key has at most 64 bytes, and model ids may be longer.
    key = hashlib.blake2b(scope, digest_size=32).digest()
    digest = hashlib.blake2b(request_id.encode(), key=key, digest_size=8).digest()
    # 2**64 places folded onto 1000: the error is below 1e-16.
    return int.from_bytes(digest) % _SCALE < canary.share_per_mille
