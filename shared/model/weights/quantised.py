"""Checkpoints whose weights other packages have quantised: bitsandbytes, torchao, AWQ, GPTQ, compressed-tensors and
others.

Transformers loads them into modules of those packages, which keep their own forward.
"""

import hashlib
import json
import re
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shared.model.weights.lazy import LazyWeight

# Transformers calls a .gguf file a quantised checkpoint, too. Those are read by `shared.model.weights.gguf`.
GGUF = "gguf"


def quantisation(config: PreTrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised, such as "gptq". None for plain checkpoints and .gguf files."""
    settings = settings_of(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    name = str(getattr(method, "value", method) or "unknown")
    return None if name == GGUF else name


def quantised_digest(model: nn.Module, config: PreTrainedConfig) -> bytes:
    """A digest of the method, its settings and all numbers of a quantised model, whatever tensors its modules keep them
    in.

    Two quantisations of one model differ, and both differ from the model itself. Empty for other models.
    """
    method = quantisation(config)
    if method is None:
        return b""
    digest = hashlib.sha256(json.dumps(settings_of(config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
            for part in _plain_parts(tensor):
                data = part.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
                digest.update(data.numpy().data)
    return method.encode() + digest.digest()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an ordinary one, and not a subclass in which another package keeps quantised numbers."""
    return type(tensor) in (torch.Tensor, nn.Parameter, LazyWeight)


@torch.no_grad()
def dequantises(model: PreTrainedModel) -> bool:
    """Whether a model that was loaded from a quantised checkpoint keeps its weights in more bytes than the checkpoint
    does.

    Transformers dequantises the weights of some methods, such as fp8, on devices that their modules do not run on. Some
    packages, such as compressed-tensors, dequantise them when the model first runs; so this runs the model over one
    token, and raises what it raises.
    """
    before = _num_bytes(model)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return quantisation(model.config) is None or _num_bytes(model) > before


def _num_bytes(model: nn.Module) -> int:
    # `state_dict` may rearrange packed weights, as that of bitsandbytes does.
    tensors = chain(model.parameters(), model.buffers())
    return sum(part.nbytes for tensor in tensors for part in _plain_parts(tensor))


def missing_package(error: ImportError) -> str:
    """The name of the package that an error of transformers asks for."""
    if error.name:
        return error.name.partition(".")[0]
    installs = re.findall(r"pip install (?:-U |--upgrade )?[`'\"]?([A-Za-z0-9_.-]+)", str(error))
    quoted = re.findall(r"`([A-Za-z0-9_.-]+)`", str(error))
    return str([*installs, *quoted, "that its quantisation belongs to"][0])


def settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What the checkpoint says of its quantisation."""
    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None
    settings: dict[str, Any] = raw if isinstance(raw, dict) else raw.to_dict()
    return settings


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The ordinary tensors that a tensor subclass, such as torchao's, is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]
