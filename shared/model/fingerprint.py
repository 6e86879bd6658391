"""The identity of a base model. A router is served only with the model that it was calibrated for."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.cpus import usable_cpus
from shared.memory import trim_heap
from shared.model.parts import setting_of
from shared.model.weights.lazy import lazy
from shared.model.weights.quantised import is_plain, quantised_digest

# Matrices that are hashed at once. Each takes a few times its bytes, because it is read and rounded.
MAX_AT_ONCE = 4
# Matrices are packed meanwhile, and what was read lies free between them. It is given back after so many numbers.
TRIM_NUMBERS = 1 << 24

# The settings that change what a set of weights computes. Not the whole config, because its defaults differ between
# versions of transformers, and the fingerprint must not depend on the version that loaded the model.
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
# Those of some families alone. They count where they are set, so that other models keep their fingerprint.
SOME_KEYS = (
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "query_pre_attn_scalar"),
    *("residual_multiplier", "embedding_multiplier", "attention_multiplier", "attention_bias_scale", "clip_qkv"),
    *("partial_rotary_factor", "rotary_dim", "rope_local_base_freq", "norm_eps", "norm_epsilon"),
    *("norm_topk_prob", "routed_scaling_factor", "hidden_activation", "activation_function", "use_parallel_residual"),
    *("new_decoder_architecture", "parallel_attn", "alibi"),
)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash "sha256:<hex>" of architecture and weights.

    Weights are hashed as bfloat16, so that a checkpoint has one fingerprint whatever format it is kept in. Those of a
    `LazyWeight` are read or dequantised a few matrices at a time. A model that another package has quantised is hashed
    with its quantised numbers, too.
    """
    config = model.config.get_text_config(decoder=True)
    functional = {key: setting_of(config, key) for key in FUNCTIONAL_KEYS}
    some = {key: value for key in SOME_KEYS if (value := setting_of(config, key)) is not None}
    kinds = getattr(config, "layer_types", None) or ()
    some |= {"layer_types": list(kinds)} if len(set(kinds)) > 1 else {}
    identity = {"architecture": type(model).__name__, "functional": functional} | ({"some": some} if some else {})
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    parameters = sorted(
        ((n, p) for n, p in model.named_parameters() if p.is_floating_point() and is_plain(p)), key=lambda item: item[0]
    )
    untrimmed = 0
    with ThreadPoolExecutor(min(usable_cpus(), MAX_AT_ONCE)) as pool:
        for (name, parameter), part in zip(
            parameters, pool.map(_tensor_digest, (tensor for _, tensor in parameters)), strict=True
        ):
            digest.update(f"{name} {list(parameter.shape)} ".encode() + part)
            untrimmed += parameter.numel()
            if untrimmed >= TRIM_NUMBERS:
                trim_heap()
                untrimmed = 0
    digest.update(quantised_digest(model, model.config))
    return f"sha256:{digest.hexdigest()}"


def _tensor_digest(tensor: Tensor) -> bytes:
    stored, digest = lazy(tensor), hashlib.sha256()
    parts = [tensor.detach().to(torch.bfloat16)] if stored is None else stored.rounded_parts()
    for part in parts:
        digest.update(part.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.digest()
