"""Imports torch and transformers without what a service never runs.
For processes that belong to neap, before anything else in them imports transformers.

Transformers' modelling code imports torch's compiler, distributed tensors and scipy, for kernels of some GPUs, for
sharded training and for losses of object detection. That is half of a worker's imports, and 80 MB. It also reads all of
its own modelling files, twice, for a list of what they define.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_COMPILER = "torch._dynamo"
# The one module of the compiler that transformers runs, to make masks, and what distributed tensors ask for to compute
# shapes. They need none of the others.
_NEEDED, _ASKED = f"{_COMPILER}._trace_wrapped_higher_order_op", f"{_COMPILER}.config"
# Transformers asks these before it imports scipy and distributed tensors.
_SCIPY, _DISTRIBUTED = "is_scipy_available", "is_torch_distributed_available"

Function = Callable[..., Any]

_TENSORS = "torch.distributed.tensor"

# What torch imports to compute shapes of tensors without numbers, such as those of a skeleton: a quarter of a second
# and 35 MB for questions that ordinary numbers answer.
_SHAPES, _ALGEBRA = "torch.fx.experimental.symbolic_shapes", "sympy"
# What its functions answer for ordinary bools, ints, or tuples of them.
_ANSWERS: dict[str, Function] = {
    **dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), lambda value, *_: value
    ),
    **dict.fromkeys(("guarding_hint_or_throw", "statically_known_true"), lambda value: value),
    "has_guarding_hint": lambda value: True,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *values: all(values),
    "sym_eq": lambda value, other: value == other,
    "sym_or": lambda *values: any(values),
}

_LISTING = "transformers.utils.import_utils"


def import_transformers_lightly(*, shards: bool = False) -> None:
    """Does nothing for what is imported already, and nothing at all where transformers' modelling code is. `shards`:
    with distributed tensors, by which transformers shares a model out to ranks."""
    if "transformers.modeling_utils" in sys.modules:
        return
    import torch

    if _COMPILER not in sys.modules:
        late = _LateCompiler()
        torch._dynamo = sys.modules[_COMPILER] = late
        assert late.__spec__ is not None
        late.__path__ = late.__spec__.submodule_search_locations or []
        for name in (_NEEDED, _ASKED) if shards else (_NEEDED,):
            importlib.import_module(name)
        del late.__path__  # to import any other module loads the compiler
    if _TENSORS not in sys.modules and not shards:
        torch.distributed.tensor = sys.modules[_TENSORS] = _LateTensors(_TENSORS)
    if _ALGEBRA not in sys.modules and _SHAPES not in sys.modules:
        sys.modules[_ALGEBRA] = _LateAlgebra(_ALGEBRA)
        torch.fx.experimental.symbolic_shapes = sys.modules[_SHAPES] = _LateShapes(_SHAPES)
    if _LISTING not in sys.modules:
        sys.meta_path.insert(0, _ListsOnce())
    from transformers import utils
    from transformers.utils import import_utils

    for name in (_SCIPY,) if shards else (_SCIPY, _DISTRIBUTED):
        for module in (utils, import_utils):
            setattr(module, name, _no)


class _ListsOnce:
    """Finds the module of transformers that lists what its files define, and lets it read each folder once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _LISTING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        loader: Any = spec and spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    @staticmethod
    def _run(execute: Callable[[ModuleType], None], module: Any) -> None:
        execute(module)
        read = functools.cache(module.create_import_structure_from_path)

        @functools.wraps(module.create_import_structure_from_path)
        def of_folder(path: Any) -> Any:
            place = Path(path)
            return read(str(place.parent if place.is_file() else place))

        module.create_import_structure_from_path = of_folder
        _list_families_late(module)


def _list_families_late(module: Any) -> None:
    """Lists what the families' folders define when a name is not among what the folder of the auto classes defines,
    which transformers itself needs. Their files take a fifth of a second."""
    define, find = module.define_import_structure, module._LazyModule.__getattr__
    unlisted: dict[str, tuple[Path, str | None]] = {}

    def of_auto_classes(path: Any, prefix: str | None = None) -> Any:
        place = Path(path)
        folder = place.parent if place.is_file() else place
        if folder.name != "models":
            return define(path, prefix)
        unlisted["transformers" if prefix else "transformers.models"] = folder, prefix
        return {
            key: dict(names) for key, names in define(folder / "auto", f"{prefix}.auto" if prefix else "auto").items()
        }

    def of_all(self: Any, name: str) -> Any:
        # A tokenizer that is not listed must not be looked for: another with the same converter would be found, or the
        # search would call this function until the stack ends.
        shortcuts = self._explicit_import_shortcut.values()
        listed = (self._objects, self._class_to_module, self._modules, *shortcuts)
        is_file = (Path(self.__file__).parent / f"{name}.py").is_file()  # which is imported next
        if self.__name__ not in unlisted or is_file or name.startswith("__") or any(name in names for names in listed):
            return find(self, name)
        folder, prefix = unlisted.pop(self.__name__)
        rest = module._LazyModule(self.__name__, self.__file__, define(folder, prefix), self.__spec__)
        for known in ("_modules", "_class_to_module", "_object_missing_backend", "_import_structure"):
            setattr(self, known, getattr(rest, known) | getattr(self, known))
        self.__all__ = [*{*rest.__all__, *self.__all__}]
        return find(self, name)

    module.define_import_structure, module._LazyModule.__getattr__ = of_auto_classes, of_all


def _no() -> bool:
    return False


class _LateModule(ModuleType):
    """A module that is loaded when something needs more of it than it has been given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self.__spec__ = spec

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        is_package = spec is not None and spec.submodule_search_locations is not None
        if name.startswith("__") and not (name == "__path__" and is_package):  # to import a part of it loads it
            raise AttributeError(name)
        self._load()
        return getattr(self, name)

    def _load(self) -> None:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # this object becomes the module
        self.__path__, self.__file__ = list(spec.submodule_search_locations or ()), spec.origin
        spec.loader.exec_module(self)


class _LateTensors(_LateModule):
    """Torch's distributed tensors. Torch asks for their class at the first call of a tensor's `__torch_dispatch__`,
    because it has a quicker way for them. No tensor is of the class that it gets here."""

    class DTensor:
        """Nothing is one before the module is loaded."""


class _LateAlgebra(_LateModule):
    """Sympy. Torch asks whether a number is an expression."""

    class Basic:
        """Nothing is one before the module is loaded."""


class _LateShapes(_LateModule):
    """Torch's symbolic shapes. Torch asks them of ordinary numbers, too."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for function, answer in _ANSWERS.items():
            setattr(self, function, functools.partial(self._run, function, answer))

    def _run(self, function: str, answer: Function, *values: Any, **options: Any) -> Any:
        if not options and all(map(_is_ordinary, values)):
            return answer(*values)
        if isinstance(self, _LateShapes):  # else somebody has kept this function
            self._load()
        return getattr(self, function)(*values, **options)


def _is_ordinary(value: Any) -> bool:
    return type(value) in (bool, int) or (type(value) is tuple and all(map(_is_ordinary, value)))


class _LateCompiler(_LateModule):
    """Torch's compiler. It marks functions once it is loaded."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self._marked: list[tuple[str, Function]] = []
        # A group of processes clears what the rules remember as it begins.
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def allow_in_graph(self, function: Function) -> Function:
        self._marked.append(("allow_in_graph", function))
        return function

    def assume_constant_result(self, function: Function) -> Function:
        self._marked.append(("assume_constant_result", function))
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Optimisers ask for one at each step. Nothing is compiled yet."""

    def disable(self, function: Function | None = None, *args: Any, **options: Any) -> Function:
        def late(target: Function) -> Function:
            @functools.wraps(target)
            def run(*positional: Any, **named: Any) -> Any:
                if isinstance(self, _LateCompiler):  # nothing is compiled yet
                    return target(*positional, **named)
                return self.disable(target, *args, **options)(*positional, **named)

            return run

        return late if function is None else late(function)

    def _load(self) -> None:
        marked = self._marked
        del self.trace_rules  # which the compiler's own would not replace
        super()._load()
        for mark, function in marked:
            getattr(self, mark)(function)
