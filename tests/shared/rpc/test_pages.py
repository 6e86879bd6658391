"""Sizes and tokens of pages, for every list of the protos."""

import pytest
from google.protobuf.message import Message
from neap_client.calibration.v1 import calibration_pb2
from neap_client.inference.v1 import inference_pb2
from neap_client.router.v1 import router_pb2

from shared.errors import InvalidInput
from shared.rpc.pages import named_page, page_token, read_numbered_page, read_page

Aliases = router_pb2.ListAliasesRequest


def test_every_list_of_the_protos_is_paged():
    """https://google.aip.dev/158: page_size is int32, page_token and next_page_token are strings.
    GetJudged is one answer, of at most 256 aliases."""
    lists = {"ListModels", "ListCalibrations", "ListVersions", "ListAliases", "GetAliasHistory"}
    paged, repeated = set(), set()
    for file in (inference_pb2, calibration_pb2, router_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                asked, told = method.input_type.fields_by_name, method.output_type.fields_by_name
                if "page_size" in asked:
                    paged.add(method.name)
                    assert asked["page_size"].type == asked["page_size"].TYPE_INT32
                    assert asked["page_token"].type == asked["page_token"].TYPE_STRING
                    assert told["next_page_token"].type == told["next_page_token"].TYPE_STRING
                if not method.server_streaming and any(
                    field.message_type and field.is_repeated for field in told.values()
                ):
                    repeated.add(method.name)
    assert paged == repeated - {"GetJudged"} - {"GetJudged"} == lists


def test_sizes():
    assert read_page(Aliases()) == (100, "")
    assert read_page(Aliases(page_size=7)) == (7, "")
    assert read_page(Aliases(page_size=2**31 - 1)) == (1000, "")
    with pytest.raises(InvalidInput) as caught:
        read_page(Aliases(page_size=-1))
    assert (caught.value.reason, caught.value.metadata) == ("BAD_PAGE_SIZE", {"field": "page_size"})


def test_a_token_belongs_to_its_request():
    token = page_token(Aliases(model_id="a", page_size=2), "stable")
    assert "stable" not in token
    # The size may change from page to page.
    assert read_page(Aliases(model_id="a", page_size=3, page_token=token)) == (3, "stable")
    history = router_pb2.GetAliasHistoryRequest(model_id="a", page_token=token)
    for request in (Aliases(model_id="b", page_token=token), history):
        assert _reason(request) == "BAD_PAGE_TOKEN"


@pytest.mark.parametrize("token", ["'; --", "3", "AAAA", "ä", "A" * 10_000])
def test_what_is_no_token(token):
    assert _reason(Aliases(page_token=token)) == "BAD_PAGE_TOKEN"


def test_a_forged_cursor_is_refused():
    for cursor in ("-1", "x", "9" * 30, "٣"):
        request = router_pb2.ListVersionsRequest()
        request.page_token = page_token(request, cursor)
        with pytest.raises(InvalidInput) as caught:
            read_numbered_page(request)
        assert caught.value.reason == "BAD_PAGE_TOKEN"


def test_pages_of_names_go_on_after_the_last_name():
    request, seen = Aliases(page_size=2), []
    names = ["a", "c", "e"]
    page, request.page_token = named_page(request, names, str)
    seen += page
    # What is added or removed meanwhile moves nothing.
    names = ["b", "c", "d", "e"]
    page, token = named_page(request, names, str)
    assert (seen, page, token) == (["a", "c"], ["d", "e"], "")


def _reason(request: Message) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_page(request)
    return caught.value.reason
