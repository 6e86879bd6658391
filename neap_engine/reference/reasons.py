"""Collects the reasons of errors from the source, with the codes and messages that they come with.

A reason is a literal where an error is made, or where a function is called that makes an error with a reason that it is
given. What cannot be followed to a literal raises ValueError, so that no reason is left out.
"""

import ast
import inspect
from collections import defaultdict
from dataclasses import dataclass, field

from neap_client import errors
from neap_client.status import CODES

from neap_engine.reference.source import Place, calls, text_of

ERRORS: dict[str, type[errors.NeapError]] = dict(inspect.getmembers(errors, inspect.isclass))


@dataclass
class Reason:
    """`codes` are names of gRPC codes, `messages` hold … for what is computed, `modules` are paths."""

    codes: set[str] = field(default_factory=set)
    messages: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def collect_reasons() -> dict[str, Reason]:
    """Return all reasons in alphabetical order. Raises ValueError for one that is not known before the program runs."""
    reader = _Reader()
    for place in reader.places:
        kind = ERRORS.get(place.callee)
        if kind is not None:
            reader.read(place, kind)
    return dict(sorted(reader.reasons.items()))


class _Reader:
    def __init__(self) -> None:
        self.reasons: dict[str, Reason] = defaultdict(Reason)
        self.places = list(calls())
        self._callers: dict[str, list[Place]] = defaultdict(list)
        for place in self.places:
            self._callers[place.callee].append(place)

    def read(self, place: Place, kind: type[errors.NeapError]) -> None:
        """Add the reasons of the error that is made at `place`."""
        argument = _keyword(place.call, "reason")
        message = place.call.args[0] if place.call.args else _keyword(place.call, "message")
        if argument is None:
            self._add(kind.default_reason, kind, text_of(message), place)
        else:
            self._follow(argument, message, kind, place)

    def _follow(self, reason: ast.expr, message: ast.expr | None, kind: type[errors.NeapError], place: Place) -> None:
        text = text_of(reason)
        if text is not None:
            self._add(text, kind, text_of(message), place)
        elif isinstance(reason, ast.IfExp):
            for branch in (reason.body, reason.orelse):
                self._follow(branch, message, kind, place)
        elif isinstance(reason, ast.BoolOp):
            for value in reason.values:
                self._follow(value, message, kind, place)
        elif isinstance(reason, ast.Name):
            self._follow_name(reason.id, message, kind, place)
        elif not isinstance(reason, ast.Attribute):  # that of another error
            raise ValueError(f"{place.module}:{place.call.lineno}: {ast.unparse(reason)}")

    def _follow_name(self, name: str, message: ast.expr | None, kind: type[errors.NeapError], place: Place) -> None:
        """Follow a variable to what is assigned to it, or a parameter to what calls of its function give."""
        assigned = [
            node.value
            for scope in (*place.functions[-1:], place.tree)
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        ]
        for function in reversed(place.functions):
            parameters = [*function.args.posonlyargs, *function.args.args]
            names = [parameter.arg for parameter in parameters]
            keywords = [parameter.arg for parameter in function.args.kwonlyargs]
            if name not in names + keywords:
                continue
            if names and names[0] in ("self", "cls"):
                names = names[1:]
            for caller in self._callers[function.name]:
                if function.name.startswith("_") and caller.module != place.module:
                    continue
                argument = _keyword(caller.call, name)
                if argument is None and name in names and len(caller.call.args) > names.index(name):
                    argument = caller.call.args[names.index(name)]
                if argument is not None:
                    self._follow(argument, _substituted(message, names, caller), kind, caller)
                else:
                    default = _default(function, name)
                    if default is not None:
                        self._follow(default, message, kind, caller)
            return
        if not assigned:
            raise ValueError(f"{place.module}:{place.call.lineno}: {name}")
        for value in assigned:
            self._follow(value, message, kind, place)

    def _add(self, reason: str, kind: type[errors.NeapError], message: str | None, place: Place) -> None:
        entry = self.reasons[reason]
        code = next((CODES[base].name for base in kind.__mro__ if base in CODES), "INTERNAL")
        entry.codes.add(code)
        entry.modules.add(place.module)
        if message:
            entry.messages.add(" ".join(message.split()))


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _default(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> ast.expr | None:
    positional = [*function.args.posonlyargs, *function.args.args]
    defaults = zip(reversed(positional), reversed(function.args.defaults), strict=False)
    keyword = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return next((value for parameter, value in (*defaults, *keyword) if parameter.arg == name), None)


def _substituted(message: ast.expr | None, names: list[str], caller: Place) -> ast.expr | None:
    """Return the message that a call gives, if the message is just a parameter."""
    if not isinstance(message, ast.Name) or message.id not in names:
        return message
    index = names.index(message.id)
    if len(caller.call.args) > index:
        return caller.call.args[index]
    return _keyword(caller.call, message.id)
