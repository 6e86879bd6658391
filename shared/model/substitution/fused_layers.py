"""Replaces the forward of each decoder layer by one op, if the op gives the same bits for a layer of its kind."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UnsupportedModel
from shared.model.borders import NUM_CHECKED, context_limit, origins
from shared.model.cache import ContiguousCache, refuse_if_out_of_memory
from shared.model.cache_argument import with_cache
from shared.model.layer_kinds import LayerKinds, layer_kinds, only_first_layers
from shared.model.parts import find_layers
from shared.model.substitution.layer import FusedLayer
from shared.model.substitution.match import Unsuitable
from shared.model.substitution.plan import plan
from shared.model.substitution.reversible import Substitutions
from shared.model.substitution.trace import Call, by_name, watch
from shared.model.weights.lazy import lazy

# Tokens per pass of the comparison: a prompt, one token, several tokens, each after the tokens of the passes before.
PASSES = (5, 1, 3)
assert sum(PASSES) == NUM_CHECKED


def substitute_layers(run: Substitutions, ids: Tensor, kv_dtype: torch.dtype, proven: dict[str, Any]) -> int:
    """Fuses all layers that can be fused, and returns their number. `run.left_alone` says why the others cannot.

    `proven`: if it has "layers", what an earlier call for the same model has put there: the names of the layers that
    gave other bits, or are of the kind of one that did.

    `ids` [1, >= 9] int64: random tokens. `kv_dtype`: that of caches, over which bits are compared.
    To be called last, when the layers' modules and attention have been replaced and matmuls round as they will when
    the model serves: the bits that are compared are those that it will give.
    """
    config = run.model.config.get_text_config(decoder=True)
    try:
        path, layers = find_layers(run.model, config.num_hidden_layers)
    except UnsupportedModel as reason:
        run.left_alone["layers"] = reason.message
        return 0
    names = {layer: f"{path}.{index}" for index, layer in enumerate(layers)}
    candidates: dict[nn.Module, FusedLayer] = {}
    handed_on_by: dict[Any, int] = {}
    for layer, call in _calls(run, list(layers), ids[:, :3]).items():
        try:
            candidates[layer] = FusedLayer(layer, plan(layer, watch(layer, run.substitutes, call), handed_on_by))
        except Unsuitable as reason:
            run.left_alone[names[layer]] = f"not one op: {reason}"
    if "layers" not in proven:
        foreign = [layer for layer, fused in candidates.items() if not _is_of(layer, fused, run)]
        proven["layers"] = {
            names[layer]: "not one op: the op reads something else than its weights" for layer in foreign
        }
        for layer in foreign:
            del candidates[layer]
        kinds = _kinds(run, layers, candidates)
        with only_first_layers(run.model, kinds):
            tried = {layer: candidates[layer] for layer in layers if layer in candidates}
            for place in origins(run.model.config, context_limit(run.model.config)):
                for layer, why in _find_disagreeing(run, tried, ids, kv_dtype, place).items():
                    proven["layers"] |= dict.fromkeys(kinds.alike(names[layer]), f"not one op: {why}")
                    del tried[layer]
    run.left_alone |= proven["layers"]
    candidates = {layer: f for layer, f in candidates.items() if names[layer] not in proven["layers"]}
    for layer, fused in candidates.items():
        layer.forward = fused.forward
        run.undo.append(partial(_unfuse, layer, fused))
    return len(candidates)


def _is_of(layer: nn.Module, fused: FusedLayer, run: Substitutions) -> bool:
    """Whether what an op reads is what the layer's modules have packed, or a vector that is a parameter of theirs."""
    assert fused.plan is not None
    recipes = (run.substitutes[module].recipe for module in layer.modules() if module in run.substitutes)
    own = {tensor.data_ptr() for recipe in recipes for tensor in _tensors(recipe)}
    vectors = (*layer.parameters(), *layer.buffers())
    own |= {vector.data_ptr() for vector in vectors if vector.dim() == 1 and lazy(vector) is None}
    weights = fused.plan.weights
    read = (*weights.norms, *weights.packed, *weights.biases, *weights.ends)
    return all(not tensor.numel() or tensor.data_ptr() in own for tensor in read)


def _tensors(recipe: object) -> Iterator[Tensor]:
    """Those in the fields of a recipe, and of recipes in it."""
    if isinstance(recipe, Tensor):
        yield recipe
    elif is_dataclass(recipe):
        for field in fields(recipe):
            yield from _tensors(getattr(recipe, field.name))


def _kinds(run: Substitutions, layers: nn.ModuleList, candidates: Mapping[nn.Module, FusedLayer]) -> LayerKinds:
    """Layers of one kind whose ops have one form."""
    plans = (candidates[layer].plan if layer in candidates else None for layer in layers)
    forms = [None if plan is None else plan.form for plan in plans]
    kinds = layer_kinds(run.model)
    assert kinds is not None
    return kinds.told_apart_by(forms)


def _unfuse(layer: nn.Module, fused: FusedLayer) -> None:
    fused.disable()
    if vars(layer).get("forward") == fused.forward:  # if not, a gate calls it and continues to
        del vars(layer)["forward"]


def _calls(run: Substitutions, layers: list[nn.Module], ids: Tensor) -> dict[nn.Module, Call]:
    """The arguments with which the model calls each of its layers in a pass over `ids`."""
    calls: dict[nn.Module, Call] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer] = by_name(type(layer), args, kwargs)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        _pass(run, ContiguousCache(ids.shape[1]), ids, 0)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _pass(run: Substitutions, cache: ContiguousCache, ids: Tensor, base: int) -> None:
    cache.begin(base, ids.shape[1])
    model = run.model.base_model
    model(input_ids=ids, **with_cache(model, cache), use_cache=True)


def _find_disagreeing(
    run: Substitutions, candidates: dict[nn.Module, FusedLayer], ids: Tensor, kv_dtype: torch.dtype, place: int
) -> dict[nn.Module, str]:
    """Runs the model at positions from `place` on and, beside each layer, its candidate over a second cache. Returns
    the layers whose candidate differs, and how."""
    refuted: dict[nn.Module, str] = {}
    cache, twin = (ContiguousCache(sum(PASSES), kv_dtype) for _ in range(2))
    cache.origin = twin.origin = place

    def compare(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
        try:
            args, kwargs = by_name(type(layer), args, kwargs)
            named = {name: twin if value is cache else value for name, value in kwargs.items()}
            out = candidates[layer].fused(args, named)
        except RuntimeError as error:
            refuse_if_out_of_memory(error)
            refuted[layer] = f"the op refuses it: {error}"
            return
        if out is None:
            refuted[layer] = "is called with arguments that the op does not support"
        elif not torch.equal(out, expected):
            refuted[layer] = f"the op computes something else at positions from {place} on"

    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in candidates]
    try:
        base = 0
        for count in PASSES:
            twin.begin(base, count)
            _pass(run, cache, ids[:, base : base + count], base)
            base += count
    finally:
        for hook in hooks:
            hook.remove()
    for layer, fused in candidates.items():
        index = fused.layer_idx
        tensors = ((cache.keys, twin.keys), (cache.values, twin.values))
        if layer not in refuted and not all(torch.equal(a[index], b[index]) for a, b in tensors):
            refuted[layer] = "the op writes other keys or values"
    return refuted
