"""The identity of a base model. A router is served only with the model that it was calibrated for."""

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.cpus import usable_cpus
from shared.errors import Unavailable
from shared.memory import TRIM_NUMBERS, trimmed
from shared.model.parts import setting_of
from shared.model.weights.files import keep_memory
from shared.model.weights.lazy import lazy
from shared.model.weights.quantised import is_plain, quantised_digest

# Matrices that are hashed at once. Each takes a few times its bytes, because it is read and rounded.
MAX_AT_ONCE = 4
# A smaller model is identified while it is loaded: that takes less than asking a registry for a router.
LARGE_NUMBERS = 1 << 24

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
    *("new_decoder_architecture", "parallel_attn", "alibi", "num_kv_shared_layers", "top_k_experts"),
)


class Identity:
    """The fingerprint of a model. It is found out when it is first asked for, by the thread that asks; others wait.
    `find_out` calls what it is given between its parts."""

    def __init__(self, find_out: Callable[[Callable[[], None]], str]) -> None:
        self._find_out: Callable[[Callable[[], None]], str] | None = find_out
        self._lock, self.is_given_up = threading.Lock(), False
        self.found: Future[str] = Future()  # never cancelled

    @classmethod
    def of(cls, known: str) -> "Identity":
        identity = cls(lambda _: known)
        identity.find()
        return identity

    @property
    def is_known(self) -> bool:
        return self.found.done() and self.found.exception() is None

    def find(self) -> str:
        """Blocks for seconds, the first time. Raises what finding it out has raised."""
        with self._lock:
            if self._find_out is not None:
                try:
                    self.found.set_result(self._find_out(self._go_on))
                except BaseException as error:
                    self.found.set_exception(error)
                self._find_out = None  # which holds the model's files open
        return self.found.result()

    def give_up(self) -> None:
        """Whoever finds it out, or asks for it later, soon gets `Unavailable`, unless it is known."""
        self.is_given_up = True

    def _go_on(self) -> None:
        if self.is_given_up:
            raise Unavailable("the model is closed before its fingerprint is known")


def is_large(model: PreTrainedModel) -> bool:
    """Whether most of the model's numbers are in files or packed, and they are so many that to hash them takes long.
    Others would be kept in memory until they are hashed."""
    numbers = {True: 0, False: 0}
    for parameter in model.parameters():
        numbers[lazy(parameter) is None] += parameter.numel()
    return numbers[True] < LARGE_NUMBERS <= numbers[False]


def pack_ahead(model: PreTrainedModel) -> None:
    """Packs what is multiplied from packed blocks, several matrices at once. Large ones, such as that of a vocabulary,
    come first: their numbers are in memory twice meanwhile."""
    each = {id(p): (p.numel(), matrix) for p in model.parameters() if (matrix := lazy(p)) is not None}
    stored = sorted(each.values(), key=lambda entry: entry[0] < TRIM_NUMBERS)
    untrimmed = 0
    with ThreadPoolExecutor(min(usable_cpus(), MAX_AT_ONCE), initializer=keep_memory) as pool:
        packing = pool.map(lambda matrix: matrix.pack_ahead(), (matrix for _, matrix in stored))
        for (count, _), _ in zip(stored, packing, strict=True):
            untrimmed = trimmed(untrimmed + count)


def fingerprint(model: PreTrainedModel) -> str:
    """`later_fingerprint`, at once."""
    return later_fingerprint(model)(lambda: None)


def later_fingerprint(model: PreTrainedModel) -> Callable[[Callable[[], None]], str]:
    """What finds out a hash "sha256:<hex>" of architecture and weights, those that the model has now.

    Weights are hashed as bfloat16, so that a checkpoint has one fingerprint whatever format it is kept in. Those of a
    `LazyWeight` are read or dequantised a few matrices at a time. A model that another package has quantised is hashed
    with its quantised numbers, too. One that is sharded has the fingerprint of the whole; all its ranks find it out.
    """
    config = model.config.get_text_config(decoder=True)
    functional = {key: setting_of(config, key) for key in FUNCTIONAL_KEYS}
    some = {key: value for key in SOME_KEYS if (value := setting_of(config, key)) is not None}
    kinds = getattr(config, "layer_types", None) or ()
    some |= {"layer_types": list(kinds)} if len(set(kinds)) > 1 else {}
    identity = {"architecture": type(model).__name__, "functional": functional} | ({"some": some} if some else {})
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    in_checkpoints = model.state_dict().keys()  # unlike buffers that are made of the configuration
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in in_checkpoints)
    parameters = sorted(
        (
            (name, tensor)
            for name, tensor in (*model.named_parameters(), *buffers)
            if tensor.is_floating_point() and (is_plain(tensor) or _is_sharded(tensor))
        ),
        key=lambda item: item[0],
    )
    # Ranks gather what is sharded one after another, in the same order.
    at_once = 1 if any(_is_sharded(parameter) for _, parameter in parameters) else MAX_AT_ONCE
    quantised = quantised_digest(model, model.config)

    def find_out(between: Callable[[], None]) -> str:
        def digest_of(tensor: Tensor) -> bytes:
            between()
            return _tensor_digest(tensor)

        untrimmed = 0
        with ThreadPoolExecutor(min(usable_cpus(), at_once)) as pool:
            for (name, parameter), part in zip(
                parameters, pool.map(digest_of, (tensor for _, tensor in parameters)), strict=True
            ):
                digest.update(f"{name} {list(parameter.shape)} ".encode() + part)
                untrimmed = trimmed(untrimmed + parameter.numel())
        digest.update(quantised)
        return f"sha256:{digest.hexdigest()}"

    return find_out


def _is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, which all ranks must gather together."""
    return hasattr(tensor, "full_tensor")


def _tensor_digest(tensor: Tensor) -> bytes:
    tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    stored, digest = lazy(tensor), hashlib.sha256()
    parts = [tensor.detach().to(torch.bfloat16)] if stored is None else stored.rounded_parts()
    for part in parts:
        digest.update(part.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.digest()
