"""The forms of a request are those that docs/architecture.md counts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from neap_client.fields import FIELDS

ROOT = Path(__file__).parents[2]
MAX_FORMS = 12
# Where a request goes from HTTP to its tokens.
PATH = ("neap_engine/gateway", "protos/neap_client", "inference_service", "shared")
REQUEST = ("Sampling", "Stopping", "DepthPolicy", "Exact", "Relaxed", "GenerateRequest")
NAMES = {name for message in REQUEST for name in FIELDS[message]}
# Types of arguments in Python.
ARGUMENTS = {"DepthFields", "RequestFields", "RequestOptions"}
COPYING = {"replace", "asdict", "copy", "deepcopy", "CopyFrom", "MergeFrom"}
REQUESTS = {"request", "generation", "call"}


def test_a_generate_has_few_forms() -> None:
    rows = forms()
    assert 1 < len(rows) <= MAX_FORMS
    for row in rows:
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", row):
            declared = {node.name for node in ast.walk(parsed(ROOT / file)) if isinstance(node, DECLARED)}
            assert set(re.findall(r"\w+", names)) <= declared, row


def test_no_other_class_says_fields_of_a_request() -> None:
    counted = set(re.findall(r"`(\w+)`", "".join(forms()))) | ARGUMENTS
    found = {name: said for name, said in classes() if len(said) > 1}
    assert counted & found.keys() >= {"SamplingFields", "GenerationRequest", "SamplingParams", "Trial", "Slot"}
    assert not {name: said for name, said in found.items() if name not in counted}


def test_no_form_is_copied_on_the_way() -> None:
    copies = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files()
        if "shared/rpc" not in str(file)  # lists and their pages
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and name_of(node.func) in COPYING
        for argument in node.args[:1]
        if isinstance(argument, ast.Name) and argument.id in REQUESTS
    ]
    assert copies == []


DECLARED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def forms() -> list[str]:
    """The rows of the table, without its head."""
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition("\n## The forms of a request\n")
    section, _, _ = rest.partition("\n## ")
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def files() -> Iterator[Path]:
    for folder in PATH:
        yield from (file for file in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in file.name)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def classes() -> Iterator[tuple[str, set[str]]]:
    """Each class on the path, and the fields of a request that it has."""
    for file in files():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                yield node.name, {name.lstrip("_") for name in attributes(node)} & NAMES


def attributes(of: ast.ClassDef) -> Iterator[str]:
    """Its fields, those of a ctypes.Structure, and what its methods set of it."""
    for node in ast.walk(of):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if node in of.body or (isinstance(each, ast.Attribute) and name_of(each.value) == "self"):
                    yield name_of(each)
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            yield str(node.elts[0].value)


def name_of(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
