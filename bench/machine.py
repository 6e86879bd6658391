"""A one-line description of the machine, as bench/RESULTS.md has it beside every table."""

import platform
import shutil
import subprocess
from datetime import date

import torch
import transformers


def described(device: str | torch.device) -> str:
    """Date, device, driver and versions. If the driver's data cannot be read, the line says "not known"."""
    kind = torch.device(device)
    parts = [str(date.today())]
    if kind.type == "cuda":
        parts += [
            torch.cuda.get_device_name(kind),
            f"driver {_driver(str(torch.cuda.get_device_properties(kind).uuid))}",
            f"CUDA {torch.version.cuda}",
        ]
    else:
        name = platform.processor() or platform.machine()
        parts.append(f"{name} {torch.get_num_threads()} threads")
    return ", ".join(
        [*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    )


def _driver(uuid: str) -> str:
    """The driver's version, the GPU's highest SM clock and its power limit, from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known (no nvidia-smi)"
    # By UUID: nvidia-smi's indices differ from torch's if CUDA_VISIBLE_DEVICES hides devices.
    device, fields = f"GPU-{uuid}", "driver_version,clocks.max.sm,power.limit"
    answer = subprocess.run(
        [tool, f"--id={device}", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() if answer.returncode == 0 else "not known (nvidia-smi failed)"
