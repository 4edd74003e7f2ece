"""`cloche secret`: values by pipe, prompt or variable; never in a command line, and never shown."""

import json

VALUE = b"ghp_a-value/that+nobody=sees"
SET = ("secret", "set", "github", "--host", "api.github.com", "--env", "GITHUB_TOKEN")


def files_of(cloche):
    return [path for path in cloche.state.rglob("*") if path.is_file()]


def test_a_value_has_no_place_in_a_command_line(cloche):
    refused = cloche(*SET, VALUE.decode())
    assert refused.returncode == 125
    assert b"does not take" in refused.stderr


def test_what_is_missing_is_said_before_a_value_is_asked_for(cloche):
    for words in (
        ("set",),
        ("set", "x", "--env", "A"),
        ("set", "x", "--host", "h.test"),
        ("remove",),
        ("list", "x"),
    ):
        refused = cloche("secret", *words)
        assert refused.returncode == 125
        assert b"hint:" in refused.stderr or b"name" in refused.stderr
    assert (
        cloche("secret", "set", "x", "--host", "h.test", "--env", "A", "--from-env", "NOT_SET").returncode
        == 125
    )
    both = cloche(
        "secret", "set", "x", "--host", "h.test", "--env", "A", "--basic", "u", "--query", "q", stdin=VALUE
    )
    assert both.returncode == 125


def test_a_bad_value_is_refused_and_not_repeated(cloche):
    refused = cloche(*SET, "--json", stdin=b"two\nlines-of-it")
    assert refused.returncode == 125
    assert json.loads(refused.stdout)["error"]["code"] == "secret_invalid"
    assert b"lines-of-it" not in refused.stdout + refused.stderr


def test_set_list_remove(cloche):
    stored = cloche(*SET, stdin=VALUE + b"\n")
    assert stored.returncode == 0, stored.stderr
    listed = cloche("secret", "list")
    assert b"github" in listed.stdout
    assert b"$GITHUB_TOKEN" in listed.stdout
    as_json = json.loads(cloche("secret", "list", "--json").stdout)
    assert as_json[0]["hosts"] == ["api.github.com"]
    assert cloche("secret", "rotate-key").returncode == 0
    everything = b"".join(path.read_bytes() for path in files_of(cloche))
    assert VALUE not in everything + stored.stdout + stored.stderr + listed.stdout
    assert b"github" in everything, "the journal and the list name it"
    assert cloche("secret", "remove", "github").returncode == 0
    missing = cloche("secret", "remove", "github", "--json")
    assert json.loads(missing.stdout)["error"]["code"] == "secret_not_found"
    kinds = [json.loads(line)["kind"] for line in cloche("events", "--json").stdout.splitlines()]
    assert kinds.count("secret_changed") == 2


def test_a_value_from_a_variable(cloche):
    stored = cloche(
        *SET[:3], *SET[3:], "--header", "X-Key", "--from-env", "MINE", env={"MINE": VALUE.decode()}
    )
    assert stored.returncode == 0, stored.stderr
    assert json.loads(cloche("secret", "list", "--json").stdout)[0]["field"] == "X-Key"


def test_a_key_from_the_environment(bare):
    cloche = bare  # a keeper has the key of the environment that it was started in
    key = {"CLOCHE_SECRETS_KEY": "ab" * 32}
    assert cloche(*SET, stdin=VALUE, env=key).returncode == 0
    assert not (cloche.state / "keys/secrets.key").exists()
    other = cloche(*SET, "--json", stdin=VALUE, env={"CLOCHE_SECRETS_KEY": "cd" * 32})
    assert json.loads(other.stdout)["error"]["code"] == "secrets_locked"
