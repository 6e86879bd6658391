"""The moments of all exits of a calibration, with a file from which a run that was killed continues."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from shared.errors import Corrupt
from shared.tensor_parts import take_part

SAVE_INTERVAL_S = 120.0


class Sums:
    """Moments by exit depth, of the first `num_chunks` chunks of a text. `final` as in `Moments.add`."""

    def __init__(
        self,
        layouts: Mapping[int, MomentsLayout],
        final: Callable[[Tensor], Tensor],
        device: torch.device,
        path: Path | None = None,
    ) -> None:
        """Goes on from the file `path`, if there is one. Raises `Corrupt` if it cannot be read."""
        self.moments = {depth: Moments(layout, device) for depth, layout in layouts.items()}
        self.num_chunks = 0
        self._final, self._path, self._saved_s = final, path, time.monotonic()
        if path is not None and path.exists():
            self._load(path)

    def add(self, chunk: StateChunk) -> None:
        """Adds the next chunk, and writes the file if it is time. Raises as `write_atomically`."""
        for moments in self.moments.values():
            moments.add(chunk, self._final)
        self.num_chunks += 1
        if self._path is not None and time.monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Writes the file. Raises as `write_atomically`."""
        if self._path is None:
            return
        tensors = {
            f"{depth}.{name}": tensor
            for depth, moments in self.moments.items()
            for name, tensor in moments.to_tensors(with_positions=True).items()
        }
        tensors["num_chunks"] = torch.tensor([self.num_chunks])
        write_atomically(self._path, save(tensors))
        self._saved_s = time.monotonic()

    def _load(self, path: Path) -> None:
        try:
            tensors = load(path.read_bytes())
            self.num_chunks = int(tensors.pop("num_chunks"))
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise Corrupt(f"{path.name} does not hold the sums of this calibration") from error
        for depth, moments in self.moments.items():
            part = take_part(tensors, str(depth))
            self.moments[depth] = Moments.from_tensors(part, moments.layout, moments.device)
