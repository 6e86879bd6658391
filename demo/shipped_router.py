"""The router in bench/router, which was made for the demo's model: how it gets into a registry."""

import json
import subprocess
import sys
from pathlib import Path

from shared.errors import Unavailable

FOLDER = Path(__file__).parents[1] / "bench" / "router"
IMPORT_TIMEOUT_S = 120


def is_of_model(fingerprint: str) -> bool:
    """Return whether the router belongs to the model with this fingerprint."""
    manifest = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
    return bool(manifest["model"]["fingerprint"] == fingerprint)


def import_shipped(model_id: str, alias: str, data_dir: Path) -> None:
    """Publish the router in the registry of `data_dir`, or find it published, and point `alias` at it.
    Raises Unavailable."""
    # `neap routers import` in a process of its own: it needs torch, whose memory is free again afterwards.
    command = [sys.executable, "-m", "neap_engine.cli.main", "routers", "import", str(FOLDER)]
    command += ["--model", model_id, "--alias", alias, "--data-dir", str(data_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"the shipped router cannot be imported: {last}", reason="IMPORT_FAILED")
