"""Secrets in real sandboxes: real clients, real TLS servers on this host, and a search for the value wherever it could be."""

import base64
import os
import shutil
import time

import pytest

import cloche
from cloche import engine, model, settings, store, wiring, workspaces
from cloche.egress import authority
from cloche.sdk import portal
from tests.egress import echoing

VALUE = "ghp_R3alV4lue/of+the=secret0123456789"
BEARER = '-H "Authorization: Bearer $GITHUB_TOKEN"'


class World:
    """An engine with a secret, whose proxy also trusts the authority of two servers on this host."""

    def __init__(self, home, theirs, api, other):
        self.api, self.other = api, other
        trusted = home.parent / "theirs.pem"
        trusted.write_text(theirs.certificate)
        chosen = settings.Network(authorities=str(trusted))
        self.config = settings.Settings(home=str(home), network=chosen)
        settings.make_home(self.config.home)
        self.engine = self.do(self._make())

    async def _make(self):
        config = self.config
        return engine.Engine(
            config, store.Store(config.state_path), wiring.drivers(config.home), owner=wiring.owner(),
            interpreters=wiring.interpreters(), workspaces=workspaces.LocalWorkspaces(config.home, {}),
            egress=lambda: wiring.egress(config), secrets=lambda: wiring.secrets(config),
            policies=settings.PolicyFiles(config, {}),
        )  # fmt: skip

    def do(self, work):
        return portal.run(work)

    def store(self, **fields):
        base = {"name": "github", "hosts": ("api.test",), "env": "GITHUB_TOKEN"}
        return self.do(self.engine.set_secret(model.Secret(**{**base, **fields}), VALUE.encode()))

    def create(self, *secrets, allow=("api.test", "other.test"), **fields):
        resolve = {"api.test:443": self.api.address, "other.test:443": self.other.address}
        policy = {"network": {"mode": "rules", "allow": list(allow), "resolve": resolve}}
        spec = model.SandboxSpec(policy=policy, secrets=secrets, **fields)
        return self.do(self.engine.create(spec)).id

    def exec(self, sandbox, command, **options):
        return self.do(self.engine.exec(sandbox, model.ExecRequest(command=command, **options)))

    def delete(self, sandbox):
        self.do(self.engine.delete(sandbox))

    def events(self, kind):
        deadline = time.monotonic() + 20
        while True:
            found = [e for e in self.do(self.engine.events(limit=1000)) if e["kind"] == kind]
            if found or time.monotonic() > deadline:
                return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    theirs = authority.Authority()
    directory = tmp_path_factory.mktemp("w")
    with (
        echoing.serving("api.test", echoing.context_for(theirs, "api.test", directory)) as api,
        echoing.serving("other.test", echoing.context_for(theirs, "other.test", directory)) as other,
    ):
        made = World(directory / "s", theirs, api, other)
        made.store()
        yield made
        made.do(made.engine.aclose())


@pytest.fixture(autouse=True)
def forgetful(world):
    for server in (world.api, world.other):
        server.got.clear()
    world.api.elsewhere = "https://other.test"


@pytest.fixture(scope="module")
def box(world):
    sandbox = world.create("github")
    yield sandbox
    world.delete(sandbox)


def refused(world, code, *secrets, **fields):
    before = world.engine.live
    with pytest.raises(cloche.ClocheError) as caught:
        world.create(*secrets, **fields)
    assert caught.value.code == code
    assert VALUE not in str(caught.value)
    assert world.engine.live == before


def given(got):
    """The value or pair that a server was authorised by."""
    scheme, _, text = got.headers["authorization"].partition(" ")
    return base64.b64decode(text).decode() if scheme == "Basic" else text


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_granted_makes_no_sandbox(world):
    refused(world, "secret_not_found", "githbu")
    refused(world, "environment_invalid", "github", env={"GITHUB_TOKEN": "mine"})
    with pytest.raises(cloche.ClocheError) as caught:
        world.do(world.engine.create(model.SandboxSpec(secrets=("github",))))
    assert caught.value.code == "argument_invalid"
    assert "network is off" in caught.value.message


def test_the_value_is_in_no_file_variable_or_command_line_inside(world, box):
    fetched = world.exec(box, f"curl -sS https://api.test/plain {BEARER}")
    assert fetched.exit_code == 0, fetched.stderr
    assert given(world.api.got[0]) == VALUE, "the server did get it"
    search = 'read -r needle; grep -raoF -e "$needle" /home /tmp /workspace /etc /var 2>/dev/null; exit 0'
    assert world.exec(box, search, stdin=VALUE.encode() + b"\n").stdout == ""
    shown = world.exec(box, "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null").stdout
    assert "cloche-secret-" in shown, "what is there is found"
    assert VALUE not in shown + fetched.stdout + fetched.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of processes in a sandbox: needs uid 0")
def test_the_value_is_in_no_memory_inside(world, box):
    program = (
        "import os, ssl, sys, urllib.request as u\n"
        "r = u.Request('https://api.test/plain', headers={'Authorization': 'Bearer ' + os.environ['GITHUB_TOKEN']})\n"
        "held = u.urlopen(r, timeout=20).read(); print('held', flush=True); sys.stdin.read()"
    )
    request = model.ExecRequest(command=["python3", "-c", program], open_stdin=True)
    running = world.do(world.engine.start(box, request))
    deadline = time.monotonic() + 30
    while not world.api.got:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    placeholder = world.exec(box, "printenv GITHUB_TOKEN").stdout.strip().encode()
    looked = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if placeholder not in file.read():
                    continue
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    first, last = (int(part, 16) for part in line.split()[0].split("-"))
                    if "r" in line.split()[1] and "[v" not in line:
                        memory.seek(first)
                        assert VALUE.encode() not in memory.read(last - first)
                looked += 1
        except OSError:
            continue
    assert looked >= 1
    world.do(world.engine.write_stdin(box, running.id, b"", end=True))


def test_to_another_host_nothing_goes(world, box):
    result = world.exec(box, f"curl -sSk https://other.test/plain {BEARER}")
    assert result.exit_code == 0, result.stderr
    assert given(world.other.got[0]).startswith("cloche-secret-")
    moved = world.exec(box, f"curl -sSkL --location-trusted https://api.test/redirect {BEARER}")
    assert given(world.api.got[0]) == VALUE
    landed = world.other.got[-1]
    assert landed.path.startswith("/landed")
    assert VALUE not in str(landed.headers) + landed.path + moved.stdout


@pytest.mark.parametrize("path", ["inheader", "spelt", "split", "gzip", "big/200000", "untilend"])
def test_an_echo_does_not_come_in(world, box, path):
    result = world.exec(box, f"curl -sS -i --compressed https://api.test/{path} {BEARER}")
    assert given(world.api.got[0]) == VALUE
    assert VALUE not in result.stdout
    if path == "gzip":
        assert "X-Proxy-Error: uninspectable-answer" in result.stdout
        assert [denial.rule for denial in result.denials] == ["answer_uninspectable"]


def test_a_second_sandbox_has_another_placeholder(world, box):
    second = world.create("github")
    try:
        mine = world.exec(box, "printenv GITHUB_TOKEN").stdout.strip()
        theirs = world.exec(second, "printenv GITHUB_TOKEN").stdout.strip()
        assert mine != theirs
        world.exec(second, f'curl -sS https://api.test/plain -H "Authorization: Bearer {mine}"')
        assert given(world.api.got[0]) == mine
    finally:
        world.delete(second)


def test_a_sandbox_without_the_secret_has_nothing_of_it(world):
    plain = world.create()
    try:
        shown = world.exec(plain, "env; ls -A /home/user")
        assert "cloche-secret-" not in shown.stdout
        assert "SSL_CERT_FILE" not in shown.stdout
        result = world.exec(plain, "curl -sS https://api.test/plain")
        assert result.exit_code == 60, "the server's own certificate, which this sandbox does not know"
    finally:
        world.delete(plain)


def test_a_rule_with_methods_is_obeyed_inside_tls(world):
    made = world.create(allow=("api.test methods=GET path=/repos",))
    try:
        for command in ("curl -sS -X POST -i https://api.test/repos", "curl -sS -i https://api.test/user"):
            result = world.exec(made, command)
            assert " 403 " in result.stdout
            assert result.denials
        assert world.api.got == []
        assert " 200 " in world.exec(made, "curl -sS -i https://api.test/repos/a").stdout
    finally:
        world.delete(made)


def test_no_file_of_the_state_directory_has_the_value_or_a_key(world, box):
    world.exec(box, f'curl -sS "https://api.test/plain?key=$GITHUB_TOKEN" {BEARER}')
    assert world.events("credential_used")
    seen = 0
    for root, _, files in os.walk(world.config.home):
        for path in (os.path.join(root, name) for name in files):
            if not os.path.isfile(path) or os.path.islink(path):
                continue
            seen += 1
            with open(path, "rb") as file:
                while piece := file.read(1 << 24):
                    assert VALUE.encode() not in piece, path
                    assert b"PRIVATE KEY" not in piece, path
    assert seen >= 3
    inside = world.exec(box, "cat $SSL_CERT_FILE").stdout
    assert "BEGIN CERTIFICATE" in inside
    assert "PRIVATE" not in inside


# ── what works ─────────────────────────────────────────────────────────────────────────────────────

CLIENTS = {
    "wget": "wget -q -T 20 -t 1 -O - https://api.test/plain --header \"Authorization: Bearer $GITHUB_TOKEN\"",
    "curl": f"curl -sS -f https://api.test/plain {BEARER}",
    "curl, captured": f"curl -sS -f --noproxy '*' https://api.test/plain {BEARER}",
    "curl, basic": "curl -sS -f https://api.test/plain -u x-access-token:$GITHUB_TOKEN",
    "python3": "python3 -c \"import os, urllib.request as u; r = u.Request('https://api.test/plain', headers={'Authorization': 'Bearer ' + os.environ['GITHUB_TOKEN']}); print(u.urlopen(r, timeout=20).read().decode())\"",
    "node": "node -e \"fetch('https://api.test/plain', {headers: {Authorization: 'Bearer ' + process.env.GITHUB_TOKEN}}).then(r => r.text()).then(console.log)\"",
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_a_real_client_needs_no_configuration(world, box, client):
    if shutil.which(client.partition(",")[0]) is None:
        pytest.skip(f"{client} is not installed")
    result = world.exec(box, CLIENTS[client])
    assert result.exit_code == 0, result.stderr
    assert given(world.api.got[0]).endswith(VALUE)
    assert VALUE not in result.stdout
    assert world.api.got[0].headers["authorization"] not in result.stdout
    assert result.denials == ()


def test_git_authenticates_with_the_placeholder(world, box):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    header = "Authorization: Basic $(printf me:$GITHUB_TOKEN | base64 -w0)"
    world.exec(box, f'git -c http.extraHeader="{header}" ls-remote https://api.test/repo.git')
    assert given(world.api.got[0]) == f"me:{VALUE}"
    assert world.api.got[0].path.startswith("/repo.git/info/refs")


def test_every_use_is_an_event_with_the_name(world, box):
    world.exec(box, f"curl -sS https://api.test/plain {BEARER}")
    used = world.events("credential_used")[-1]["data"]
    assert (used["secret"], used["host"], used["place"]) == ("github", "api.test:443", "header authorization")
    assert world.events("secret_changed")[0]["data"]["name"] == "github"


def test_a_placeholder_in_a_file(world):
    world.store(name="filed", env="", file="~/.config/tool/token", how="header", field="X-Api-Key")
    made = world.create("filed")
    try:
        assert world.exec(made, "stat -c %a ~/.config/tool/token").stdout.strip() == "600"
        result = world.exec(
            made, 'curl -sS https://api.test/plain -H "X-Api-Key: $(cat ~/.config/tool/token)"'
        )
        assert result.exit_code == 0, result.stderr
        assert world.api.got[0].headers["x-api-key"] == VALUE
        assert VALUE not in result.stdout
    finally:
        world.delete(made)
