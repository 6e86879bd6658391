"""A frozen model with its parts, from a model that is already built."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shared.errors import UnsupportedModel
from shared.field_types import check_whole
from shared.model.borders import NUM_CHECKED, context_limit
from shared.model.dtypes import dtype_name, rounded_to
from shared.model.fingerprint import Identity, fingerprint
from shared.model.generation_defaults import GenerationDefaults, eos_token_ids, generation_defaults, warn_of_rules
from shared.model.parts import ModelParts, find_parts
from shared.model.remembered.facts import Facts
from shared.model.substitution import attention
from shared.model.substitution.experts_on_gpu import GroupedExperts
from shared.model.weights.on_device import BlocksLinear
from shared.model.weights.quantised import quantisation

if TYPE_CHECKING:
    from shared.model.ranks.group import Ranks
    from shared.model.substitution.apply import AccelerationReport
    from shared.model.substitution.invariant import InvariantReport


log = structlog.get_logger("neap.model")


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model and its parts. `identity`: what identifies architecture and weights, independently of the dtype.

    `kv_dtype`: the dtype in which caches hold keys and values. `compute_dtype`: the one in which matrices are
    multiplied. `acceleration`: what of it runs on neap's CPU kernels; None if it was not accelerated. `invariance`:
    what of it gives a token the same bits in any company on a GPU; None if its products are the vendor's. `source`:
    where `load_model` read it, in `load_s` seconds; None for a model that was already built. `facts`: what is known
    about it. `defaults`: what its generation_config gives requests that ask for it. `ranks`: the processes that have
    its parts; None if this one has all of it.
    """

    model_id: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    parts: ModelParts
    identity: Identity
    context_length: int
    eos_token_ids: frozenset[int]
    kv_dtype: torch.dtype
    compute_dtype: torch.dtype
    acceleration: "AccelerationReport | None" = None
    invariance: "InvariantReport | None" = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults, compare=False, repr=False)
    source: str | None = None
    load_s: float = 0.0
    facts: Facts = field(default_factory=Facts, compare=False, repr=False)
    ranks: "Ranks | None" = None

    @property
    def num_layers(self) -> int:
        return self.parts.num_layers

    @property
    def hidden_size(self) -> int:
        return self.parts.hidden_size

    @property
    def vocabulary_size(self) -> int:
        return self.parts.vocabulary_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def fingerprint(self) -> str:
        """That of `identity`. Blocks until it is known. Raises what finding it out raises."""
        return self.identity.find()

    @property
    def text_fingerprint(self) -> str:
        """Identifies what decides the text that the model writes: `fingerprint`, and the dtype of matmuls if it is not
        the model's."""
        if self.compute_dtype == self.model.dtype:
            return self.fingerprint
        return f"{self.fingerprint}/{dtype_name(self.compute_dtype)}"

    @property
    def architecture(self) -> str:
        return type(self.model).__name__


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    model_id: str = "local",
    context_length: int | None = None,
    accelerate: bool = False,
    invariant: bool = False,
    identity: Identity | None = None,
    kv_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    facts: Facts | None = None,
) -> LoadedModel:
    """Freezes a model that is already built, and finds its parts.

    `accelerate`: whether a float32 model on a CPU runs on neap's kernels, with packed weights, and one on a GPU with
    merged products (`shared.model.substitution.merged_linear`). `invariant`: whether products and norms of one on a
    GPU are those that do not depend on a token's company (`shared.model.substitution.invariant`), which may take
    longer; those of a model in blocks always are. `identity`: its own, if it has one.
    `kv_dtype`: the dtype in which caches hold keys and values, rounded once when they are written; None: the one that
    the model computes in. `compute_dtype`: for an accelerated model, bfloat16 multiplies
    weights that are kept in bfloat16 by inputs rounded to it, and int8 multiplies GGUF's blocks by inputs rounded to 8
    bits. None: int8 if there are such blocks, else the one of the model. `facts`: what is known about this model,
    loaded in this way. It is not proven again. Raises `InvalidInput`, and `UnsupportedModel` (reason CONTEXT_TOO_SHORT;
    KV_DTYPE_NOT_SUPPORTED if the model's attention cannot read that dtype, COMPUTE_DTYPE_NOT_SUPPORTED if no matrix can
    be multiplied in that one).
    """
    model.requires_grad_(False).eval()
    parts = find_parts(model)
    limit = context_limit(model.config)
    if limit < NUM_CHECKED:
        raise UnsupportedModel(
            f"{model_id} holds {limit} tokens; one that holds fewer than {NUM_CHECKED} cannot be checked",
            reason="CONTEXT_TOO_SHORT",
        )
    if context_length is not None:
        check_whole("context_length", context_length, 2)
    warn_of_rules(model, model_id)
    facts = facts or Facts()
    identity = identity or Identity.of(fingerprint(model))
    kv_dtype = kv_dtype or model.dtype
    report, invariance = None, None
    if accelerate and model.device.type == "cpu" and model.dtype == torch.float32:
        report = _accelerate(model, model_id, kv_dtype, compute_dtype or torch.int8, facts)
    elif accelerate and model.device.type == "cuda":
        _merge(model, model_id)
        # Products with blocks do not depend on company anyway.
        in_blocks = any(isinstance(module, BlocksLinear | GroupedExperts) for module in model.modules())
        invariance = _invariant(model, model_id) if invariant or in_blocks else None
    possible = set(map(rounded_to, report.formats)) if report else set()
    compute_dtype = compute_dtype or (torch.int8 if torch.int8 in possible else model.dtype)
    if compute_dtype not in {model.dtype, *possible}:
        raise UnsupportedModel(
            f"{model_id} cannot be multiplied in {dtype_name(compute_dtype)}: only neap's kernels, on a CPU, multiply "
            "in another dtype than the model's: weights kept in bfloat16 in bfloat16, and the blocks of a .gguf file "
            "in int8",
            reason="COMPUTE_DTYPE_NOT_SUPPORTED",
        )
    if kv_dtype != model.dtype and model.config._attn_implementation != attention.NAME:
        raise UnsupportedModel(
            f"keys and values of {model_id} cannot be kept in {dtype_name(kv_dtype)}: only neap's own attention, on a "
            "CPU, reads them in another dtype than the model computes in, and this model runs "
            f"{model.config._attn_implementation!r} on {model.device}",
            reason="KV_DTYPE_NOT_SUPPORTED",
        )
    return LoadedModel(
        model_id=model_id,
        model=model,
        tokenizer=tokenizer,
        parts=parts,
        identity=identity,
        context_length=min(context_length or limit, limit),
        eos_token_ids=eos_token_ids(model, model_id, parts.vocabulary_size),
        defaults=generation_defaults(model, model_id),
        kv_dtype=kv_dtype,
        compute_dtype=compute_dtype,
        acceleration=report,
        invariance=invariance,
        facts=facts,
    )


def _accelerate(
    model: PreTrainedModel, model_id: str, kv_dtype: torch.dtype, compute_dtype: torch.dtype, facts: Facts
) -> "AccelerationReport | None":
    """What was replaced; None if a quantised model keeps its own modules."""
    from shared.model.substitution.apply import accelerate

    try:
        report = accelerate(model, kv_dtype, compute_dtype, facts)
    except UnsupportedModel as error:
        if quantisation(model.config) is None:
            raise
        # Modules that quantise activations turn differences in the last bit into large ones.
        log.warning("neap's kernels are not used", model_id=model_id, reason=str(error))
        return None
    log.info("accelerated", model_id=model_id, replaced=str(report))
    if report.dequantised:
        log.warning(
            "weights of modules without a kernel were dequantised to float32, which takes more memory",
            model_id=model_id,
            weights=dict(report.dequantised),
        )
    return report


def _merge(model: PreTrainedModel, model_id: str) -> None:
    from shared.model.substitution.merged_linear import merge_linears

    log.info("merged", model_id=model_id, products=merge_linears(model))
    torch.cuda.empty_cache()  # of the weights that were copied


def _invariant(model: PreTrainedModel, model_id: str) -> "InvariantReport":
    from shared.model.substitution.invariant import make_invariant

    report = make_invariant(model)
    log.info("products and norms do not depend on company", model_id=model_id, replaced=str(report))
    return report
