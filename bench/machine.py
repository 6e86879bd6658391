"""A one-line description of the machine, as bench/RESULTS.md has it beside every table."""

import platform
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
    return ", ".join([*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}"])


def _driver(uuid: str) -> str:
    """The driver's version, the GPU's highest SM clock and its power limit."""
    # By UUID: nvidia-smi's indices differ from torch's if CUDA_VISIBLE_DEVICES hides devices.
    fields = "driver_version,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not known"
    return answer.stdout.strip()
