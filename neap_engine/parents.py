"""Routers of files that a calibration goes on from."""

from pathlib import Path

from calibrator_service.calibration.parent import Parent
from calibrator_service.calibration.spec import ParentRouter
from shared.digests import digest_of
from shared.errors import PreconditionFailed
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.ladder.folder import read_router_folder
from shared.registry.contents import encode_manifest


def read_parent(folder: Path | str, *, share: float = 1.0) -> Parent:
    """The router that `CalibrationResult.save` or `neap routers export` has written, for `calibrate(..., parent=)`.

    `share`: how much a token counts that it learned from, against one of the new text, in (0, 1]. Raises `NotFound`,
    `Corrupt`, `InvalidInput` (BAD_SPEC), and `PreconditionFailed` (NO_STATISTICS) if the folder has no statistics.
    """
    manifest, blobs = read_router_folder(Path(folder), with_statistics=True)
    if STATISTICS_BLOB not in blobs:
        raise PreconditionFailed(
            f"{folder} has no {STATISTICS_BLOB}, so no calibration can go on from it: calibrate anew, or export the "
            "router with it",
            reason="NO_STATISTICS",
        )
    manifest.pop("blobs", None)
    # The digest that the router has in every registry.
    digest = digest_of(encode_manifest(manifest, blobs))
    router = ParentRouter(manifest_digest=digest, share=share)
    return Parent.read(Path(folder) / STATISTICS_BLOB, router)
