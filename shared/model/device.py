"""Checks that this process can use a device, before a model is loaded for it."""

import torch

from shared.errors import InvalidInput, PreconditionFailed


def check_device(name: str) -> None:
    """Raises `InvalidInput` (reason BAD_DEVICE) for a name that is no device, `PreconditionFailed` (DEVICE_UNAVAILABLE)
    with the reason if this process cannot use it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"device is {name!r}; it must be cpu or cuda", reason="BAD_DEVICE") from error
    try:
        torch.empty(1, device=device)
    # torch raises an AssertionError where it is built without CUDA.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).partition("\n")[0]
        raise PreconditionFailed(f"the device {name} cannot be used: {why}", reason="DEVICE_UNAVAILABLE") from error
