import hashlib

import pytest

from shared.errors import InvalidInput
from shared.rpc.callers import Role
from shared.rpc.tokens import digest_of_token, find_caller, new_token, parse_tokens

DIGEST = "sha256:" + "0" * 64


def test_only_the_token_of_an_entry_is_found():
    token, entry = new_token("ann@x", [Role.ADMIN, Role.GENERATE])
    other, _ = new_token("bob", [Role.ADMIN])
    (read,) = parse_tokens(f"# mine\n\n{entry.to_line()}\n".encode(), "tokens")
    assert read == entry
    caller = find_caller([read], token)
    assert (caller.name, caller.roles) == ("ann@x", {Role.ADMIN, Role.GENERATE})
    assert find_caller([read], other) is None
    assert find_caller([read], token[:-1]) is None
    assert find_caller([read], "") is None
    assert token not in entry.to_line()
    assert len(token) >= len("neap_") + 43  # 256 bits
    assert digest_of_token(token) == "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def test_each_token_belongs_to_its_caller():
    made = {name: new_token(name, [Role.GENERATE]) for name in ("ann", "bob", "eve")}
    entries = [entry for _, entry in made.values()]
    for name, (token, _) in made.items():
        assert find_caller(entries, token).name == name


def test_a_token_may_belong_to_a_pool():
    made = {pool: new_token("ann", [Role.GENERATE], pool) for pool in ("legal", "default", "*")}
    entries = parse_tokens("\n".join(entry.to_line() for _, entry in made.values()).encode(), "tokens")
    assert entries == tuple(entry for _, entry in made.values())
    assert {pool: find_caller(entries, token).pool for pool, (token, _) in made.items()} == {
        "legal": "legal",
        "default": "default",
        "*": "*",
    }
    assert made["legal"][1].to_line().endswith(" pool=legal")
    assert len(made["default"][1].to_line().split()) == 3
    with pytest.raises(InvalidInput):
        new_token("ann", [Role.GENERATE], "Legal")


def test_a_name_may_have_several_tokens():
    old, old_entry = new_token("ann", [Role.GENERATE])
    new, new_entry = new_token("ann", [Role.GENERATE])
    entries = parse_tokens(f"{old_entry.to_line()}\n{new_entry.to_line()}".encode(), "tokens")
    assert {find_caller(entries, token).name for token in (old, new)} == {"ann"}


@pytest.mark.parametrize(
    "line",
    [
        "ann generate",
        f"ann generate {DIGEST} more",
        f"ann generate {DIGEST} pool=",
        f"ann generate {DIGEST} pool=Legal",
        f"ann generate {DIGEST} pool=a pool=b",
        f"ann generate pool=a {DIGEST}",
        f"ann generate,root {DIGEST}",
        f"ann generate, {DIGEST}",
        f"ann , {DIGEST}",
        f"-ann generate {DIGEST}",
        f"a(n)n generate {DIGEST}",
        f"{'a' * 65} generate {DIGEST}",
        "ann generate neap_SECRET",
        f"ann generate {DIGEST[:-1]}",
        f"ann generate {DIGEST.replace('0', 'A')}",
        f"ok admin {DIGEST}\nann generate {DIGEST}",
        "# nothing but a comment",
        "",
    ],
)
def test_an_invalid_file_is_refused_and_never_quoted(line):
    with pytest.raises(InvalidInput) as caught:
        parse_tokens(line.encode(), "tokens")
    assert caught.value.reason == "BAD_TOKENS_FILE"
    assert "SECRET" not in str(caught.value)
    assert DIGEST not in str(caught.value)


def test_a_file_that_is_not_text_is_refused():
    with pytest.raises(InvalidInput, match="UTF-8"):
        parse_tokens(b"\xff\xfe", "tokens")


@pytest.mark.parametrize(("name", "roles"), [("", [Role.ADMIN]), ("a b", [Role.ADMIN]), ("a", [])])
def test_no_token_without_a_name_and_a_role(name, roles):
    with pytest.raises(InvalidInput):
        new_token(name, roles)
