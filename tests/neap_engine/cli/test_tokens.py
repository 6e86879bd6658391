import stat

from shared.rpc.callers import Role
from shared.rpc.tokens import find_caller, parse_tokens


def test_create_prints_the_token_and_its_entry(neap):
    result = neap("tokens", "create", "ann", "--role", "generate", "--role", "admin")
    token, line = result.stdout.splitlines()
    assert token.startswith("neap_")
    caller = find_caller(parse_tokens(line.encode(), "tokens"), token)
    assert (caller.name, caller.roles) == ("ann", {Role.GENERATE, Role.ADMIN})
    assert token not in result.stderr


def test_entries_are_appended_to_a_file_that_only_the_owner_can_read(neap, tmp_path):
    file = tmp_path / "tokens"
    made = {}
    for name in ("ann", "bob"):
        result = neap("tokens", "create", name, "--role", "calibrate", "--append", str(file))
        (made[name],) = result.stdout.splitlines()
    entries = parse_tokens(file.read_bytes(), "tokens")
    assert {name: find_caller(entries, token).name for name, token in made.items()} == {"ann": "ann", "bob": "bob"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = neap("tokens", "list", str(file))
    assert "ann" in listed.stdout
    assert "calibrate" in listed.stdout


def test_a_token_of_a_pool(neap, tmp_path):
    file = tmp_path / "tokens"
    neap("tokens", "create", "ann", "--role", "generate", "--pool", "legal", "--append", str(file))
    (entry,) = parse_tokens(file.read_bytes(), "tokens")
    assert entry.caller.pool == "legal"
    assert "legal" in neap("tokens", "list", str(file)).stdout
    assert "BAD_TOKENS_FILE" in neap("tokens", "create", "ann", "--role", "admin", "--pool", "A", code=1).stderr


def test_invalid_names_and_files_are_refused(neap, tmp_path):
    neap("tokens", "create", "ann", code=2)
    neap("tokens", "create", "ann", "--role", "root", code=2)
    assert "BAD_TOKENS_FILE" in neap("tokens", "create", "a b", "--role", "admin", code=1).stderr
    broken = tmp_path / "tokens"
    broken.write_text("nonsense")
    result = neap("tokens", "create", "ann", "--role", "admin", "--append", str(broken), code=1)
    assert result.stdout == ""
    assert broken.read_text() == "nonsense"
    assert "BAD_TOKENS_FILE" in neap("tokens", "list", str(broken), code=1).stderr
