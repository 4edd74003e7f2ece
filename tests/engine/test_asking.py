"""Asking somebody whether a sandbox may reach something: refusals first, judged by what a server on this host saw."""

import asyncio
import http.server
import json
import os
import threading
from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest

import cloche
from cloche import model, settings, wiring
from cloche.engine import asking
from cloche.sdk import portal
from tests.egress import room
from tests.engine.test_network import led


@pytest.fixture(scope="module")
def server():
    with room.serving() as made:
        yield made


@pytest.fixture(autouse=True)
def forgetful(server):
    server.connections = 0


def ask_for(server, callback, **arguments):
    resolve = led(server, "known.test", "new.test", "bad.test")
    return cloche.Sandbox(ask=callback, resolve=resolve, **arguments)


def test_what_is_denied_is_never_asked_about(server):
    asked = []

    def decide(question):
        asked.append(question)
        return "always"

    with ask_for(server, decide, allow=["known.test"], deny=["bad.test"]) as box:
        result = box.exec(
            "curl -sS http://bad.test/; curl -sS http://10.1.2.3/; curl -sS http://169.254.169.254/; curl -sS http://known.test/k"
        )
    assert [d.rule for d in result.denials] == ["bad.test", "private_address", "metadata"]
    assert asked == []
    assert result.stdout.endswith("hello from /k\n")
    assert server.connections == 1


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (lambda q: "deny", "somebody who was asked refused it"),
        (lambda q: "yes", "said 'yes', which is none of once, sandbox, always, deny"),
        (lambda q: None, "said None"),
        (lambda q: 1 // 0, "ZeroDivisionError"),
    ],
    ids=["no", "another word", "nothing", "an exception"],
)
def test_whatever_is_not_a_yes_is_a_no(server, callback, why):
    with ask_for(server, callback) as box:
        result = box.exec("curl -sS http://new.test/")
    assert why in result.stdout
    assert [d.target for d in result.denials] == ["new.test:80"]
    assert server.connections == 0


@pytest.mark.parametrize("prefix", ["", "env -i "], ids=["by proxy variables", "captured"])
def test_once_is_for_one_connection_and_sandbox_for_its_life(server, prefix):
    asked = []
    answers = iter(["once", "sandbox"])

    def decide(question):
        asked.append((question.target, question.rule, question.execution is not None))
        return next(answers)

    with ask_for(server, decide) as box:
        for path in ("1", "2", "3"):
            result = box.exec(f"{prefix}curl -sS http://new.test/{path}")
            assert (result.stdout, result.denials) == (f"hello from /{path}\n", ())
        assert asked == [("new.test:80", "", True)] * 2
        events = portal.run(box._async._backend.events(sandbox=box.id))
    assert [
        e["data"]["reason"] for e in events if e["kind"] == "decided" and e["data"]["operation"] == "answer"
    ] == [
        "once",
        "sandbox",
    ]
    assert ["+granted new.test:80"] in [e["data"]["summary"] for e in events if e["kind"] == "policy_changed"]


def test_a_rule_that_asks_is_asked_about_even_where_another_allows(server):
    asked = []

    def decide(question):
        asked.append(question.rule)
        return "sandbox"

    policy = cloche.Policy(network={"allow": ["known.test"], "ask": ["known.test"]})
    with cloche.Sandbox(policy=policy, resolve=led(server, "known.test")) as box:
        alone = box.exec("curl -sS http://known.test/")
        assert "nobody can be asked" in alone.stdout
        assert server.connections == 0
    with cloche.Sandbox(policy=policy, resolve=led(server, "known.test"), ask=decide) as box:
        assert (
            box.exec("curl -sS http://known.test/1; curl -sS http://known.test/2").stdout.count("hello") == 2
        )
    assert asked == ["known.test"]


def test_connections_to_one_target_share_a_question():
    async def scene():
        asks = asking.Asks(timeout_s=30)

        async def changed():
            return

        iterator = asks.follow("s", changed)
        assert (await anext(iterator)).id == ""
        question = model.Question(id="", sandbox="s", host="new.test", port=80)
        waiting = [asyncio.ensure_future(asks.ask(question)) for _ in range(3)]
        first = await anext(iterator)
        other = asyncio.ensure_future(asks.ask(model.Question(id="", sandbox="s", host="new.test", port=81)))
        assert (await anext(iterator)).port == 81
        asks.answer("s", first.id, "once", "")
        assert await asyncio.gather(*waiting) == [("once", "")] * 3
        assert isinstance(iterator, AsyncGenerator)
        await iterator.aclose()  # the last who could be asked leaves
        return await other

    assert asyncio.run(scene()) == ("deny", "whoever could be asked has left")


def test_a_sandbox_cannot_drown_a_person_in_questions():
    async def scene():
        asks = asking.Asks(timeout_s=30)

        async def changed():
            return

        iterator = asks.follow("s", changed)
        await anext(iterator)
        many = [
            asyncio.ensure_future(asks.ask(model.Question(id="", sandbox="s", host=f"h{n}.test", port=80)))
            for n in range(40)
        ]
        done, _ = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        refused = {task.result() for task in done}
        asks.forget("s")
        assert [question.port async for question in iterator] == [80] * 32
        await asyncio.gather(*many)
        return refused

    assert asyncio.run(scene()) == {("deny", "32 questions of this sandbox wait for an answer already")}


def test_always_is_written_to_the_policy_of_the_user(server):
    path = os.path.join(os.environ["XDG_CONFIG_HOME"], "cloche", "policy.toml")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write('# mine\n[network] # rules\ndeny = ["bad.test"]\n')
    try:
        with ask_for(server, lambda q: "always") as box:
            assert box.exec("curl -sS http://new.test/1").stdout == "hello from /1\n"
            with open(path) as file:
                assert (
                    file.read() == '# mine\n[network] # rules\nallow = ["new.test:80"]\ndeny = ["bad.test"]\n'
                )
        with cloche.Sandbox(resolve=led(server, "new.test")) as box:
            assert box.exec("curl -sS http://new.test/2").stdout == "hello from /2\n"
    finally:
        os.unlink(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[network]\nallow = ["a.test:1"]\n'),
        ("[files]\n", '[files]\n\n[network]\nallow = ["a.test:1"]\n'),
        ("[network]\nallow = []\n", '[network]\nallow = ["a.test:1"]\n'),
        (
            '[network]\nallow = [ # mine\n  "b.test",\n]\n',
            '[network]\nallow = ["a.test:1",  # mine\n  "b.test",\n]\n',
        ),
        (
            '[network]\nmode = "rules"\n[files]\n',
            '[network]\nallow = ["a.test:1"]\nmode = "rules"\n[files]\n',
        ),
        ('network.allow = ["b.test"]\n', None),
        ("[network\n", None),
    ],
    ids=[
        "nothing",
        "another table",
        "an empty list",
        "a long list",
        "another table after it",
        "a dotted key",
        "broken",
    ],
)
def test_a_rule_is_added_at_one_place_or_not_at_all(tmp_path, before, after):
    path = tmp_path / "cloche" / "policy.toml"
    path.parent.mkdir()
    path.write_text(before)
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    if after is None:
        with pytest.raises(cloche.ClocheError) as caught:
            settings.allow_always("a.test:1", environment)
        assert caught.value.code == "policy_invalid"
        assert path.read_text() == before
        return
    settings.allow_always("a.test:1", environment)
    assert path.read_text().replace(" ", "") == after.replace(" ", "")
    settings.allow_always("a.test:1", environment)
    assert path.read_text().count("a.test:1") == 1


def test_an_asynchronous_callback_runs_in_the_caller_s_loop(server):
    async def scene():
        loop = asyncio.get_running_loop()
        seen = []

        async def decide(question):
            seen.append(asyncio.get_running_loop() is loop)
            return "once"

        async with cloche.AsyncSandbox(ask=decide, resolve=led(server, "new.test")) as box:
            assert (await box.exec("curl -sS http://new.test/1")).stdout == "hello from /1\n"
        return seen

    assert asyncio.run(scene()) == [True]


def test_an_answer_to_no_question_is_an_error(server):
    with ask_for(server, lambda q: "deny") as box, pytest.raises(cloche.ClocheError) as caught:
        portal.run(box._async._backend.answer_ask(box.id, "x", "once"))
    assert caught.value.code == "question_not_found"


# ── engines of the tests' own ──────────────────────────────────────────────────────────────────────


def make(tmp_path, **network):
    async def engine():
        config = settings.Settings(home=str(tmp_path / "s"), network=settings.Network(**network))
        return wiring.make_engine(dict(os.environ), config=config)

    return portal.run(engine())


def curl(own, server, path):
    spec = model.SandboxSpec(policy={"network": {"mode": "rules", "resolve": led(server, "new.test")}})
    box = portal.run(own.create(spec)).id
    return box, lambda: portal.run(
        own.exec(box, model.ExecRequest(command=f"curl -sS http://new.test/{path}"))
    )


def test_silence_is_a_no_when_the_time_is_up(tmp_path, server):
    own = make(tmp_path, ask_timeout_s=0.2)
    try:
        box, run = curl(own, server, "1")

        async def scene():
            iterator = own.follow_asks(box)
            assert isinstance(iterator, AsyncGenerator)
            assert (await anext(iterator)).id == ""
            result = await own.exec(box, model.ExecRequest(command="curl -sS http://new.test/1"))
            await iterator.aclose()
            return result

        result = portal.run(scene())
        assert "nobody answered within 0.2 s" in result.stdout
        assert "add " in run().stdout  # nobody follows any more: refused as ever, and at once
        assert server.connections == 0
    finally:
        portal.run(own.aclose())


class Hook(http.server.BaseHTTPRequestHandler):
    said = b""
    asked: ClassVar[list[dict]] = []

    def do_POST(self):
        Hook.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Hook.said)

    def log_message(self, *_):
        return


@pytest.mark.parametrize(
    ("said", "seen", "words"),
    [
        (b'{"answer": "deny", "reason": "not on a Friday"}', 0, "not on a Friday"),
        (b'{"answer": "yes"}', 0, "could not be asked"),
        (b"<html>", 0, "could not be asked"),
        (b'{"answer": "once"}', 1, "hello from /1"),
    ],
)
def test_a_webhook_decides(tmp_path, server, said, seen, words):
    hook = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=hook.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    Hook.said, Hook.asked = said, []
    own = make(tmp_path, ask_url=f"http://127.0.0.1:{hook.server_address[1]}/ask")
    try:
        _, run = curl(own, server, "1")
        assert words in run().stdout
        assert [(a["host"], a["port"]) for a in Hook.asked] == [("new.test", 80)]
        assert server.connections == seen
    finally:
        portal.run(own.aclose())
        hook.shutdown()
        hook.server_close()
        thread.join(5)
