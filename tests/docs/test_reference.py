"""The reference has what the protos and the source say."""

import ast
import re

import pytest
from neap_client.calibration.v1 import calibration_pb2
from neap_client.inference.v1 import inference_pb2
from neap_client.router.v1 import router_pb2

from docs.generators import reasons
from docs.generators.reference import reference_page
from tests.docs.test_line_lengths import prose, too_long

PROTOS = [module.DESCRIPTOR for module in (calibration_pb2, inference_pb2, router_pb2)]


@pytest.fixture(scope="module")
def known() -> dict[str, reasons.Reason]:
    return reasons.collect_reasons()


@pytest.fixture(scope="module")
def page(known: dict[str, reasons.Reason]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("docs.generators.reference.collect_reasons", lambda: known)
        return reference_page()


@pytest.fixture(scope="module")
def sections(page: str) -> dict[str, str]:
    """Heading -> text of what is below it."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.package)
def test_every_rpc_field_and_value_is_described(proto, sections):
    assert proto.package in sections
    for service in proto.services_by_name.values():
        for method in service.methods:
            assert re.search(rf"^\| `{method.name}` \| .+ \| .+ \| [a-z, ]+ \| .+\. \|$", sections[service.name], re.M)
    for message in proto.message_types_by_name.values():
        for field in message.fields:
            row = rf"^\| `{field.name}` \| {field.number} \| .+ \| .+ \|$"
            assert re.search(row, sections[message.name], re.M), field.full_name
    for enum in proto.enum_types_by_name.values():
        for value in enum.values:
            assert re.search(rf"^\| `{value.name}` \| {value.number} \| .+ \|$", sections[enum.name], re.M), value.name


def test_types_are_named_as_the_protos_write_them(sections):
    spec = sections["CalibrationSpec"]
    assert re.search(r"^\| `aliases` \| \d+ \| repeated string \|", spec, re.M)
    assert re.search(r"^\| `seed` \| \d+ \| optional uint64 \|", spec, re.M)
    assert re.search(r"^\| `text_file` \| \d+ \| \[TextFile\]\(#textfile\) \| One of `source`\. ", spec, re.M)


def test_links_within_the_page_lead_to_headings(page, sections):
    targets = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in sections}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= targets


def test_reasons_of_the_source_have_codes_messages_and_modules(sections, known):
    rows = sections["Reasons of errors"]
    assert re.search(r"^\| `QUEUE_FULL` \| RESOURCE_EXHAUSTED \| .+ \| .*`shared/.+\.py`.* \|$", rows, re.M)
    assert re.findall(r"^\| `(.+?)` \|", rows, re.M) == list(known)


def test_prose_has_no_long_lines(page):
    assert not too_long(prose(page))


def collected(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, reasons.Reason]:
    """The reasons of a program."""
    monkeypatch.setattr(reasons, "sources", lambda: [("m.py", ast.parse(source))])
    return reasons.collect_reasons()


def test_reasons_are_followed_to_where_they_are_written(monkeypatch):
    found = collected(
        """
GONE = "WORKER_GONE"
def check(value, *, reason="BAD_VALUE"):
    raise InvalidInput(f"{value} is bad", reason=reason)
def refuse(why, reason):
    return Exhausted(why, reason=reason)
def run(error):
    check(1)
    check(2, reason="BAD_NUMBER")
    refuse("no room", "QUEUE_FULL" if error else "DISK_FULL")
    raise Unavailable("gone", reason=GONE)
    raise NotFound("nothing")
    raise Unavailable("as before", reason=error.reason)
    return _ended(FAILED, "JOB_DIED", f"it died {error}")
""",
        monkeypatch,
    )
    assert {name: (reason.codes, reason.messages) for name, reason in found.items()} == {
        "BAD_NUMBER": ({"INVALID_ARGUMENT"}, {"… is bad"}),
        "BAD_VALUE": ({"INVALID_ARGUMENT"}, {"… is bad"}),
        "DISK_FULL": ({"RESOURCE_EXHAUSTED"}, {"no room"}),
        "JOB_DIED": ({"of a job"}, {"it died …"}),
        "NOT_FOUND": ({"NOT_FOUND"}, {"nothing"}),
        "QUEUE_FULL": ({"RESOURCE_EXHAUSTED"}, {"no room"}),
        "WORKER_GONE": ({"UNAVAILABLE"}, {"gone"}),
    }


@pytest.mark.parametrize("reason", ["REASONS[name]", "unknown", "make()"])
def test_a_reason_that_cannot_be_followed_is_an_error(reason, monkeypatch):
    with pytest.raises(ValueError, match=r"m\.py:1: "):
        collected(f"raise InvalidInput('no', reason={reason})", monkeypatch)
