"""Makes the modules of a Hugging Face causal LM of any family run neap's CPU kernels.

*Verified substitution*: no module is replaced because of its name or its family. Each candidate and its kernel run on the same random
input, and the module is replaced only if the results agree to 1e-5. The report names the modules that were not replaced. Decoder layers
that consist of replaced modules then become one op each, if the op gives the same bits (`fused_layers`). At the end the logits of the
whole model are compared with those before. Modules stay in the model; only their `forward` changes.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared import ops
from shared.errors import UnsupportedModel
from shared.model.substitution import attention, rotary
from shared.model.substitution.fused_layers import substitute_layers
from shared.model.substitution.linear import gated_mlp, linear, rms_norm
from shared.model.substitution.match import Unsuitable, relative_error
from shared.model.substitution.reversible import Substitutions

# Largest relative error of logits. It is larger than that of a module, because tens of layers amplify the errors of the modules.
MODEL_TOLERANCE = 1e-3

_UNDO = "_neap_undo"  # an attribute of the model, because a table of models would keep them alive


@dataclass(frozen=True)
class AccelerationReport:
    """What `accelerate` did. `left_alone` maps a module's name to the reason why it kept its own forward."""

    linears: int
    gated_mlps: int
    norms: int
    rotary: tuple[str, ...]  # Python modules whose `apply_rotary_pos_emb` runs the kernel
    attention: bool  # whether the model's attention is `contiguous_attention`
    layers: int  # decoder layers that run as one op over contiguous KV caches
    packed_bytes: int
    freed_bytes: int
    batch_invariant: (
        bool  # whether a pass of eight tokens gave the same bits as eight passes of one
    )
    left_alone: Mapping[str, str]


def accelerate(model: PreTrainedModel, *, keep_weights: bool = False) -> AccelerationReport:
    """Makes a float32 model on a CPU run neap's kernels, in place. For inference only.

    Weights that are packed and not shared are freed unless `keep_weights`: they become meta tensors, so `state_dict` keeps its keys, but
    the model cannot be saved until `restore`.

    Raises `ValueError` if the model is in training mode, is not float32 on the CPU, or is accelerated already; `PreconditionFailed` if
    the kernels are not built; and `UnsupportedModel` (reason ACCELERATION_MISMATCH), after undoing everything, if the logits of the whole
    model have changed.
    """
    ops.load()
    if hasattr(model, _UNDO):
        raise ValueError("the model is accelerated already")
    if model.training:
        raise ValueError("accelerate() is for inference: call model.eval() first")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}, want float32 on cpu"
            )
    run = Substitutions(model, keep_weights)
    with torch.no_grad():
        expected = _padded_logits(model)
        try:
            _substitute_modules(run)
            files = tuple(_substitute_rotary(run))
            error = relative_error(_padded_logits(model), expected)
            attends = _substitute_attention(run, expected)
            layers = substitute_layers(run, _random_ids(model, 1, 9)) if attends else 0
            invariant = error <= MODEL_TOLERANCE and _is_batch_invariant(model)
        except BaseException:
            run.step_back()
            raise
    if error > MODEL_TOLERANCE:
        run.step_back()
        raise UnsupportedModel(
            f"accelerated logits differ by {error:.1e} (relative) from the model's own",
            reason="ACCELERATION_MISMATCH",
        )
    setattr(model, _UNDO, run.undo)
    return AccelerationReport(
        linears=run.counts["linear"],
        gated_mlps=run.counts["gated_mlp"],
        norms=run.counts["rms_norm"],
        rotary=files,
        attention=attends,
        layers=layers,
        packed_bytes=run.packed_bytes,
        freed_bytes=run.freed_bytes,
        batch_invariant=invariant,
        left_alone=dict(run.left_alone),
    )


def restore(model: PreTrainedModel) -> None:
    """Undoes `accelerate`, and restores freed weights. Does nothing if the model is not accelerated."""
    undo = vars(model).pop(_UNDO, [])
    while undo:
        undo.pop()()


def _substitute_modules(run: Substitutions) -> None:
    modules = [(name, module) for name, module in run.model.named_modules() if name]
    for name, module in modules:
        if sum(type(child) is nn.Linear for child in module.children()) in (2, 3):
            run.attempt("gated_mlp", name, module, partial(gated_mlp, module))
            # Attention blocks have three linear layers, too. They need no note: their layers are tried one by one below.
            run.left_alone.pop(name, None)
    for name, module in modules:
        if module in run.consumed:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            transposed = isinstance(module, Conv1D)
            propose = partial(linear, module, transposed=transposed)
            run.attempt("linear", name, module, propose)
        elif _is_norm_like(module):
            run.attempt("rms_norm", name, module, partial(rms_norm, module))
        elif any(p.dim() > 2 for p in module.parameters(recurse=False)):
            run.left_alone[name] = "stores several matrices in one parameter (experts)"


def _is_norm_like(module: nn.Module) -> bool:
    shapes = [p.dim() for p in module.parameters(recurse=False)]
    return not list(module.children()) and bool(shapes) and max(shapes) == 1


def _substitute_rotary(run: Substitutions) -> Iterator[str]:
    for file in sorted({type(module).__module__ for module in run.model.modules()}):
        if not rotary.has_rotary(file):
            continue
        try:
            rotary.acquire(file)
        except Unsuitable as reason:
            run.left_alone[f"{file}.{rotary.FUNCTION}"] = str(reason)
            continue
        release = weakref.finalize(
            run.model, rotary.release, file
        )  # also if `restore` is never called
        release.atexit = False
        run.undo.append(release)
        yield file


def _substitute_attention(run: Substitutions, expected: Tensor) -> bool:
    model, before = run.model, run.model.config._attn_implementation
    if not model._can_set_attn_implementation():
        run.left_alone["attention"] = "the family does not use transformers' AttentionInterface"
        return False
    attention.register()
    model.set_attn_implementation(attention.NAME)
    reason = None
    try:
        error = relative_error(_padded_logits(model), expected)
        if error > MODEL_TOLERANCE:
            reason = f"logits differ by {error:.1e} (relative)"
    except NotImplementedError as refusal:
        reason = str(refusal)
    if reason is not None:
        model.set_attn_implementation(before)
        run.left_alone["attention"] = reason
        return False
    run.undo.append(partial(model.set_attn_implementation, before))
    return True


def _random_ids(model: PreTrainedModel, *shape: int) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def _padded_logits(model: PreTrainedModel) -> Tensor:
    """Logits [2, 7, V] of two random sequences, the second one left-padded. The last three tokens run over a cache."""
    ids = _random_ids(model, 2, 7)
    seen = torch.ones_like(ids)
    seen[1, :2] = 0
    first = model(input_ids=ids[:, :4], attention_mask=seen[:, :4], use_cache=True)
    second = model(input_ids=ids[:, 4:], attention_mask=seen, past_key_values=first.past_key_values)
    logits: Tensor = torch.cat([first.logits, second.logits], dim=1)
    logits[1, :2] = 0  # the logits of padding are arbitrary
    return logits


def _is_batch_invariant(model: PreTrainedModel) -> bool:
    """Whether the logits of 8 tokens after a prefix of 4 have the same bits in one pass as in 8 passes."""
    ids = _random_ids(model, 1, 12)
    cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    together = model(input_ids=ids[:, 4:], past_key_values=cache).logits
    cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    for index in range(8):
        alone = model(input_ids=ids[:, 4 + index : 5 + index], past_key_values=cache)
        if not torch.equal(alone.logits[:, 0], together[:, index]):
            return False
    return True
