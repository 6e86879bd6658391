"""The router that neap ships for the model of `neap demo`: where it lies, and how it gets into a registry."""

import json
import subprocess
import sys
from pathlib import Path

from shared.errors import Unavailable

# In an installed package (see shared/build_hook.py), and in a checkout.
PLACES = (Path(__file__).parents[1] / "shipped_router", Path(__file__).parents[2] / "bench" / "router")
MANIFEST = "manifest.json"
IMPORT_TIMEOUT_S = 120


def shipped_router(fingerprint: str) -> Path | None:
    """Return the folder of the shipped router; None if it belongs to another model than `fingerprint`, or is not
    installed."""
    for folder in PLACES:
        if (folder / MANIFEST).is_file():
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            return folder if manifest["model"]["fingerprint"] == fingerprint else None
    return None


def import_shipped(folder: Path, model_id: str, alias: str, data_dir: Path) -> None:
    """Publish the router in the registry of `data_dir`, or find it published, and point `alias` at it.
    Raises Unavailable."""
    # `neap routers import` in a process of its own: it needs torch, whose memory is free again afterwards.
    command = [sys.executable, "-m", "neap_engine.cli.main", "routers", "import", str(folder)]
    command += ["--model", model_id, "--alias", alias, "--data-dir", str(data_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"the shipped router cannot be imported: {last}", reason="IMPORT_FAILED")
