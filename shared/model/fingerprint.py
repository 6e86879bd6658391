"""The identity of a base model: what a router was calibrated for."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.cpus import usable_cpus

# What changes the function a set of weights computes. Not the whole config: its defaults differ between versions of
# transformers, and a router must not depend on which one loaded the model.
FUNCTIONAL_KEYS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "num_experts_per_tok",
)


def fingerprint(model: PreTrainedModel) -> str:
    """ "sha256:<hex>" over architecture and weights.

    Weights are hashed as bfloat16, so that one checkpoint has one fingerprint in whatever dtype it is loaded.
    """
    config = model.config.get_text_config(decoder=True)
    functional = {key: getattr(config, key, None) for key in FUNCTIONAL_KEYS}
    identity = {"architecture": type(model).__name__, "functional": functional}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    with ThreadPoolExecutor(usable_cpus()) as pool:
        for (name, parameter), part in zip(
            parameters, pool.map(_tensor_digest, (tensor for _, tensor in parameters)), strict=True
        ):
            digest.update(f"{name} {list(parameter.shape)} ".encode() + part)
    return f"sha256:{digest.hexdigest()}"


def _tensor_digest(tensor: Tensor) -> bytes:
    rounded = tensor.detach().to(torch.bfloat16).contiguous().cpu().view(torch.uint8)
    return hashlib.sha256(rounded.numpy().data).digest()
