"""A manifest as calibration writes it: that of the demo model's router, without what its registry added."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "bench" / "router" / "manifest.json"


def real_manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    manifest.pop("blobs", None)
    return manifest
