"""Every call of E2B's Python SDKs that is honoured: a program, and what became of it as our own SDK sees it.

`docs/guides/e2b.md` lists these calls; `test_calls.py` runs them with every pair of SDKs that has them, and `test_guide.py` compares. A case
makes what it needs: `box` is a sandbox that the cases of one pair share, `own` one that a case makes for itself and that is ended after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

import cloche

OLD, MIDDLE, NEW = "2.31", "2.45", "newest"
PATIENCE_S = 40
HOME = "/home/user"


class Seen(NamedTuple):
    """What an effect is judged by."""

    answer: Any
    box: cloche.Sandbox
    """The shared sandbox, through our own SDK."""
    ours: Callable[[str], cloche.Sandbox]
    """Any other."""
    http: httpx.Client
    program: Callable[[str], Any]

    def phase(self, sandbox: str) -> str:
        found = {info.id: info.phase for info in cloche.Sandbox.list(server=self.box.info().server)}
        return found.get(sandbox, "gone")

    def text(self, path: str, sandbox: str | None = None) -> str:
        box = self.box if sandbox is None else self.ours(sandbox)
        return box.files.read(f"{HOME}/{path}")

    def there(self, path: str) -> bool:
        parent, _, name = f"{HOME}/{path}".rpartition("/")
        return name in [entry.name for entry in self.box.files.list(parent)]

    def running(self, words: str) -> bool:
        return any(words in str(p.command) for p in self.box.processes.list() if p.running)

    def comes(self, condition: Callable[[], object]) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


class Case(NamedTuple):
    call: str
    """As the guide names it."""
    source: str
    """A program; what it calls `answer` is told."""
    effect: Callable[[Seen], bool]
    since: str = OLD


def says(expected: Any) -> Callable[[Seen], bool]:
    """For calls whose effect is what they tell: it agrees with what was done to the sandbox before."""
    return lambda seen: bool(seen.answer == expected)


_MAKE = "own = Sandbox.create(timeout=600)\n"
_OWN = _MAKE + "answer = own.sandbox_id\n"


def _wait(condition: str, done: str) -> str:
    return f"""
        found, deadline = [], time.monotonic() + {PATIENCE_S}
        while not ({condition}) and time.monotonic() < deadline:
            {done}
    """


def _lives(seen: Seen) -> float:
    ends = seen.ours(seen.answer).info().expires_at
    return 0 if ends is None else ends - time.time()


SANDBOXES = (
    Case("Sandbox.create(template, timeout, metadata, envs)", """
        own = Sandbox.create("base", timeout=700, metadata={"made": "by create"}, envs={"GREETING": "hello"})
        answer = own.sandbox_id
    """, lambda s: s.ours(s.answer).info().labels == {"made": "by create"} and 600 < _lives(s) <= 700
        and s.ours(s.answer).exec("echo $GREETING").stdout == "hello\n"),
    Case("Sandbox.create(allow_internet_access=False)", """
        own = Sandbox.create(timeout=600, allow_internet_access=False); answer = own.sandbox_id
    """, lambda s: s.ours(s.answer).info().isolation.network == "off"),
    Case("Sandbox.create(network=…)", """
        own = Sandbox.create(timeout=600, network={"allow_out": ["a.test"], "deny_out": ["0.0.0.0/0"]})
        answer = own.sandbox_id
    """, lambda s: s.ours(s.answer).policy.get().network.allow == ("a.test",)),
    Case("Sandbox.create(lifecycle={'on_timeout': 'pause'})", """
        own = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause"})
        told = own.get_info().lifecycle
        own.set_timeout(1); answer = own.sandbox_id
    """, lambda s: s.comes(lambda: s.phase(s.answer) == "paused") and s.program("answer = str(told)").find("pause") >= 0, MIDDLE),
    Case("Sandbox.create(lifecycle={'on_timeout': {'action': 'pause', 'mode': 'filesystem'}})", """
        own = Sandbox.create(timeout=600, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
        own.set_timeout(1); answer = own.sandbox_id
    """, lambda s: s.comes(lambda: s.phase(s.answer) == "archived"), NEW),
    Case("Sandbox.create(lifecycle={'on_timeout': 'pause', 'auto_resume': True})", """
        own = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
        own.files.write("kept", "yes"); own.pause(); answer = own.sandbox_id
    """, lambda s: s.phase(s.answer) == "paused" and s.program("answer = own.commands.run('cat kept').stdout") == "yes"
        and s.phase(s.answer) == "running" and _lives(s) > 0, MIDDLE),
    Case("Sandbox.create(template=<snapshot>)", _MAKE + """
own.files.write("seed", "kept")
snap = own.create_snapshot().snapshot_id
copy = Sandbox.create(snap, timeout=600)
answer = copy.sandbox_id
    """, lambda s: s.text("seed", s.answer) == "kept" and s.program("copy.kill(); answer = Sandbox.delete_snapshot(snap)") is True),
    Case("with Sandbox.create() as …", """
        with Sandbox.create(timeout=600) as own:
            answer = own.sandbox_id
    """, lambda s: s.phase(s.answer) == "gone"),
    Case("Sandbox.connect(id, timeout)", _OWN + "again = Sandbox.connect(own.sandbox_id, timeout=2000)",
        lambda s: 1900 < _lives(s) <= 2000),
    Case("sandbox.connect(), which resumes", _OWN + "own.beta_pause(); own.connect(timeout=900)",
        lambda s: s.phase(s.answer) == "running" and 800 < _lives(s) <= 900),
    Case("sandbox.connect(on_resume='reboot')", _OWN + """
own.files.write("kept", "yes"); h = own.commands.run("sleep 1000", background=True); own.pause(); own.connect(on_resume="reboot")
    """, lambda s: s.phase(s.answer) == "running" and s.text("kept", s.answer) == "yes"
        and not [p for p in s.ours(s.answer).processes.list() if p.running], NEW),
    Case("Sandbox.list(query=metadata)", """
        own = Sandbox.create(timeout=600, metadata={"found by": "a & b=c"})
        found = Sandbox.list(query=e2b.SandboxQuery(metadata={"found by": "a & b=c"})).next_items()
        answer = [[s.sandbox_id for s in found] == [own.sandbox_id], own.sandbox_id]
    """, lambda s: s.answer[0] and s.ours(s.answer[1]).info().labels == {"found by": "a & b=c"}),
    Case("Sandbox.list(query=state)", _MAKE + """
own.beta_pause()
def listed(state):
    found, pager = [], Sandbox.list(query=e2b.SandboxQuery(state=[state]))
    while pager.has_next:
        found += [s.sandbox_id for s in pager.next_items()]
    return own.sandbox_id in found
answer = [listed(e2b.SandboxState.PAUSED), listed(e2b.SandboxState.RUNNING), own.sandbox_id]
    """, lambda s: s.answer[:2] == [True, False] and s.phase(s.answer[2]) == "paused"),
    Case("Sandbox.list(limit), page by page", _MAKE + """
other = Sandbox.create(timeout=600)
pages, pager = [], Sandbox.list(limit=1)
while pager.has_next:
    pages.append([s.sandbox_id for s in pager.next_items()])
answer = [all(len(page) == 1 for page in pages), [own.sandbox_id] in pages and [other.sandbox_id] in pages]
other.kill()
    """, says([True, True])),
    Case("Sandbox.list(order)", _MAKE + """
first = Sandbox.list(order="asc").next_items(); last = Sandbox.list(order="desc").next_items()
answer = [s.sandbox_id for s in first] == [s.sandbox_id for s in last][::-1]
    """, says(True), NEW),
    Case("sandbox.get_info()", "i = box.get_info(); answer = [i.sandbox_id, i.state.value, i.memory_mb]",
        lambda s: s.answer == [s.box.id, "running", int(s.box.info().limits["memory_mib"].value)]),
    Case("Sandbox.get_info(id)", "answer = Sandbox.get_info(box.sandbox_id).sandbox_id", lambda s: s.answer == s.box.id, MIDDLE),
    Case("sandbox.is_running()", _MAKE + "before = own.is_running(); own.kill(); answer = [before, own.is_running()]", says([True, False])),
    Case("sandbox.set_timeout()", _OWN + "own.set_timeout(100)", lambda s: 50 < _lives(s) <= 100),
    Case("Sandbox.set_timeout(id)", _OWN + "Sandbox.set_timeout(own.sandbox_id, 3000)", lambda s: 2900 < _lives(s) <= 3000),
    Case("sandbox.get_metrics()", "m = box.get_metrics()[-1]; answer = [m.mem_total, m.cpu_count, 0 < m.disk_used < m.disk_total]",
        lambda s: s.answer == [int(s.box.info().limits["memory_mib"].value) << 20, 1, True]),
    Case("sandbox.pause()", _OWN + "told = own.pause()", lambda s: s.phase(s.answer) == "paused" and s.ours(s.answer).info().expires_at is None, MIDDLE),
    Case("sandbox.beta_pause()", _OWN + "own.beta_pause()", lambda s: s.phase(s.answer) == "paused"),
    Case("sandbox.pause(mode='filesystem')", _OWN + "own.pause(mode='filesystem')", lambda s: s.phase(s.answer) == "archived", NEW),
    Case("sandbox.fork(count)", _MAKE + """
own.files.write("seed", "before")
forks = own.fork(count=2); forks[0].files.write("seed", "after")
answer = [f.sandbox_id for f in forks]
    """, lambda s: [s.text("seed", one) for one in s.answer] == ["after", "before"]
        and s.program("for f in forks: f.kill()") is None, MIDDLE),
    Case("sandbox.create_snapshot()", "snap = box.create_snapshot().snapshot_id; answer = snap",
        lambda s: s.http.get(f"/v1/snapshots/{s.answer}").json()["sandbox"] == s.box.id and s.program("Sandbox.delete_snapshot(snap)") is None),
    Case("sandbox.create_snapshot(name=…)", "named = box.create_snapshot(name='of-a-test'); copy = Sandbox.create('of-a-test', timeout=600); answer = [named.snapshot_id, named.names]",
        lambda s: s.answer[1] == ["of-a-test"] and s.http.get("/v1/snapshots/of-a-test").json()["id"] == s.answer[0]
        and s.program("answer = [copy.kill(), Sandbox.delete_snapshot(named.snapshot_id)]") == [True, True], NEW),
    Case("Sandbox.list_snapshots()", "snap = box.create_snapshot().snapshot_id; answer = [snap, [s.snapshot_id for s in box.list_snapshots().next_items()]]",
        lambda s: s.answer[0] in s.answer[1] and s.program("Sandbox.delete_snapshot(snap)") is None),
    Case("Sandbox.delete_snapshot()", "snap = box.create_snapshot().snapshot_id; answer = [snap, Sandbox.delete_snapshot(snap), Sandbox.delete_snapshot(snap)]",
        lambda s: s.answer[1:] == [True, False] and s.http.get(f"/v1/snapshots/{s.answer[0]}").status_code == 404),
    Case("sandbox.update_network()", _OWN + "own.update_network({'deny_out': ['0.0.0.0/0'], 'allow_out': ['b.test']})",
        lambda s: s.ours(s.answer).policy.get().network.allow == ("b.test",), MIDDLE),
    Case("sandbox.kill()", _MAKE + "answer = [own.sandbox_id, own.kill(), own.kill()]", lambda s: s.answer[1:] == [True, False] and s.phase(s.answer[0]) == "gone"),
    Case("Sandbox.kill(id)", _MAKE + "answer = [own.sandbox_id, Sandbox.kill(own.sandbox_id)]", lambda s: s.answer[1] is True and s.phase(s.answer[0]) == "gone"),
    Case("sandbox.get_host(port)", "answer = [box.get_host(49983), box._envd_access_token]",
        lambda s: httpx.get(f"{s.http.base_url}/health", headers={"Host": s.answer[0], "X-Access-Token": s.answer[1]}, trust_env=False, timeout=50).status_code == 204),
    Case("sandbox.download_url()", "box.files.write('signed', 'x'); answer = box.download_url('signed', use_signature_expiration=600)",
        lambda s: httpx.get(s.answer, trust_env=False, timeout=50).text == "x" == s.text("signed")),
    Case("sandbox.upload_url()", "answer = box.upload_url('sent', use_signature_expiration=600)",
        lambda s: httpx.post(s.answer, files={"file": ("sent", b"by hand")}, trust_env=False, timeout=50).is_success and s.text("sent") == "by hand"),
    Case("E2B(api_key=…).Sandbox", """
        import os
        one = e2b.E2B(api_key=os.environ["E2B_API_KEY"], api_url=os.environ["E2B_API_URL"], sandbox_url=os.environ["E2B_SANDBOX_URL"])
        own = one.Sandbox.create(timeout=600); own.files.write("by", "client"); answer = own.sandbox_id
    """, lambda s: s.text("by", s.answer) == "client", NEW),
    Case("Template.exists(), .alias_exists()", "answer = [e2b.Template.exists('base'), e2b.Template.exists('no-such'), e2b.Template.alias_exists('code-interpreter-v1')]",
        says([True, False, True]), MIDDLE),
    Case("Template.get_tags()", "answer = [tag.tag for tag in e2b.Template.get_tags('base')]", says(["default"]), MIDDLE),
    Case("AsyncSandbox.create(), .kill()", """
        async def main():
            made = await e2b.AsyncSandbox.create(timeout=600)
            ran = await asyncio.gather(*(made.commands.run(f"echo {n} > {n}") for n in range(3)))
            listed = [entry.name for entry in await made.files.list(".")]
            return [made.sandbox_id, [r.exit_code for r in ran], {"0", "1", "2"} <= set(listed), await made.kill()]
        answer = asyncio.run(main())
    """, lambda s: s.answer[1:] == [[0, 0, 0], True, True] and s.phase(s.answer[0]) == "gone"),
)  # fmt: skip

FILES = (
    Case("files.write(str)", "i = box.files.write('a/text', 'x'); answer = [i.name, i.path]", lambda s: s.answer == ["text", f"{HOME}/a/text"] and s.text("a/text") == "x"),
    Case("files.write(bytes)", "box.files.write('bytes', b'\\x00\\xff')", lambda s: s.box.files.read(f"{HOME}/bytes", format="bytes") == b"\x00\xff"),
    Case("files.write(file object)", "import io; box.files.write('object', io.BytesIO(b'x' * 300_000))", lambda s: s.text("object") == "x" * 300_000),
    Case("files.write(gzip=True)", "box.files.write('packed', 'y' * 100_000, gzip=True)", lambda s: s.text("packed") == "y" * 100_000, NEW),
    Case("files.write(use_octet_stream=True)", "box.files.write('plain', 'z', use_octet_stream=True)", lambda s: s.text("plain") == "z", NEW),
    Case("files.write(user='root')", "box.files.write('/root/by-root', 'x', user='root')", lambda s: s.box.exec("cat /root/by-root", user="root").stdout == "x"),
    Case("files.write_files()", "box.files.write_files([{'path': 'm/1', 'data': '1'}, {'path': 'm/2', 'data': b'2'}])", lambda s: s.text("m/1") + s.text("m/2") == "12"),
    Case("files.read()", "box.commands.run('printf héllo > told'); answer = box.files.read('told')", lambda s: s.answer == "héllo" == s.text("told")),
    Case("files.read(format='bytes')", "box.files.write('b', b'\\xff'); answer = list(box.files.read('b', format='bytes'))", says([255])),
    Case("files.read(format='stream')", "box.files.write('big', b'x' * 1_000_000); answer = sum(len(part) for part in box.files.read('big', format='stream'))",
        lambda s: s.answer == 1_000_000 == s.box.files.stat(f"{HOME}/big").size),
    Case("files.read(gzip=True)", "box.files.write('big2', 'q' * 500_000); answer = box.files.read('big2', gzip=True) == 'q' * 500_000", says(True), NEW),
    Case("files.list()", "box.files.make_dir('listed/deep'); answer = [[e.name, e.type.value] for e in box.files.list('listed')]", says([["deep", "dir"]])),
    Case("files.list(depth)", "box.files.write('deep/1/2', ''); answer = sorted(e.path for e in box.files.list('deep', depth=2))",
        says([f"{HOME}/deep/1", f"{HOME}/deep/1/2"])),
    Case("files.exists()", "box.files.write('here', ''); answer = [box.files.exists('here'), box.files.exists('nowhere')]", lambda s: s.answer == [True, False] and s.there("here")),
    Case("files.get_info()", "box.files.write('known', 'four'); i = box.files.get_info('known'); answer = [i.size, i.type.value, i.owner]",
        lambda s: s.answer == [s.box.files.stat(f"{HOME}/known").size, "file", "user"]),
    Case("files.remove()", "box.files.write('gone/a', ''); box.files.remove('gone')", lambda s: not s.there("gone")),
    Case("files.rename()", "box.files.write('old', 'x'); answer = box.files.rename('old', 'new/place').path", lambda s: s.answer == f"{HOME}/new/place" and s.text("new/place") == "x" and not s.there("old")),
    Case("files.make_dir()", "answer = [box.files.make_dir('made/dir'), box.files.make_dir('made/dir')]", lambda s: s.answer == [True, False] and s.box.files.stat(f"{HOME}/made/dir").type == "directory"),
    Case("files.watch_dir(), .get_new_events(), .stop()", "box.files.make_dir('watched'); w = box.files.watch_dir('watched')",
        lambda s: s.box.files.write(f"{HOME}/watched/new", "x") is not None
        and "new" in s.program(_wait("found", "found += [e.name for e in w.get_new_events()]") + "\n        w.stop(); answer = found")),
    Case("files.watch_dir(recursive=True)", "box.files.make_dir('tree/deep'); w = box.files.watch_dir('tree', recursive=True)",
        lambda s: s.box.files.write(f"{HOME}/tree/deep/new", "x") is not None
        and "deep/new" in s.program(_wait("'deep/new' in found", "found += [e.name for e in w.get_new_events()]") + "\n        w.stop(); answer = found")),
    Case("AsyncSandbox.files.watch_dir(), a stream", """
        async def main():
            other = await e2b.AsyncSandbox.connect(box.sandbox_id)
            await other.files.make_dir("streamed")
            seen = asyncio.Queue()
            watching = await other.files.watch_dir("streamed", on_event=seen.put_nowait)
            await other.files.write("streamed/new", "x")
            first = await asyncio.wait_for(seen.get(), 40)
            await watching.stop()
            return first.name
        answer = asyncio.run(main())
    """, lambda s: s.answer == "new" and s.text("streamed/new") == "x"),
)  # fmt: skip

COMMANDS = (
    Case("commands.run()", "r = box.commands.run('echo out; echo err >&2; touch ran'); answer = [r.stdout, r.stderr, r.exit_code]", lambda s: s.answer == ["out\n", "err\n", 0] and s.there("ran")),
    Case("commands.run(envs, cwd)", "answer = box.commands.run('echo $A; pwd', envs={'A': '1'}, cwd='/tmp').stdout", says("1\n/tmp\n")),
    Case("commands.run(user='root')", "answer = box.commands.run('id -u; touch /root/here', user='root').stdout", lambda s: s.answer == "0\n" and s.box.exec("ls /root/here", user="root").exit_code == 0),
    Case("commands.run(timeout=0), which is none", "answer = box.commands.run('echo endless', timeout=0).stdout", says("endless\n")),
    Case("commands.run(timeout), which kills", """
        try:
            box.commands.run("sleep 3131", timeout=1)
        except e2b.TimeoutException:
            answer = "too slow"
    """, lambda s: s.answer == "too slow" and s.comes(lambda: not s.running("3131"))),
    Case("commands.run(on_stdout, on_stderr)", "got = []; box.commands.run('echo a; echo b >&2', on_stdout=got.append, on_stderr=got.append); answer = sorted(got)", says(["a\n", "b\n"])),
    Case("commands.run(background=True)", "h = box.commands.run('sleep 3132', background=True); answer = h.pid", lambda s: s.running("3132") and s.program("answer = h.kill()") is True),
    Case("handle.wait()", "h = box.commands.run('echo waited', background=True); answer = h.wait().stdout", says("waited\n")),
    Case("iteration over a handle", """
        h = box.commands.run("echo first; while [ ! -e go ]; do sleep 0.05; done; echo second", background=True)
        seen = []
        for out, err, pty in h:
            seen.append(out)
            if "first" in out:
                box.files.write("go", "")
        answer = "".join(seen)
    """, says("first\nsecond\n")),
    Case("handle.kill()", "h = box.commands.run('sleep 3133', background=True); answer = h.kill()", lambda s: s.answer is True and s.comes(lambda: not s.running("3133"))),
    Case("handle.disconnect()", "h = box.commands.run('sleep 3134', background=True); h.disconnect(); answer = h.pid", lambda s: s.running("3134") and s.program("answer = box.commands.kill(h.pid)") is True),
    Case("handle.send_stdin(), .close_stdin()", "h = box.commands.run('cat > typed', background=True, stdin=True); h.send_stdin('by handle'); h.close_stdin(); h.wait()", lambda s: s.text("typed") == "by handle", NEW),
    Case("commands.list()", "h = box.commands.run('sleep 3135', background=True); answer = [h.pid, [[p.pid, p.args[-1]] for p in box.commands.list()]]",
        lambda s: [s.answer[0], "sleep 3135"] in s.answer[1] and s.running("3135") and s.program("answer = h.kill()") is True),
    Case("commands.kill()", "h = box.commands.run('sleep 3136', background=True); answer = [box.commands.kill(h.pid), box.commands.kill(99999)]", lambda s: s.answer == [True, False] and s.comes(lambda: not s.running("3136"))),
    Case("commands.send_stdin()", "h = box.commands.run('read line; echo $line > read', background=True, stdin=True); box.commands.send_stdin(h.pid, 'typed\\n'); h.wait()", lambda s: s.text("read") == "typed\n"),
    Case("commands.close_stdin()", "h = box.commands.run('cat; echo over > over', background=True, stdin=True); box.commands.close_stdin(h.pid); h.wait()", lambda s: s.text("over") == "over\n", MIDDLE),
    Case("commands.stream_input()", "h = box.commands.run('cat > stream', background=True, stdin=True); box.commands.stream_input(h.pid, iter([b'one ', b'two'])); box.commands.close_stdin(h.pid); h.wait()", lambda s: s.text("stream") == "one two", NEW),
    Case("commands.connect()", """
        h = box.commands.run("while [ ! -e join ]; do sleep 0.05; done; echo joined", background=True)
        h.disconnect(); again = box.commands.connect(h.pid); box.files.write("join", ""); answer = again.wait().stdout
    """, says("joined\n")),
    Case("pty.create(), .send_stdin()", """
        t = box.pty.create(e2b.PtySize(rows=30, cols=90))
        box.pty.send_stdin(t.pid, b"stty size > size; exit\\n"); t.wait()
    """, lambda s: s.text("size") == "30 90\n"),
    Case("pty.resize()", """
        t = box.pty.create(e2b.PtySize(rows=30, cols=90)); box.pty.resize(t.pid, e2b.PtySize(rows=41, cols=101))
        box.pty.send_stdin(t.pid, b"stty size > resized; exit\\n"); t.wait()
    """, lambda s: s.text("resized") == "41 101\n"),
    Case("pty.connect()", """
        t = box.pty.create(e2b.PtySize(rows=30, cols=90)); t.disconnect(); again = box.pty.connect(t.pid)
        box.pty.send_stdin(t.pid, b"echo jo''ined; exit\\n"); shown = []
        again.wait(on_pty=shown.append); answer = b"joined" in b"".join(shown)
    """, says(True), MIDDLE),
    Case("pty.kill()", "t = box.pty.create(e2b.PtySize(rows=30, cols=90), envs={'MARK': '1'}); answer = box.pty.kill(t.pid)", lambda s: s.answer is True and s.comes(lambda: not s.running("-i"))),
    Case("git.init(), .add(), .commit(), .create_branch()", """
        box.git.init("repo"); box.files.write("repo/a", "x"); box.git.add("repo")
        box.git.commit("repo", "first", author_name="A", author_email="a@b.test"); box.git.create_branch("repo", "more")
        answer = box.git.branches("repo").current_branch
    """, lambda s: s.answer == "more" and s.box.exec(["git", "-C", f"{HOME}/repo", "log", "--format=%s"]).stdout == "first\n"),
)  # fmt: skip

CODE = (
    Case("run_code()", "box.run_code('x = 41'); r = box.run_code('print(1); x + 1'); answer = [r.text, r.logs.stdout]", says(["42", ["1\n"]]), MIDDLE),
    Case("run_code(on_stdout, …), as it happens", """
        got = []
        def out(line):
            got.append(line.line); box.files.write("goes-on", "")
        r = box.run_code("import os, time\\nprint('first', flush=True)\\nwhile not os.path.exists('goes-on'): time.sleep(0.02)\\nprint('then')\\n7",
            on_stdout=out, on_result=lambda shown: got.append(shown.text))
        answer = [got[0], "".join(got)]
    """, lambda s: s.answer == ["first\n", "first\nthen\n7"] and s.there("goes-on"), MIDDLE),
    Case("run_code(on_error)", "got = []; box.run_code('1/0', on_error=lambda e: got.append(e.name)); answer = got", says(["ZeroDivisionError"]), MIDDLE),
    Case("run_code(envs)", "box.run_code('import os; open(\"env\", \"w\").write(os.environ[\"ONCE\"])', envs={'ONCE': 'yes'}); answer = box.run_code('os.environ.get(\"ONCE\")').text", lambda s: s.answer in (None, "None") and s.text("env") == "yes", MIDDLE),
    Case("run_code(), with the variables of create(envs)", "own = Sandbox.create(timeout=600, envs={'OF': 'the sandbox'}); answer = own.run_code('import os; os.environ[\"OF\"]').text", says("the sandbox"), MIDDLE),
    Case("run_code(language='bash')", "answer = box.run_code('echo made > by-bash; echo $((20 + 1))', language='bash').logs.stdout", lambda s: s.answer == ["21\n"] and s.text("by-bash") == "made\n", MIDDLE),
    Case("run_code(timeout), which interrupts", """
        try:
            box.run_code("import time\\nwhile True: time.sleep(0.05)", timeout=1)
        except e2b.TimeoutException:
            answer = box.run_code("'alive'").text
    """, says("alive"), MIDDLE),
    Case("create_code_context(cwd), run_code(context)", "c = box.create_code_context(cwd='/tmp'); box.run_code('import os; open(\"in-tmp\", \"w\").write(os.getcwd())', context=c); answer = c.id",
        lambda s: s.box.files.read("/tmp/in-tmp") == "/tmp" and s.answer in [c.id for c in s.box.contexts.list()], MIDDLE),
    Case("list_code_contexts()", "c = box.create_code_context(); answer = [c.id, [one.id for one in box.list_code_contexts()]]", lambda s: s.answer[0] in s.answer[1] and s.answer[0] in [c.id for c in s.box.contexts.list()], MIDDLE),
    Case("restart_code_context()", "c = box.create_code_context(); box.run_code('mine = 1', context=c); box.restart_code_context(c); answer = box.run_code('mine', context=c).error.name", says("NameError"), MIDDLE),
    Case("remove_code_context()", "c = box.create_code_context(); box.remove_code_context(c); answer = c.id", lambda s: s.answer not in [c.id for c in s.box.contexts.list()], MIDDLE),
    Case("AsyncSandbox.run_code()", """
        async def main():
            from e2b_code_interpreter import AsyncSandbox
            other = await AsyncSandbox.connect(box.sandbox_id)
            return (await other.run_code("open('by-async', 'w').write('x')")).text
        answer = asyncio.run(main())
    """, lambda s: s.answer == "1" and s.text("by-async") == "x", MIDDLE),
)  # fmt: skip

TABLE = (*SANDBOXES, *FILES, *COMMANDS, *CODE)


class Refused(NamedTuple):
    """A call that is not honoured: by us with 501 and a name, or by the SDK itself, which goes by envd's version."""

    call: str
    source: str
    words: str
    by: str = "501"


REFUSED = (
    Refused("Sandbox.create(mcp=…)", "Sandbox.create(mcp={'fetch': {}})", "mcp"),
    Refused("Sandbox.create(volume_mounts=…)", "Sandbox.create(volume_mounts={'/v': 'v'})", "volumeMounts"),
    Refused("Sandbox.create(iam=…)", "Sandbox.create(iam={'tokens': {'t': {'audience': ['a']}}})", "iam"),
    Refused("network={'rules': …}", "Sandbox.create(network={'rules': {'a.test': [{'transform': {'headers': {'A': 'b'}}}]}})", "network.rules"),
    Refused("network={'egress_proxy': …}", "Sandbox.create(network={'egress_proxy': {'address': 'a.test:1'}})", "egressProxy"),
    Refused("create_snapshot(mode='full')", "box.create_snapshot(mode='full')", "a snapshot of memory"),
    Refused("Template.build()", "e2b.Template.build(e2b.Template().from_image('debian:12'), 'a')", "template builds"),
    Refused("Template.assign_tags(), .remove_tags()", "e2b.Template.assign_tags('base', ['a'])", "template tags"),
    Refused("Volume.create(), .connect(), …", "e2b.Volume.create('v')", "volumes"),
    Refused("Secret.create(), …", "e2b.Secret.create('s', 'v')", "secrets"),
    Refused("run_code(language='javascript' and others)", "box.run_code('1', language='javascript')", "javascript"),
    Refused("files.write(metadata=…)", "box.files.write('a', 'b', metadata={'k': 'v'})", "envd 0.6.2", "the SDK"),
    Refused("files.watch_dir(include_entry=True)", "box.files.watch_dir('.', include_entry=True)", "update the template", "the SDK"),
    Refused("files.watch_dir(allow_network_mounts=True)", "box.files.watch_dir('.', allow_network_mounts=True)", "update the template", "the SDK"),
)  # fmt: skip
