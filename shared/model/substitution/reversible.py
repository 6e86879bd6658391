"""The replacements made in one model, and how to undo them."""

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared import ops
from shared.errors import UnsupportedModel
from shared.memory import trimmed
from shared.model.dtypes import rounded_to
from shared.model.substitution.linear import MlpForm, pack_matrix, packable
from shared.model.substitution.match import Substitute, Unsuitable, signature
from shared.model.substitution.row_invariant import row_invariant
from shared.model.weights.lazy import LazyWeight, as_parameter, lazy
from shared.model.weights.quantised import is_plain
from shared.model.weights.stored import Stored


def noted(form: object) -> Any:
    """A substitute's form, as JSON can hold it."""
    if isinstance(form, MlpForm):
        return {"order": list(form.order), "activation": form.activation}
    return list(form) if isinstance(form, tuple) else form


def form_of(known: Any) -> object:
    """The form that was `noted`. Raises `Unsuitable` if it was refused."""
    if not isinstance(known, dict):
        return tuple(known) if isinstance(known, list) else known
    if "refused" in known:
        raise Unsuitable(known["refused"])
    return MlpForm(tuple(known["order"]), known["activation"])


class Propose(Protocol):
    """Returns the substitute of a module, or raises `Unsuitable`.
    `form`: that of a module with the same signature, if there was one."""

    def __call__(self, module: nn.Module, *, form: object | None = None) -> Substitute: ...


class Substitutions:
    """The state of one call of `accelerate`: counts of what it replaced, and the steps that undo it.

    `proven`: the `findings` of an earlier call for the same model. `left_alone` maps a module's name to the reason why
    it kept its own forward. `consumed`: modules that need no replacement any more.
    """

    def __init__(self, model: PreTrainedModel, proven: dict[str, Any] | None = None) -> None:
        self.model = model
        self._proven = proven or {}
        # By kind and name of a module: its form, or why it has none. JSON can hold it.
        self.findings: dict[str, Any] = {}
        self.undo: list[Callable[[], object]] = []
        self.left_alone: dict[str, str] = {}
        self.consumed: set[nn.Module] = set()
        self.substitutes: dict[nn.Module, Substitute] = {}
        kinds = ("linear", "gated_mlp", "norm", "activation", "embedding", "router", "experts")
        self.counts = dict.fromkeys(kinds, 0)
        self.formats: dict[str, int] = {}
        self.freed_bytes = 0
        # Numbers that were packed since the heap was trimmed.
        self._untrimmed = 0
        self._forms: dict[Hashable, object] = {}
        self._refusals: dict[Hashable, str] = {}
        self._packed: dict[int, Tensor] = {}
        self._by_format: dict[str, list[Tensor]] = {}
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}
        pointers: dict[int, set[int]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                self._users.setdefault(id(parameter), []).append((module, name))
                if lazy(parameter) is None and is_plain(parameter):
                    pointer = parameter.untyped_storage().data_ptr()
                    pointers.setdefault(pointer, set()).add(id(parameter))
        # Parameters that are views of the same memory: freeing one of them frees nothing.
        self._shared = {p for same in pointers.values() if len(same) > 1 for p in same}

    @property
    def packed_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._packed.values())

    def attempt(self, kind: str, name: str, module: nn.Module, propose: Propose) -> None:
        """Replaces the forward of `module` by what `propose` returns, or notes the reason why it raised `Unsuitable`.

        Only the first one of modules with the same signature is compared with its substitute, and none that has been
        compared before.
        """
        place = f"{kind} {name}"
        known, key = self._proven.get(place), None
        try:
            if known is not None:
                substitute = propose(module, form=form_of(known))
            else:
                key = (kind, signature(module))
                if key in self._refusals:
                    raise Unsuitable(self._refusals[key])
                substitute = propose(module, form=self._forms.get(key))
                self._forms[key] = substitute.form
            self.findings[place] = noted(substitute.form)
        except Unsuitable as reason:
            if key is not None:
                self._refusals[key] = str(reason)
            self.left_alone[name] = str(reason)
            self.findings[place] = {"refused": str(reason)}
            return
        self.left_alone.pop(name, None)
        self.undo.append(partial(_set_forward, module, vars(module).get("forward")))
        module.forward = substitute.forward
        self.substitutes[module] = substitute
        self.counts[kind] += 1
        self.consumed.add(module)
        for (source, parameter), stored in zip(substitute.sources, substitute.packed, strict=True):
            self.consumed.add(source)
            self._keep(source, parameter, stored)

    def _keep(self, source: nn.Module, parameter: str, stored: Stored) -> None:
        """Notes what was packed, and frees the unpacked `parameter` of `source`.
        A `LazyWeight` takes its place in all modules that use it."""
        if any(packed.data_ptr() not in self._packed for packed in stored.memory):
            self.formats[stored.format] = self.formats.get(stored.format, 0) + 1
            self._by_format.setdefault(stored.format, []).extend(stored.memory)
        self._packed |= {packed.data_ptr(): packed for packed in stored.memory}
        weight = source.get_parameter(parameter)
        if _is_packed(weight):
            return
        if not self._proven and not torch.equal(stored.ends(), _ends(weight, stored.transposed)):
            raise UnsupportedModel(
                f"the packed {parameter} of a {type(source).__name__} has other numbers than the model's",
                reason="ACCELERATION_MISMATCH",
            )
        self._untrimmed = trimmed(self._untrimmed + weight.numel())
        if id(weight) in self._shared:
            return
        if lazy(weight) is None:
            self.freed_bytes += weight.nbytes
        self._set_weight(weight, as_parameter(LazyWeight(stored)))
        self.undo.append(partial(self._restore, source, parameter, weight.requires_grad))

    def round_inputs(self, dtype: torch.dtype) -> None:
        """Makes matmuls round their inputs to `dtype`, where the format of the weights allows it."""
        for format_name, matrices in self._by_format.items():
            for packed in matrices if rounded_to(format_name) == dtype else ():
                ops.round_inputs_(packed)

    def run_row_invariantly(self, module: nn.Module, multiplied_by: Iterable[str]) -> None:
        """Runs the module's own forward under `RowInvariant`, and packs those of its matrices that it multiplies by."""
        for name in multiplied_by:
            with suppress(Unsuitable):
                packable(module.get_parameter(name))
                self.pack(module, name)
        self.undo.append(partial(_set_forward, module, vars(module).get("forward")))
        module.forward = row_invariant(module.forward)

    def pack(self, module: nn.Module, parameter: str = "weight") -> None:
        """Packs a matrix of a module that keeps its own forward."""
        weight = module.get_parameter(parameter)
        if not _is_packed(weight):
            self._keep(module, parameter, pack_matrix(weight.detach()))

    def dequantise(self, name: str, module: nn.Module, parameter: str) -> None:
        """Reads a parameter whose module has no substitute into memory as float32."""
        weight = module.get_parameter(parameter)
        stored = lazy(weight)
        assert stored is not None
        self._set_weight(weight, as_parameter(stored.dequantised()))

    def _restore(self, source: nn.Module, parameter: str, requires_grad: bool) -> None:
        weight = source.get_parameter(parameter)
        stored = lazy(weight)
        if stored is not None:
            plain = nn.Parameter(stored.dequantised(), requires_grad=requires_grad)
            self._set_weight(weight, plain)

    def _set_weight(self, old: nn.Parameter, new: nn.Parameter) -> None:
        users = self._users.pop(id(old))
        for module, name in users:
            setattr(module, name, new)
        self._users[id(new)] = users

    def undo_all(self) -> None:
        """Undoes all steps, the last one first."""
        while self.undo:
            self.undo.pop()()


def _ends(weight: Tensor, transposed: bool) -> Tensor:
    """`Stored.ends` of what a module holds, as a matrix or as its transpose."""
    own = lazy(weight)
    if own is not None and own.transposed == transposed:
        return own.ends()
    rows = weight.detach() if own is None else own.dequantised()
    rows = rows.mT if transposed else rows
    return torch.stack([rows.flatten(0, -2)[0], rows.flatten(0, -2)[-1]])


def _is_packed(weight: Tensor) -> bool:
    stored = lazy(weight)
    return stored is not None and bool(stored.memory)


def _set_forward(module: nn.Module, forward: Callable[..., object] | None) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward
