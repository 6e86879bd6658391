"""Removals from a bucket that cannot happen late. The store itself refuses such a request after a given time.

A process may stand still between any check of its own and the removal, so a check cannot prevent a late removal. A
signed URL carries the time until which the store accepts it, and the store judges this by its own clock (AWS Signature
Version 4, query parameters).
"""

import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.store import S3Store

from shared.errors import Unavailable
from shared.timeouts import OBJECT_STORE_RECORD_S

_LONGEST = timedelta(days=7)
_REFUSED, _MISSING = 403, 404


def signed_removal(client: S3Store, path: str, before_s: float) -> tuple[str, float]:
    """Return the URL that removes an object, and its end in Unix seconds by the store's clock: at most `before_s`.

    Raises Unavailable (SWEEP_TOO_SLOW) if it cannot end that early, and the library's errors.
    """
    lasts = min(timedelta(seconds=int(before_s - time.time())), _LONGEST)
    if lasts >= timedelta(seconds=1):
        url: str = obstore.sign(client, "DELETE", path, lasts)
        query = parse_qs(urlsplit(url).query)
        # What the URL says counts, because the clock may have been set since it was read above.
        signed_at = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        ends_at_s = signed_at.timestamp() + int(query["X-Amz-Expires"][0])
        if ends_at_s <= before_s:
            return url, ends_at_s
    raise Unavailable(
        "the right to remove objects has run out, or this machine's clock is ahead of the object store's",
        reason="SWEEP_TOO_SLOW",
    )


def send_removal(url: str) -> bool:
    """Send a removal, once more if it fails. Returns False if the store refuses it. Raises OSError, HTTPException."""
    try:
        return _send(url)
    except (OSError, HTTPException):
        return _send(url)


def _send(url: str) -> bool:
    request = urllib.request.Request(url, method="DELETE")
    try:
        with urllib.request.urlopen(request, timeout=OBJECT_STORE_RECORD_S):
            return True
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (_REFUSED, _MISSING):
                return error.code == _MISSING
            raise
