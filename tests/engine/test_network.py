"""The network of real sandboxes: refused first, then the permitted twin; judged by what a server on this host saw."""

import os
import signal
import socket
import ssl
import threading
import time

import pytest

import cloche
from cloche import engine, model, settings, store, wiring, workspaces
from cloche.sdk import portal
from tests.egress import room


def refused(action, code):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    assert caught.value.code == code, caught.value
    return caught.value


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def server():
    with room.serving() as made:
        yield made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return room.certificate(tmp_path_factory.mktemp("ca"), "good.test", "other.test")


@pytest.fixture(scope="module")
def secure(certificate):
    """An HTTPS server for good.test and other.test."""
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with room.serving(context) as made:
        yield made


@pytest.fixture(autouse=True)
def forgetful(server, secure):
    server.connections = secure.connections = 0


def led(server, *names, port=80):
    return {f"{name}:{port}": server.address for name in names}


def egress_pid():
    """The egress process of this test's in-process engine."""
    for pid in os.listdir("/proc"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"cloche.egress.proxy" in line and parent == os.getpid():
            return int(pid)
    return 0


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"allow": ["https://pypi.org"]}, "policy_invalid"),
        ({"allow": ["169.254.169.254"]}, "policy_invalid"),
        ({"allow": ["a b"]}, "policy_invalid"),
        ({"allow": ["ok.test"], "resolve": {"ok.test": "127.0.0.1:1"}}, "policy_invalid"),
        ({"allow": "pypi.org"}, "argument_invalid"),
        ({"allow": ["pypi.org"], "network": "off"}, "argument_invalid"),
        ({"network": "some"}, "policy_invalid"),
    ],
    ids=str,
)
def test_rules_that_cannot_be_are_refused_before_anything_is_made(arguments, code):
    before = len(cloche.Sandbox.list())
    refused(lambda: cloche.Sandbox(**arguments), code)
    assert len(cloche.Sandbox.list()) == before


@pytest.mark.parametrize("driver", ["bubblewrap", "process"])
def test_a_driver_that_cannot_hold_a_network_refuses_it(driver):
    try:
        cloche.Sandbox(driver=driver, minimum_isolation="process").delete()
    except cloche.NotSupported:
        pytest.skip(f"{driver} does not run here")
    before = len(cloche.Sandbox.list())
    problem = refused(
        lambda: cloche.Sandbox(driver=driver, minimum_isolation="process", allow=["good.test"]),
        "not_supported_by_driver",
    )
    assert driver in problem.message
    assert len(cloche.Sandbox.list()) == before


def test_without_rules_there_is_nothing_and_attempts_fail_at_once(server):
    with cloche.Sandbox() as box:
        assert box.info().isolation.network == "off"
        result = box.exec(
            f"env | grep -ci proxy; curl -sS http://127.0.0.1:{server.port}; curl -sS http://10.1.2.3;"
            "curl -sS http://good.test; exit 9",
            timeout_s=30,
        )
    assert result.exit_code == 9
    assert result.stdout == "0\n"
    assert server.connections == 0


@pytest.mark.parametrize("prefix", ["", "env -i "], ids=["by proxy variables", "captured"])
def test_what_no_rule_allows_is_refused_and_its_twin_works(server, prefix):
    with cloche.Sandbox(allow=["good.test:80"], resolve=led(server, "good.test", "other.test")) as box:
        assert box.info().isolation.network == "rules"
        bad = box.exec(f"{prefix}curl -sS -m 20 http://other.test/")
        assert server.connections == 0
        good = box.exec(f"{prefix}curl -sS -m 20 http://good.test/x")
    assert good.stdout == "hello from /x\n"
    assert good.denials == ()
    assert [(d.kind, d.target.partition(":")[0], d.evidence) for d in bad.denials] == [
        ("network", "other.test", "proxy")
    ]
    assert "policy.network.allow" in bad.denials[0].hint


@pytest.mark.parametrize("prefix", ["", "env -i "], ids=["by proxy variables", "captured"])
def test_https_through_the_rules(secure, certificate, prefix):
    with cloche.Sandbox(
        allow=["good.test:443"], resolve=led(secure, "good.test", "other.test", port=443)
    ) as box:
        box.files.write("ca.pem", certificate[0].read_bytes())
        bad = box.exec(f"{prefix}curl -sS --cacert ca.pem https://other.test/")
        good = box.exec(f"{prefix}curl -sS --cacert ca.pem https://good.test/y")
    assert bad.exit_code != 0
    assert len(bad.denials) == 1
    assert (good.exit_code, good.stdout, good.denials) == (0, "hello from /y\n", ())
    assert secure.connections == 1


def test_a_network_that_is_open_is_still_closed_inward(server):
    with cloche.Sandbox(profile="permissive") as box:
        assert box.info().isolation.network == "open"
        assert box.info().warnings == ()
        shown = box.exec(
            f"curl -sS http://127.0.0.1:{server.port}/; curl -s -w '%{{http_code}}\n' -o /dev/null http://10.255.255.1/;"
            "curl -s -w '%{http_code}\n' -o /dev/null http://169.254.169.254/latest/meta-data/"
        )
    assert shown.stdout == "403\n403\n"
    assert [d.rule for d in shown.denials] == ["private_address", "metadata"]
    assert server.connections == 0


# ── changing rules ─────────────────────────────────────────────────────────────────────────────────


def test_rules_are_changed_on_a_live_sandbox(server):
    with cloche.Sandbox(allow=["good.test"], resolve=led(server, "good.test", "other.test")) as box:
        refused(lambda: box.policy.update(allow=["ftp://x"]), "policy_invalid")
        assert box.policy.get().network.allow == ("good.test",)
        assert box.exec("curl -sS http://good.test/1").stdout == "hello from /1\n"
        assert box.policy.update(allow=["other.test"]).network.allow == ("other.test",)
        result = box.exec("curl -sS http://good.test/2; curl -sS http://other.test/3")
        assert "network denied: good.test:80" in result.stdout
        assert "hello from /3\n" in result.stdout
        box.policy.update(network="off")
        assert box.info().isolation.network == "off"
        assert "network_off" in box.exec("curl -sS http://other.test/4").stdout


def test_a_sandbox_made_without_a_network_can_be_given_one(server):
    with cloche.Sandbox() as box:
        assert box.exec("curl -sS http://good.test/").exit_code != 0
        box.policy.update(allow=["good.test"], resolve=led(server, "good.test"))
        assert box.info().isolation.network == "rules"
        assert box.exec("curl -sS http://good.test/5; env -i curl -sS http://good.test/6").stdout == (
            "hello from /5\nhello from /6\n"
        )


def test_only_the_network_of_a_live_sandbox_can_be_changed():
    with cloche.Sandbox() as box:
        backend = box._async._backend
        problem = refused(
            lambda: portal.run(backend.update_policy(box.id, {"files": {"root": "read-only"}})),
            "argument_invalid",
        )
        assert "'files'" in problem.message


def test_a_sandbox_whose_own_programs_hold_the_port_gets_no_network():
    with cloche.Sandbox() as box:
        listening = box.start(
            [
                "python3",
                "-c",
                "import socket; s = socket.create_server(('127.0.0.1', 3128)); print(1, flush=True); s.accept()",
            ]
        )
        for event in listening.stream():
            assert isinstance(event, cloche.Output)
            break
        problem = refused(lambda: box.policy.update(allow=["good.test"]), "network_unavailable")
        assert "3128" in problem.message
        assert box.policy.get().network.mode == "off"
        assert box.info().isolation.network == "off"


# ── whose denial it is ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", ["", "env -i "], ids=["by proxy variables", "captured"])
def test_a_denial_belongs_to_the_command_that_was_refused(server, prefix):
    with cloche.Sandbox(allow=["good.test"], resolve=led(server, "good.test")) as box:
        quiet = box.start(f"read line; {prefix}curl -sS http://good.test/q")
        bad = box.exec(f"{prefix}curl -sS http://bad.test/; {prefix}curl -sS http://10.1.1.1/")
        quiet.write("go\n")
        good = quiet.wait()
    assert {d.target.partition(":")[0] for d in bad.denials} == {"bad.test", "10.1.1.1"}
    assert good.denials == ()
    assert good.stdout == "hello from /q\n"


def test_decisions_are_events(server):
    with cloche.Sandbox(allow=["good.test"], resolve=led(server, "good.test")) as box:
        box.exec("curl -sS http://good.test/; curl -sS http://bad.test/")
        backend = box._async._backend
        told = portal.run(backend.events(sandbox=box.id))
    decided = [(e["data"]["verdict"], e["data"]["target"]) for e in told if e["kind"] == "decided"]
    assert decided == [("allow", "good.test:80"), ("deny", "bad.test:80")]
    assert [e["data"]["denial"]["target"] for e in told if e["kind"] == "denied"] == ["bad.test:80"]


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_proxy_is_replaced_and_the_command_is_told(server):
    with cloche.Sandbox(allow=["good.test"], resolve=led(server, "good.test")) as box:
        waiting = box.start("read line; curl -sS -m 30 http://good.test/after")
        first = until(egress_pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: egress_pid() not in (0, first))
        waiting.write("go\n")
        result = waiting.wait()
        assert result.stdout == "hello from /after\n"
        assert len(result.faults) == 1
        assert "network_unavailable" in result.faults[0]
        later = box.exec("curl -sS http://good.test/later")
        assert (later.stdout, later.faults) == ("hello from /later\n", ())


def test_a_proxy_killed_again_and_again_lets_nothing_through_and_comes_back(server):
    with cloche.Sandbox(allow=["good.test"], resolve=led(server, "good.test", "bad.test")) as box:
        busy = box.start(
            "while [ ! -e enough ]; do curl -s -m 20 http://good.test/load >/dev/null; curl -s -m 20 http://bad.test/bad >/dev/null; done"
        )
        for _ in range(5):
            pid = until(egress_pid)
            asked = len(server.requests)
            until(lambda asked=asked: len(server.requests) > asked)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: egress_pid() not in (0, pid), 60)
        box.files.write("enough", "")
        result = busy.wait()
        assert result.faults
        assert ("GET", "/bad", "bad.test") not in server.requests
        after = box.exec("curl -sS http://good.test/after; curl -sS http://bad.test/")
        assert after.stdout.startswith("hello from /after\nnetwork denied: bad.test:80")
        assert after.faults == ()


def test_with_no_proxy_there_is_no_sandbox(tmp_path):
    from cloche.egress import outlet

    def broken():
        made = outlet.LocalEgress()
        made._process._spawn = lambda: (_ for _ in ()).throw(OSError(12, "no memory"))
        return made

    async def scene():
        config = settings.Settings(home=str(tmp_path / "s"))
        settings.make_home(config.home)
        made = engine.Engine(
            config, store.Store(":memory:"), wiring.drivers(config.home, embryos=0), owner=wiring.owner(),
            interpreters=wiring.interpreters(), workspaces=workspaces.LocalWorkspaces(config.home, {}), egress=broken,
            secrets=lambda: wiring.secrets(config), policies=settings.PolicyFiles(config, {"HOME": str(tmp_path)}),
        )  # fmt: skip
        try:
            spec = model.SandboxSpec(policy={"network": {"allow": ["good.test"]}})
            with pytest.raises(cloche.ClocheError) as caught:
                await made.create(spec)
            assert caught.value.code == "network_unavailable"
            assert made.live == 0
            plain = await made.create(model.SandboxSpec())
            assert plain.isolation.network == "off"
        finally:
            await made.aclose()

    portal.run(scene())


def test_many_sandboxes_at_once_are_kept_apart(server):
    def one(number, seen):
        name = f"s{number}.test"
        with cloche.Sandbox(allow=[name], resolve=led(server, *(f"s{n}.test" for n in range(6)))) as box:
            mine = box.exec(f"curl -sS http://{name}/{number}")
            other = box.exec(f"curl -sS http://s{(number + 1) % 6}.test/")
            seen[number] = (mine.stdout, mine.denials, len(other.denials))

    seen: dict[int, tuple] = {}
    threads = [threading.Thread(target=one, args=(n, seen)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert seen == {n: (f"hello from /{n}\n", (), 1) for n in range(6)}


# ── looking into TLS, and secrets ──────────────────────────────────────────────────────────────────


@pytest.fixture
def own(tmp_path, certificate):
    """An engine of the test's own, whose proxy trusts the test's server."""
    config = settings.Settings(
        home=str(tmp_path / "s"), network=settings.Network(authorities=str(certificate[0]))
    )

    async def make():
        return wiring.make_engine(dict(os.environ), config=config)

    made = portal.run(make())
    yield made
    portal.run(made.aclose())


def create(own, **fields):
    return portal.run(own.create(model.SandboxSpec(**fields))).id


def run(own, sandbox, command):
    return portal.run(own.exec(sandbox, model.ExecRequest(command=command)))


def store_secret(own, value=b"the-value", **fields):
    secret = model.Secret(name="github", hosts=("good.test",), env="TOKEN", **fields)
    portal.run(own.set_secret(secret, value))


@pytest.mark.parametrize("profile", ["moderate", "restrictive"])
def test_methods_and_paths_are_seen_in_tls(own, secure, profile):
    network = {"allow": ["good.test methods=GET path=/open"], "resolve": led(secure, "good.test", port=443)}
    box = create(own, profile=profile, policy={"network": network})
    bad = run(own, box, "curl -sS -X POST -d x https://good.test/open; curl -sS https://good.test/shut")
    assert [line.partition(";")[0] for line in bad.stdout.splitlines()] == [
        "network denied: good.test:443 (method_not_allowed)"
    ] * 2
    assert len(bad.denials) == 1
    good = run(
        own,
        box,
        "curl -sS https://good.test/open; env -u HTTPS_PROXY -u https_proxy curl -sS https://good.test/open",
    )
    assert good.stdout == "hello from /open\n" * 2
    assert secure.requests[-2:] == [("GET", "/open", "good.test")] * 2


def test_a_live_sandbox_learns_to_trust_when_rules_begin_to_look(own, secure):
    resolve = led(secure, "good.test", port=443)
    box = create(own, policy={"network": {"allow": ["other.test"], "resolve": resolve}})
    portal.run(own.update_policy(box, {"network": {"allow": ["good.test methods=GET"]}}))
    assert run(own, box, "curl -sS https://good.test/now").stdout == "hello from /now\n"
    assert run(own, box, "wget -qO- https://good.test/now").stdout == "hello from /now\n"


def test_a_secret_without_a_network_is_refused(own):
    store_secret(own)
    for spec, code in [
        ({"secrets": ("github",)}, "argument_invalid"),
        ({"secrets": ("gthub",), "policy": {"network": {"allow": ["good.test"]}}}, "secret_not_found"),
    ]:
        problem = refused(lambda spec=spec: create(own, **spec), code)
        assert "the-value" not in str(problem)
    assert own.live == 0


def test_a_secret_is_put_in_for_its_host_and_never_seen_inside(own, secure):
    store_secret(own)
    network = {
        "allow": ["good.test", "other.test"],
        "resolve": led(secure, "good.test", "other.test", port=443),
    }
    box = create(own, secrets=("github",), policy={"network": network})
    seen = run(
        own, box, 'env; cat /proc/*/environ; curl -sS -H "Authorization: Bearer $TOKEN" https://good.test/s'
    )
    assert "the-value" not in seen.stdout + seen.stderr
    assert "TOKEN=cloche-secret-" in seen.stdout
    assert secure.authorizations[-1] == "Bearer the-value"
    run(own, box, 'curl -sSk -H "Authorization: Bearer $TOKEN" https://other.test/s')
    assert secure.authorizations[-1].startswith("Bearer cloche-secret-")
    told = portal.run(own.events(sandbox=box))
    assert [(e["data"]["secret"], e["data"]["host"]) for e in told if e["kind"] == "credential_used"] == [
        ("github", "good.test:443")
    ]
    assert "the-value" not in str(told)


# ── other protocols ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def echo():
    """A server that speaks no protocol at all: every byte comes back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while data := client.recv(65536):
                    client.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def test_a_language_of_one_byte_passes_and_is_refused_where_no_rule_is(echo):
    speak = "python3 -c \"import socket; s = socket.create_connection(('HOST', 7777), 20); s.sendall(b'x'); print(s.recv(1))\""
    resolve = {"good.test:7777": echo, "other.test:7777": echo}
    with cloche.Sandbox(allow=["good.test:7777"], resolve=resolve) as box:
        bad = box.exec(speak.replace("HOST", "other.test"))
        assert bad.exit_code != 0
        assert [d.target for d in bad.denials] == ["other.test"]
        good = box.exec(speak.replace("HOST", "good.test"))
    assert (good.stdout, good.denials) == ("b'x'\n", ())


def test_programs_inside_meet_on_their_own_loopback():
    with cloche.Sandbox(allow=["good.test"]) as box:
        result = box.exec(
            "echo inside > page; python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & "
            "curl -sS --retry 20 --retry-connrefused http://127.0.0.1:8000/page; curl -sS http://localhost:8000/page; kill %1"
        )
    assert (result.stdout, result.denials) == ("inside\ninside\n", ())
