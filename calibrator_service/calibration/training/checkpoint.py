"""Where the training of heads stands, on disk, so that a run that was killed continues there."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from calibrator_service.calibration.files import write_atomically
from shared.errors import Corrupt
from shared.tensor_parts import take_part

SAVE_INTERVAL_S = 60.0


@dataclass(frozen=True)
class TrainingPlace:
    """The next chunk: the `chunk`-th of the `epoch`, in that epoch's order.
    `done`: share of the training that is done."""

    epoch: int = 0
    chunk: int = 0
    done: float = 0.0


class TrainingCheckpoint:
    """Weights and optimiser of a training, in one file. `path` None: nothing is kept."""

    def __init__(self, path: Path | None, heads: nn.ModuleDict, optimiser: torch.optim.Optimizer) -> None:
        self._path, self._heads, self._optimiser = path, heads, optimiser
        self._saved_s = time.monotonic()

    def load(self) -> TrainingPlace:
        """Restores weights and optimiser. The start if there is no file. Raises `Corrupt`."""
        if self._path is None or not self._path.exists():
            return TrainingPlace()
        try:
            with safe_open(self._path, framework="pt") as file:
                place = TrainingPlace(**json.loads((file.metadata() or {})["place"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._heads.load_state_dict(take_part(tensors, "head"))
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in take_part(tensors, "optimiser").items():
                number, field = name.split(".")
                state.setdefault(int(number), {})[field] = tensor
            groups = self._optimiser.state_dict()["param_groups"]
            self._optimiser.load_state_dict({"state": state, "param_groups": groups})
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise Corrupt(f"{self._path.name} is not a checkpoint of this training") from error
        return place

    def save(self, place: TrainingPlace) -> None:
        """Writes the file, if SAVE_INTERVAL_S have passed since it was last written."""
        if self._path is None or time.monotonic() - self._saved_s < SAVE_INTERVAL_S:
            return
        tensors = {f"head.{name}": t for name, t in self._heads.state_dict().items()}
        for number, fields in self._optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{field}": t for field, t in fields.items()}
        on_host = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        write_atomically(self._path, save(on_host, {"place": json.dumps(vars(place))}))
        self._saved_s = time.monotonic()

    def delete(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
