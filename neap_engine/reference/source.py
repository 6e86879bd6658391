"""The source of the services as syntax trees, for what can only be read there: reasons of errors, and metrics."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("protos/neap_client", "neap_engine", "calibrator_service", "inference_service", "shared")
# The command line raises errors that no client sees.
LEFT_OUT = ("neap_engine/cli/", "neap_engine/reference/")


@dataclass(frozen=True)
class Place:
    """A call in the source, with the functions around it, innermost last."""

    module: str
    tree: ast.Module
    call: ast.Call
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]

    @property
    def callee(self) -> str:
        """The name of what is called, without what stands before the last dot."""
        function = self.call.func
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def calls() -> Iterator[Place]:
    """Yield every call in the source, file by file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = str(path.relative_to(ROOT))
            if not module.startswith(LEFT_OUT) and "_pb2" not in path.name:
                tree = ast.parse(path.read_text())
                yield from _calls(module, tree, tree, ())


def _calls(
    module: str, tree: ast.Module, node: ast.AST, functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
) -> Iterator[Place]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        functions = (*functions, node)
    if isinstance(node, ast.Call):
        yield Place(module, tree, node, functions)
    for child in ast.iter_child_nodes(node):
        yield from _calls(module, tree, child, functions)


def text_of(node: ast.expr | None) -> str | None:
    """Return the text of a literal, with … for what is computed. None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    return None
