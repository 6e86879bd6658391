"""Makes the modules of a Hugging Face causal LM of any family run neap's CPU kernels.

*Verified substitution*: no module is replaced because of its name or its family. A candidate and its kernel run on the
same random input, and the module is replaced only if the results agree to 1e-5. This is done once for all modules with
the same `signature`, which differ in their weights only. The report names the modules that were not replaced. Decoder
layers that consist of replaced modules then become one op each, if the op gives the same bits (`fused_layers`). At the
end the logits of the model, with as many layers as show all kinds of them (`layer_kinds`), are compared with those
before. Modules stay in the model; only their `forward` changes. What an earlier start has proven of the same model,
build and machine is not proven again.

Weights that are still in a file (`shared.model.weights`) are packed in their own number format. Those of modules
without a kernel are read as float32.
"""

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared import ops
from shared.errors import UnsupportedModel
from shared.memory import trim_heap
from shared.model.borders import context_limit, origins
from shared.model.cache_argument import cache_argument, with_cache
from shared.model.layer_kinds import LayerKinds, layer_kinds, only_first_layers
from shared.model.remembered.facts import Facts
from shared.model.substitution import attention, rotary
from shared.model.substitution.experts import experts, one_expert_at_a_time, router
from shared.model.substitution.fused_layers import substitute_layers
from shared.model.substitution.layer import Hooks
from shared.model.substitution.linear import activation, embedding, gated_mlp, linear, norm, plain_norm
from shared.model.substitution.match import Unsuitable, relative_error
from shared.model.substitution.reversible import Substitutions
from shared.model.substitution.row_invariant import Callers, watched
from shared.model.weights.lazy import lazy, parts_side_by_side
from shared.model.weights.quantised import quantisation

# Largest relative error of logits. It is larger than that of a module, because tens of layers amplify the errors of the
# modules.
MODEL_TOLERANCE = 1e-3

_PROVEN = "substitution"  # the name of the fact
_UNDO = "_neap_undo"  # an attribute of the model, because a table of models would keep them alive


@dataclass(frozen=True)
class AccelerationReport:
    """What `accelerate` did. `left_alone` maps a module's name to the reason why it kept its own forward.

    `formats`: the number of packed matrices by the format of their numbers. `dequantised` maps a parameter's name to
    the reason why it was read as float32 although its file holds it in another format.
    """

    linears: int
    gated_mlps: int
    norms: int
    rotary: tuple[str, ...]  # Python modules whose `apply_rotary_pos_emb` runs the kernel
    attention: bool  # whether the model's attention is `contiguous_attention`
    layers: int  # decoder layers that run as one op over contiguous KV caches
    packed_bytes: int
    freed_bytes: int
    left_alone: Mapping[str, str]
    embeddings: int
    experts: int  # modules whose experts are multiplied one by one
    row_invariant: int  # modules that keep their own forward, with torch's functions made row-invariant
    formats: Mapping[str, int]
    dequantised: Mapping[str, str]


def accelerate(
    model: PreTrainedModel,
    kv_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    facts: Facts | None = None,
) -> AccelerationReport:
    """Makes a float32 model on a CPU run neap's kernels, in place. For inference only.

    `kv_dtype`: the dtype of the caches over which the model will run. `compute_dtype`: float32, or the dtype that
    matmuls round their inputs to once modules and logits have been compared in float32: bfloat16 with weights kept in
    bfloat16, int8 with GGUF's blocks. Whole layers are compared with this rounding. `facts`: what is known about this
    model; what is found out is added. Weights that are packed are freed: a `LazyWeight` takes their place, which
    dequantises the packed matrix when an operation reads it.

    Raises `ValueError` if the model is in training mode, is not float32 on the CPU, or is accelerated already;
    `PreconditionFailed` if the kernels are not built; and `UnsupportedModel` (reason ACCELERATION_MISMATCH), after
    undoing everything, if the logits of the whole model have changed.
    """
    ops.load()
    if hasattr(model, _UNDO):
        raise ValueError("the model is accelerated already")
    if model.training:
        raise ValueError("accelerate() is for inference: call model.eval() first")
    plain = quantisation(model.config) is None  # modules of other packages are left alone
    for name, parameter in model.named_parameters() if plain else ():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(f"{name} is {parameter.dtype} on {parameter.device}, want float32 on cpu")
    facts = facts or Facts()
    proven: dict[str, Any] = facts.values.get(_PROVEN, {})
    run = Substitutions(model, proven.get("modules"))
    with torch.no_grad():
        kinds = layer_kinds(model)
        with one_expert_at_a_time(model), only_first_layers(model, kinds):
            expected = None if proven else _logits_in_one_pass(model)
        try:
            with one_expert_at_a_time(model):
                _substitute_modules(run)
            files = tuple(_substitute_rotary(run))
            if expected is None:
                attends = _attend_as_proven(run, proven["attention"])
                _run_row_invariantly(run, proven["row invariant"])
            else:
                trim_heap()  # the model's own pass has dequantised weights, part by part
                with only_first_layers(model, kinds), watched(model) as calls:
                    attends, error = _substitute_attention(run, expected, calls)
                if callers := _named(run, calls, kinds):
                    _run_row_invariantly(run, callers)
                    with only_first_layers(model, kinds):
                        error = relative_error(_padded_logits(model), expected)
                if error > MODEL_TOLERANCE:
                    raise UnsupportedModel(
                        f"accelerated logits differ by {error:.1e} (relative) from the model's own",
                        reason="ACCELERATION_MISMATCH",
                    )
                proven = {
                    "modules": run.findings,
                    "attention": run.left_alone.get("attention"),
                    "row invariant": callers,
                }
            dequantised = _dequantise_the_rest(run)
            run.round_inputs(compute_dtype)
            ids = _random_ids(model, 1, 9)
            if is_hooked := Hooks(model.base_model.modules()).are_any():
                run.left_alone["layers"] = "their modules have hooks, which one op would not call"
            layers = substitute_layers(run, ids, kv_dtype, proven) if attends and not is_hooked else 0
        except BaseException:
            run.undo_all()
            raise
    facts.note(_PROVEN, proven)
    setattr(model, _UNDO, run.undo)
    return AccelerationReport(
        linears=run.counts["linear"],
        gated_mlps=run.counts["gated_mlp"],
        norms=run.counts["norm"],
        rotary=files,
        attention=attends,
        layers=layers,
        packed_bytes=run.packed_bytes,
        freed_bytes=run.freed_bytes,
        left_alone=dict(run.left_alone),
        embeddings=run.counts["embedding"],
        experts=run.counts["experts"],
        row_invariant=len(proven["row invariant"]),
        formats=dict(run.formats),
        dequantised=dequantised,
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
            run.attempt("gated_mlp", name, module, gated_mlp)
            # Attention blocks have three linear layers, too. They need no note: their layers are tried one by one
            # below.
            run.left_alone.pop(name, None)
    for name, module in modules:
        if module in run.consumed:
            continue
        if isinstance(module, nn.Linear):
            run.attempt("linear", name, module, linear)
        elif isinstance(module, Conv1D):
            run.attempt("linear", name, module, partial(linear, transposed=True))
        elif _is_norm_like(module):
            run.attempt("norm", name, module, norm)
        elif any(p.dim() > 2 for p in module.parameters(recurse=False)):
            run.attempt("experts", name, module, experts)
        elif not isinstance(module, nn.Embedding) and [p.dim() for p in module.parameters()] in ([2], [2, 1]):
            run.attempt("router", name, module, router)
            run.left_alone.pop(name, None)  # it may be anything
    replaced = {name for name, module in modules if module in run.substitutes}
    for name, module in modules:
        holders = accumulate(name.split("."), "{}.{}".format)
        if _has_nothing(module) and replaced.isdisjoint(holders):
            run.attempt("activation", name, module, activation)
            if module not in run.substitutes:
                run.attempt("norm", name, module, plain_norm)
            run.left_alone.pop(name, None)  # it may be anything
    for name, module in modules:
        # An embedding in memory of its own gains nothing. One whose weight is packed for the head shares that copy.
        if isinstance(module, nn.Embedding) and lazy(module.weight) is not None:
            run.attempt("embedding", name, module, embedding)


def _named(run: Substitutions, callers: Callers, kinds: LayerKinds | None) -> list[tuple[str, list[str]]]:
    """The names of modules that call torch's functions themselves, and of those like them in other layers, each with
    those of the parameters that it multiplies by. They are to run so that rows do not matter."""
    names = {module: name for name, module in run.model.named_modules()}
    return [
        (name, sorted(multiplied_by))
        for module, multiplied_by in callers.items()
        for name in (kinds.alike(names[module]) if kinds else [names[module]])
    ]


def _run_row_invariantly(run: Substitutions, callers: Iterable[tuple[str, list[str]]]) -> None:
    for name, multiplied_by in callers:
        run.run_row_invariantly(run.model.get_submodule(name), multiplied_by)


def _dequantise_the_rest(run: Substitutions) -> dict[str, str]:
    """Reads weights that are still in a file as float32.
    Returns those whose own format is another one, and why they were dequantised."""
    dequantised: dict[str, str] = {}
    for name, module in run.model.named_modules():
        for key, parameter in list(module._parameters.items()):
            stored = lazy(parameter)
            if stored is None or stored.memory:
                continue
            if isinstance(module, nn.Embedding):  # its own forward looks rows up in the packed matrix
                run.pack(module)
                continue
            run.dequantise(name, module, key)
            if stored.format != "float32":
                dequantised[f"{name}.{key}"] = run.left_alone.get(name, "no kernel reads it")
    return dequantised


def _is_norm_like(module: nn.Module) -> bool:
    shapes = [p.dim() for p in module.parameters(recurse=False)]
    return not list(module.children()) and bool(shapes) and max(shapes) == 1


def _has_nothing(module: nn.Module) -> bool:
    return not [*module.children(), *module.parameters(), *module.buffers()]


def _substitute_rotary(run: Substitutions) -> Iterator[str]:
    for file in sorted({type(module).__module__ for module in run.model.modules()}):
        if not rotary.has_rotary(file):
            continue
        try:
            rotary.acquire(file)
        except Unsuitable as reason:
            run.left_alone[f"{file}.{rotary.FUNCTION}"] = str(reason)
            continue
        release = weakref.finalize(run.model, rotary.release, file)  # also if `restore` is never called
        release.atexit = False
        run.undo.append(release)
        yield file


def _substitute_attention(run: Substitutions, expected: Tensor, calls: Callers) -> tuple[bool, float]:
    """Whether the model runs neap's attention, and the error of its logits with the attention that it runs.
    `calls`: what has been watched, which is to be that of this attention alone."""
    model, before = run.model, run.model.config._attn_implementation
    if not model._can_set_attn_implementation():
        run.left_alone["attention"] = "the family does not use transformers' AttentionInterface"
        return False, relative_error(_padded_logits(model), expected)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    run.undo.append(partial(model.set_attn_implementation, before))
    try:
        error = relative_error(_padded_logits(model), expected)
        reason = f"logits differ by {error:.1e} (relative)"
    except NotImplementedError as refusal:
        error, reason = float("inf"), str(refusal)
    if error <= MODEL_TOLERANCE:
        return True, error
    model.set_attn_implementation(before)
    run.left_alone["attention"] = reason
    calls.clear()
    return False, relative_error(_padded_logits(model), expected)


def _attend_as_proven(run: Substitutions, reason: str | None) -> bool:
    """Whether the model runs neap's attention. `reason`: why it cannot, if it cannot."""
    if reason is not None:
        run.left_alone["attention"] = reason
        return False
    attention.register()
    run.undo.append(partial(run.model.set_attn_implementation, run.model.config._attn_implementation))
    run.model.set_attn_implementation(attention.NAME)
    return True


def _random_ids(model: PreTrainedModel, *shape: int) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def _padded_inputs(model: PreTrainedModel, part: slice) -> dict[str, Tensor]:
    """Part of random sequences [R, 7], the second one left-padded.
    If the model takes positions, there is one across each border."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    late = origins(model.config, context_limit(model.config), 7)[1:] if takes_positions else ()
    ids = _random_ids(model, 2 + len(late), 7)
    seen = torch.ones_like(ids)
    seen[1, :2] = 0
    inputs = {"input_ids": ids[:, part], "attention_mask": seen[:, : part.stop]}
    if late:
        positions = torch.tensor([[place] for place in (0, 0, *late)]) + torch.arange(7)
        inputs["position_ids"] = positions[:, part]
    return inputs


def _logits_in_one_pass(model: PreTrainedModel) -> Tensor:
    """The logits [R, 7, V] of `_padded_inputs`, without a cache."""
    with parts_side_by_side():
        logits: Tensor = model(**_padded_inputs(model, slice(0, 7)), use_cache=False).logits
    logits[1, :2] = 0  # the logits of padding are arbitrary
    return logits


def _padded_logits(model: PreTrainedModel) -> Tensor:
    """The same in two passes. The last three tokens run over a cache."""
    first = model(**_padded_inputs(model, slice(0, 4)), use_cache=True)
    cache = first[cache_argument(model)]
    second = model(**_padded_inputs(model, slice(4, 7)), **with_cache(model, cache))
    logits: Tensor = torch.cat([first.logits, second.logits], dim=1)
    logits[1, :2] = 0
    return logits
