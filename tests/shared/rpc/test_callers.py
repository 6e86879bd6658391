"""How the identity of a caller is used: histories, roles, limits per client, log lines."""

from types import SimpleNamespace

import pytest

from shared.errors import PermissionDenied
from shared.rpc.callers import (
    Caller,
    Role,
    certificate_caller,
    client_key,
    least_priority,
    recorded_actor,
    require_role,
    set_current_caller,
)


@pytest.fixture
def ann():
    set_current_caller(Caller("ann", frozenset((Role.CALIBRATE,))))
    yield
    set_current_caller(None)


def test_a_history_names_the_caller_and_then_whom_it_acts_for(ann):
    assert (recorded_actor(""), recorded_actor("ann")) == ("ann", "ann")
    assert recorded_actor("bob") == "ann (bob)"
    set_current_caller(None)
    assert recorded_actor("bob") == "bob"  # callers are not authenticated


def test_a_role_is_required_only_where_callers_are_known(ann):
    require_role(Role.CALIBRATE, "this")
    with pytest.raises(PermissionDenied, match="this needs the role admin"):
        require_role(Role.ADMIN, "this")
    set_current_caller(None)
    require_role(Role.ADMIN, "this")


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:4711", "ipv4:10.0.0.7"),
        ("ipv6:[::1]:4711", "ipv6:[::1]"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_a_client_is_an_address_until_it_has_a_name(peer, client):
    context = SimpleNamespace(peer=lambda: peer)
    assert client_key(context) == client
    set_current_caller(Caller("ann", frozenset()))
    try:
        assert client_key(context) == "ann"
    finally:
        set_current_caller(None)


def test_a_certificate_name_cannot_break_a_log_line_or_look_like_a_token_name():
    names = [b"a\n\xff" + b"x" * 500, b"second"]
    caller = certificate_caller(SimpleNamespace(peer_identities=lambda: names))
    assert caller.name.startswith("certificate:a?\ufffdxxx")
    assert caller.name.isprintable()
    assert len(caller.name) < 300
    assert certificate_caller(SimpleNamespace(peer_identities=lambda: None)) is None


def test_a_caller_has_the_lowest_priority_of_its_roles():
    numbers = {Role.ADMIN: -10, Role.CALIBRATE: 5}
    generate, calibrate, admin = Role.GENERATE, Role.CALIBRATE, Role.ADMIN
    for roles, least in (((generate, calibrate), 0), ((calibrate,), 5), ((generate, admin), -10)):
        set_current_caller(Caller("ann", frozenset(roles)))
        assert least_priority(numbers) == least
    set_current_caller(None)
    assert least_priority(numbers) == -10
    assert least_priority({}) == 0
