"""The examples of the library's documents run as they are written, on a tiny model."""

import doctest
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import neap_engine
from neap_engine.face import log_to_logging
from tests.worker import save_model

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(py\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(text: str, name: str, **names: object) -> None:
    """Runs the examples in `text`, in order, and compares what they print."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    assert test.examples
    report: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder. What the examples read and write is beside it."""
    monkeypatch.chdir(tmp_path)
    log_to_logging()  # the import has done so, but each test ends with structlog's defaults
    Path("notes.txt").write_text("the hen in the inn says hello to the thin hen " * 250)
    return str(save_model(tmp_path / "model"))


def test_the_example_of_the_module(source):
    run(neap_engine.__doc__ or "", "neap_engine", source=source)


def blocks(document: str, kind: str) -> list[str]:
    """The Python of a document. All of it is of one `kind`, so that none is left out."""
    found = BLOCK.findall((ROOT / "docs" / document).read_text())
    assert {language for language, _ in found} == {kind}
    return [text for _, text in found]


def test_the_examples_of_the_document(source):
    run("".join(blocks("library.md", "pycon")), "docs/library.md", source=source)


def test_the_example_for_users_of_tide(source, monkeypatch, capsys):
    monkeypatch.setattr("calibrator_service.calibration.plan.QUICK_BUDGET_S", 3.0)
    names = {"model": AutoModelForCausalLM.from_pretrained(source), "tokenizer": AutoTokenizer.from_pretrained(source)}
    names["input_ids"] = names["tokenizer"]("hello", return_tensors="pt")["input_ids"]
    for text in blocks("from-tide.md", "python"):
        exec(text, names)
    assert "left early" in capsys.readouterr().out
