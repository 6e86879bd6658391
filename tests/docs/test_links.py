"""What the documents name exists: files, modules, `neap` commands with their flags, make targets. Nothing is run."""

import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from neap_engine.cli.main import app
from shared.calibrator_settings import CalibratorSettings
from shared.config import flag_of
from shared.gateway_settings import GatewaySettings
from shared.worker_settings import WorkerSettings

ROOT = Path(__file__).parents[2]
# What the examples' tools leave.
INSTALLED = {"node_modules"}
# What `make docs` writes: no other document may link to it.
MADE = {"build/sbom.json", "docs/reference.md", "docs/settings.md"}


def is_written(document: Path) -> bool:
    """Whether a person wrote the document."""
    return not INSTALLED & {*document.parts} and str(document.relative_to(ROOT)) not in MADE


DOCUMENTS = [
    document
    for document in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "bench/RESULTS.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if is_written(document)
]
SERVICES = {"worker": WorkerSettings, "calibrator": CalibratorSettings, "gateway": GatewaySettings}
SOURCES = ("*.py", "*.cpp", "*.cu", "*.h", "*.cuh", "*.proto", "*.yaml")
FENCE = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Where a command may begin on a line of a fenced block: the examples also stand in comments.
COMMAND_START = re.compile(r"(?:^|&& |[;|#] |or: )\s*neap (?=\S)")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def code_of(document: Path) -> list[str]:
    """Code of a document: lines of fenced blocks, with continued lines joined, and inline spans on one line each."""
    text = document.read_text()
    blocks = [block.replace("\\\n", " ") for block in FENCE.findall(text)]
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]
    return [line for block in blocks for line in block.splitlines()] + spans


def test_the_index_lists_every_document():
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    documents = {path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if is_written(path)}
    assert not documents - linked - {index}


def exists(path: str) -> bool:
    """Whether a path from the root names something; it may hold `*`, and a decision is named by its number alone."""
    return any(next(ROOT.glob(pattern), None) for pattern in (path, f"{path}-*.md"))


@every_document
def test_links_lead_to_files(document):
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if not re.match(r"[a-z]+:|#", target):
            file = (document.parent / target.partition("#")[0]).resolve()
            assert file.exists(), target
            assert is_written(file), target


@cache
def anchors(document: Path) -> set[str]:
    """The fragments by which headings can be linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_document
def test_fragments_lead_to_headings(document):
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        path, _, fragment = target.partition("#")
        linked = document.parent / path if path else document
        if fragment and not re.match(r"[a-z]+:", target) and linked.suffix == ".md":
            assert fragment in anchors(linked), target


@every_document
def test_paths_lead_to_files(document):
    folders = "|".join(
        re.escape(entry.name) for entry in ROOT.iterdir() if entry.is_dir() and entry.name not in (".git", ".venv")
    )
    named = re.findall(rf"(?<![\w/.:-])(?:{folders})/[\w./*-]*[\w*]", document.read_text())
    sources = r"[\w./*-]+/[\w.*-]+\.(?:py|proto|md|json|yaml|cpp|cu|h|cuh)"
    named += [span for span in code_of(document) if re.fullmatch(sources, span)]
    missing = {path for path in named if not exists(path)} - MADE
    assert not missing


def test_decisions_that_sources_name_exist():
    numbers = {path.name[:3] for path in ROOT.glob("docs/decisions/*.md")}
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    sources = [path for folder in folders for kind in SOURCES for path in folder.rglob(kind)]
    assert len(sources) > 300
    for source in sources:
        named = re.findall(r"\bdecisions?[ /](\d{3})\b", source.read_text())
        assert {*named} <= numbers, source


@every_document
def test_modules_can_be_run(document):
    for line in code_of(document):
        for module in re.findall(r"python -m ([\w.]+\w)", line):
            spec = find_spec(module)
            assert spec, module
            assert not spec.submodule_search_locations or find_spec(f"{module}.__main__"), module


@every_document
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code_of(document):
        named = set(re.findall(r"\bmake ([a-z-]+)", line))
        assert named <= targets, line


def command_lines(document: Path) -> list[list[str]]:
    """The words after `neap` of each command line, up to a comment or the next command."""
    lines = []
    for line in code_of(document):
        for start in COMMAND_START.finditer(line):
            rest = re.split(r"\s#\s|[;|&<>](?=\s|$)|\)$", line[start.end() :])[0]
            lines.append(shlex.split(rest))
    return lines


def flags_of(command) -> dict[str, bool]:
    """The flags of a command, and whether each stands without a value."""
    options = [option for option in command.params if option.param_type_name == "option"]
    return {flag: option.is_flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {
        "--help": True
    }


@cache
def neap():
    return typer.main.get_command(app)


def subcommands(command) -> dict:
    return getattr(command, "commands", {})


def check_command_line(words: list[str]) -> None:
    """Walk the commands along `words`. Raises AssertionError for a command or a flag that does not exist."""
    command = neap()
    path = ["neap"]
    known = flags_of(command)
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag in known, f"{' '.join(path)} has no {flag}"
            if not known[flag] and "=" not in word:
                next(rest, None)
        elif subcommands(command):
            assert word in subcommands(command), f"{' '.join(path)} has no command {word}"
            command = subcommands(command)[word]
            path.append(word)
            known = flags_of(command)
            if path[:2] == ["neap", "serve"] and word in SERVICES:
                kind = SERVICES[word]
                fields = kind.model_fields.items()
                known = {flag_of(kind, name): field.annotation is bool for name, field in fields} | {"--help": True}


@every_document
def test_neap_commands_and_their_flags_exist(document):
    for words in command_lines(document):
        check_command_line(words)


@pytest.mark.parametrize(
    "line",
    ["rooters list", "routers lisst", "generate x --show-dept", "serve worker --max-quue 3", "--tls-sa x generate y"],
)
def test_a_command_line_with_a_slip_is_noticed(line):
    with pytest.raises(AssertionError, match="has no"):
        check_command_line(line.split())


def test_command_lines_are_found():
    found = command_lines(ROOT / "docs/running.md") + command_lines(ROOT / "docs/rollout.md")
    assert ["routers", "list", "--model", "my-model"] in found
    assert ["routers", "import", "FOLDER", "--alias", "candidate"] in found
    assert len(found) > 15


@cache
def all_flags() -> set[str | None]:
    """Flags of `neap`, of both services and of the programs in bench/."""
    flags = {flag_of(kind, name) for kind in SERVICES.values() for name in kind.model_fields}
    commands = [neap()]
    for command in commands:  # grows while it is walked
        flags.update(flags_of(command))
        commands += subcommands(command).values()
    for source in (ROOT / "bench").rglob("*.py"):
        flags.update(re.findall(r'"(--[a-z0-9-]+)"', source.read_text()))
    return flags


@every_document
def test_flags_named_alone_exist(document):
    known = all_flags()
    for span in code_of(document):
        if span.startswith("--"):
            assert set(FLAG.findall(span)) <= known, span
