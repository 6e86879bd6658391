"""Collects the reasons of errors from the source, with the codes and messages that they come with.

A reason is a literal where an error is made, or where a function is called that makes an error with a reason that it is
given. What cannot be followed to a literal raises ValueError, so that no reason is left out.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from neap_client import errors
from neap_client.status import CODES

ROOT = Path(__file__).parents[2]
PACKAGES = ("protos/neap_client", "neap_engine", "calibrator_service", "inference_service", "shared")
# The command line raises errors that no client sees.
LEFT_OUT = "neap_engine/cli/"
# What a job ends with beside the error of its own process: (state, reason, message).
ENDS_A_JOB = "_ended"
ERRORS: dict[str, type[errors.NeapError]] = dict(inspect.getmembers(errors, inspect.isclass))
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Of an error; None: a job ends with it.
Kind = type[errors.NeapError] | None


@dataclass
class Reason:
    """`codes` are names of gRPC codes, or say that a job fails with it. `messages` hold … for what is computed;
    `modules` are paths."""

    codes: set[str] = field(default_factory=set)
    messages: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Place:
    """A call in the source, with the functions around it, innermost last."""

    module: str
    tree: ast.Module
    call: ast.Call
    functions: tuple[Function, ...]

    @property
    def callee(self) -> str:
        """The name of what is called, without what stands before the last dot."""
        return getattr(self.call.func, "attr", getattr(self.call.func, "id", ""))


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of each module of the product."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = str(path.relative_to(ROOT))
            if not module.startswith(LEFT_OUT) and "_pb2" not in path.name:
                yield module, ast.parse(path.read_text())


def collect_reasons() -> dict[str, Reason]:
    """Return all reasons in alphabetical order. Raises ValueError for one that is not known before the program runs."""
    reader = _Reader([place for module, tree in sources() for place in _calls(module, tree, tree, ())])
    return dict(sorted(reader.reasons.items()))


def _calls(module: str, tree: ast.Module, node: ast.AST, functions: tuple[Function, ...]) -> Iterator[Place]:
    if isinstance(node, Function):
        functions = (*functions, node)
    if isinstance(node, ast.Call):
        yield Place(module, tree, node, functions)
    for child in ast.iter_child_nodes(node):
        yield from _calls(module, tree, child, functions)


class _Reader:
    def __init__(self, places: list[Place]) -> None:
        self.reasons: dict[str, Reason] = defaultdict(Reason)
        self._callers: dict[str, list[Place]] = defaultdict(list)
        for place in places:
            self._callers[place.callee].append(place)
        for place in places:
            if kind := ERRORS.get(place.callee):
                given = {keyword.arg: keyword.value for keyword in place.call.keywords}
                message = place.call.args[0] if place.call.args else given.get("message")
                self._follow(given.get("reason", ast.Constant(kind.default_reason)), message, kind, place)
            elif place.callee == ENDS_A_JOB and len(place.call.args) == 3:
                _, reason, message = place.call.args
                self._follow(reason, message, None, place)

    def _follow(self, reason: ast.expr, message: ast.expr | None, kind: Kind, place: Place) -> None:
        if isinstance(reason, ast.Constant | ast.JoinedStr):
            self._add(_text(reason), _text(message), kind, place)
        elif isinstance(reason, ast.IfExp | ast.BoolOp):
            for branch in reason.values if isinstance(reason, ast.BoolOp) else (reason.body, reason.orelse):
                self._follow(branch, message, kind, place)
        elif isinstance(reason, ast.Name):
            self._follow_name(reason.id, message, kind, place)
        elif not isinstance(reason, ast.Attribute):  # that of another error
            raise ValueError(f"{place.module}:{place.call.lineno}: {ast.unparse(reason)}")

    def _follow_name(self, name: str, message: ast.expr | None, kind: Kind, place: Place) -> None:
        """Follow a parameter to what calls of its function give, or a variable to what is assigned to it."""
        for function in reversed(place.functions):
            if name in _parameters(function):
                for caller in self._callers[function.name]:
                    if function.name.startswith("_") and caller.module != place.module:
                        continue
                    reason = _argument(caller.call, function, name)
                    told = _argument(caller.call, function, message.id) if isinstance(message, ast.Name) else message
                    if reason is not None:
                        self._follow(reason, told, kind, caller)
                return
        assigned = [
            node.value
            for scope in (*place.functions[-1:], place.tree)
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)
        ]
        if not assigned:
            raise ValueError(f"{place.module}:{place.call.lineno}: {name}")
        for value in assigned:
            self._follow(value, message, kind, place)

    def _add(self, reason: str, message: str, kind: Kind, place: Place) -> None:
        entry = self.reasons[reason]
        code = next((CODES[base].name for base in kind.__mro__ if base in CODES), "INTERNAL") if kind else "of a job"
        entry.codes.add(code)
        entry.modules.add(place.module)
        entry.messages |= {" ".join(message.split())} - {""}


def _text(node: ast.expr | None) -> str:
    """Return the text of a literal, with … for what is computed. Empty if it is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _parameters(function: Function) -> list[str]:
    given = function.args
    return [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return what a call gives for a parameter, or its default."""
    positional = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    defaults: dict[str | None, ast.expr | None] = dict(
        zip(_parameters(function)[::-1], [*function.args.defaults, *function.args.kw_defaults][::-1], strict=False)
    )
    placed = [parameter for parameter in positional if parameter not in ("self", "cls")]
    given = dict(zip(placed, call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords}
    return {**defaults, **given}.get(name)
