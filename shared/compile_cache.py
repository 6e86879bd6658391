"""Keeps what compilers of GPU code have made for the next start. By default it is in /tmp, which a container loses."""

import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

import structlog

log = structlog.get_logger("neap.model")

# The folders of torch.compile, of Triton, and of the driver, which compiles PTX for GPUs that the library has no
# machine code for. Each is read when the first of its kind is compiled.
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "driver"}


def keep_compiled(folder: Path, most_bytes: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Name places below `folder` in the environment, unless others are named there. If older versions have left more
    than `most_bytes`, all is made anew. The compilers check by themselves what an entry was made from."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > most_bytes:
            shutil.rmtree(folder)
            folder.mkdir()
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        log.warning("compiled code is not kept for the next start", error=str(error))
        return
    for name, part in VARIABLES.items():
        environment.setdefault(name, str(folder / part))
