"""The calls of E2B's JavaScript SDKs, as `table` has Python's: a program, and what became of it as our own SDK sees it."""

import time

import httpx

from tests.wires.e2b.table import HOME, Case, Seen, says

_MAKE = "own = await Sandbox.create({ timeoutMs: 600000 })\n"
_OWN = _MAKE + "answer = own.sandboxId\n"


def _lives(seen: Seen) -> float:
    ends = seen.ours(seen.answer).info().expires_at
    return 0 if ends is None else ends - time.time()


SANDBOXES = (
    Case("Sandbox.create({ timeoutMs, metadata, envs })", "own = await Sandbox.create('base', { timeoutMs: 700000, metadata: { made: 'by create' }, envs: { GREETING: 'hello' } }); answer = own.sandboxId",
        lambda s: s.ours(s.answer).info().labels == {"made": "by create"} and 600 < _lives(s) <= 700 and s.ours(s.answer).exec("echo $GREETING").stdout == "hello\n"),
    Case("Sandbox.create({ allowInternetAccess: false })", "own = await Sandbox.create({ allowInternetAccess: false }); answer = own.sandboxId", lambda s: s.ours(s.answer).info().isolation.network == "off"),
    Case("Sandbox.create({ network })", "own = await Sandbox.create({ network: { allowOut: ['a.test'], denyOut: ['0.0.0.0/0'] } }); answer = own.sandboxId", lambda s: s.ours(s.answer).policy.get().network.allow == ("a.test",)),
    Case("Sandbox.create({ lifecycle: { onTimeout: 'pause' } })", "own = await Sandbox.create({ lifecycle: { onTimeout: 'pause' } }); await own.setTimeout(1000); answer = own.sandboxId", lambda s: s.comes(lambda: s.phase(s.answer) == "paused")),
    Case("Sandbox.create({ lifecycle: { onTimeout: 'pause', autoResume: true } })", "own = await Sandbox.create({ lifecycle: { onTimeout: 'pause', autoResume: true } }); await own.files.write('kept', 'yes'); await own.pause(); answer = own.sandboxId",
        lambda s: s.phase(s.answer) == "paused" and s.program("answer = await own.files.read('kept')") == "yes" and s.phase(s.answer) == "running"),
    Case("Sandbox.create(<snapshot>)", _MAKE + "await own.files.write('seed', 'kept'); snap = (await own.createSnapshot()).snapshotId; copy = await Sandbox.create(snap); answer = copy.sandboxId",
        lambda s: s.text("seed", s.answer) == "kept" and s.program("await copy.kill(); answer = await Sandbox.deleteSnapshot(snap)") is True),
    Case("Sandbox.connect(id, { timeoutMs })", _OWN + "again = await Sandbox.connect(own.sandboxId, { timeoutMs: 2000000 })", lambda s: 1900 < _lives(s) <= 2000),
    Case("sandbox.connect(), which resumes", _OWN + "await own.pause(); await own.connect({ timeoutMs: 900000 })", lambda s: s.phase(s.answer) == "running" and 800 < _lives(s) <= 900),
    Case("Sandbox.list({ query })", "own = await Sandbox.create({ metadata: { js: 'a & b=c' } }); answer = [own.sandboxId, (await Sandbox.list({ query: { metadata: { js: 'a & b=c' }, state: ['running'] } }).nextItems()).map((one) => one.sandboxId)]", lambda s: s.answer[1] == [s.answer[0]]),
    Case("Sandbox.list({ limit }), page by page", _MAKE + "other = await Sandbox.create(); pages = []; pager = Sandbox.list({ limit: 1 }); while (pager.hasNext) pages.push((await pager.nextItems()).length); await other.kill(); answer = [pages.length >= 2, pages.every((n) => n === 1)]", says([True, True])),
    Case("sandbox.getInfo()", "i = await box.getInfo(); answer = [i.sandboxId, i.state]", lambda s: s.answer == [s.box.id, "running"]),
    Case("Sandbox.getInfo(id)", "answer = (await Sandbox.getInfo(box.sandboxId)).sandboxId", lambda s: s.answer == s.box.id),
    Case("sandbox.isRunning()", _MAKE + "before = await own.isRunning(); await own.kill(); answer = [before, await own.isRunning()]", says([True, False])),
    Case("sandbox.setTimeout()", _OWN + "await own.setTimeout(100000)", lambda s: 50 < _lives(s) <= 100),
    Case("Sandbox.setTimeout(id)", _OWN + "await Sandbox.setTimeout(own.sandboxId, 3000000)", lambda s: 2900 < _lives(s) <= 3000),
    Case("sandbox.getMetrics()", "m = (await box.getMetrics()).at(-1); answer = [m.memTotal, m.cpuCount, m.diskUsed < m.diskTotal]", lambda s: s.answer == [int(s.box.info().limits["memory_mib"].value) << 20, 1, True]),
    Case("sandbox.pause()", _OWN + "await own.pause()", lambda s: s.phase(s.answer) == "paused"),
    Case("Sandbox.betaPause(id)", _OWN + "await Sandbox.betaPause(own.sandboxId)", lambda s: s.phase(s.answer) == "paused"),
    Case("sandbox.fork({ count })", _MAKE + "await own.files.write('seed', 'before'); forks = await own.fork({ count: 2 }); await forks[0].files.write('seed', 'after'); answer = forks.map((f) => f.sandboxId)",
        lambda s: [s.text("seed", one) for one in s.answer] == ["after", "before"] and s.program("for (const f of forks) await f.kill()") is None),
    Case("sandbox.createSnapshot(), Sandbox.deleteSnapshot()", "snap = (await box.createSnapshot()).snapshotId; answer = [snap, await Sandbox.deleteSnapshot(snap), await Sandbox.deleteSnapshot(snap)]", lambda s: s.answer[1:] == [True, False] and s.http.get(f"/v1/snapshots/{s.answer[0]}").status_code == 404),
    Case("Sandbox.listSnapshots()", "snap = (await box.createSnapshot()).snapshotId; answer = (await Sandbox.listSnapshots({ sandboxId: box.sandboxId }).nextItems()).map((one) => one.snapshotId); await Sandbox.deleteSnapshot(snap); answer = answer.includes(snap)", says(True)),
    Case("sandbox.updateNetwork()", _OWN + "await own.updateNetwork({ denyOut: ['0.0.0.0/0'], allowOut: ['b.test'] })", lambda s: s.ours(s.answer).policy.get().network.allow == ("b.test",)),
    Case("sandbox.kill()", _MAKE + "answer = [own.sandboxId, await own.kill(), await own.kill()]", lambda s: s.answer[1:] == [True, False] and s.phase(s.answer[0]) == "gone"),
    Case("Sandbox.kill(id)", _MAKE + "answer = [own.sandboxId, await Sandbox.kill(own.sandboxId)]", lambda s: s.answer[1] is True and s.phase(s.answer[0]) == "gone"),
    Case("sandbox.getHost(port)", "answer = box.getHost(8080)", lambda s: s.answer.startswith(f"8080-{s.box.id}.")),
    Case("sandbox.downloadUrl()", "await box.files.write('signed', 'x'); answer = await box.downloadUrl('signed', { useSignatureExpiration: 600 })", lambda s: httpx.get(s.answer, trust_env=False, timeout=50).text == "x" == s.text("signed")),
    Case("sandbox.uploadUrl()", "answer = await box.uploadUrl('sent', { useSignatureExpiration: 600 })", lambda s: httpx.post(s.answer, files={"file": ("sent", b"by hand")}, trust_env=False, timeout=50).is_success and s.text("sent") == "by hand"),
    Case("Template.exists()", "answer = [await e2b.Template.exists('base'), await e2b.Template.exists('no-such')]", says([True, False])),
)  # fmt: skip

FILES = (
    Case("files.write(string)", "i = await box.files.write('a/text', 'x'); answer = [i.name, i.path]", lambda s: s.answer == ["text", f"{HOME}/a/text"] and s.text("a/text") == "x"),
    Case("files.write(ArrayBuffer)", "await box.files.write('bytes', new Uint8Array([0, 255]).buffer)", lambda s: s.box.files.read(f"{HOME}/bytes", format="bytes") == b"\x00\xff"),
    Case("files.write(Blob)", "await box.files.write('blob', new Blob(['x'.repeat(300000)]))", lambda s: s.text("blob") == "x" * 300_000),
    Case("files.write(ReadableStream)", "await box.files.write('streamed', new Blob(['y'.repeat(300000)]).stream())", lambda s: s.text("streamed") == "y" * 300_000),
    Case("files.write([…]), .writeFiles()", "await box.files.write([{ path: 'm/1', data: '1' }, { path: 'm/2', data: '2' }]); await box.files.writeFiles([{ path: 'm/3', data: '3' }])", lambda s: "".join(s.text(f"m/{n}") for n in "123") == "123"),
    Case("files.write(…, { user: 'root' })", "await box.files.write('/root/by-root', 'x', { user: 'root' })", lambda s: s.box.exec("cat /root/by-root", user="root").stdout == "x"),
    Case("files.read()", "await box.commands.run('printf héllo > told'); answer = await box.files.read('told')", lambda s: s.answer == "héllo" == s.text("told")),
    Case("files.read({ format: 'bytes' })", "await box.files.write('b', new Uint8Array([255]).buffer); answer = [...await box.files.read('b', { format: 'bytes' })]", says([255])),
    Case("files.read({ format: 'stream' })", "await box.files.write('big', 'x'.repeat(1000000)); answer = 0; for await (const part of await box.files.read('big', { format: 'stream' })) answer += part.length", says(1_000_000)),
    Case("files.list()", "await box.files.makeDir('listed/deep'); answer = (await box.files.list('listed')).map((e) => [e.name, e.type])", says([["deep", "dir"]])),
    Case("files.list({ depth })", "await box.files.write('deep/1/2', ''); answer = (await box.files.list('deep', { depth: 2 })).map((e) => e.path).sort()", says([f"{HOME}/deep/1", f"{HOME}/deep/1/2"])),
    Case("files.exists()", "await box.files.write('here', ''); answer = [await box.files.exists('here'), await box.files.exists('nowhere')]", lambda s: s.answer == [True, False] and s.there("here")),
    Case("files.getInfo()", "await box.files.write('known', 'four'); i = await box.files.getInfo('known'); answer = [i.size, i.type, i.owner]", says([4, "file", "user"])),
    Case("files.remove()", "await box.files.write('gone/a', ''); await box.files.remove('gone')", lambda s: not s.there("gone")),
    Case("files.rename()", "await box.files.write('old', 'x'); answer = (await box.files.rename('old', 'new/place')).path", lambda s: s.answer == f"{HOME}/new/place" and s.text("new/place") == "x" and not s.there("old")),
    Case("files.makeDir()", "answer = [await box.files.makeDir('made/dir'), await box.files.makeDir('made/dir')]", lambda s: s.answer == [True, False] and s.box.files.stat(f"{HOME}/made/dir").type == "directory"),
    Case("files.watchDir(), .stop()", "await box.files.makeDir('watched'); seen = new Promise((resolve) => { tell = resolve }); w = await box.files.watchDir('watched', (event) => tell(event.name))",
        lambda s: s.box.files.write(f"{HOME}/watched/new", "x") is not None and s.program("answer = await seen; await w.stop()") == "new"),
    Case("files.watchDir({ recursive: true })", "await box.files.makeDir('tree/deep'); seen = new Promise((resolve) => { tell = resolve }); w = await box.files.watchDir('tree', (event) => { if (event.name === 'deep/new') tell(event.name) }, { recursive: true })",
        lambda s: s.box.files.write(f"{HOME}/tree/deep/new", "x") is not None and s.program("answer = await seen; await w.stop()") == "deep/new"),
)  # fmt: skip

COMMANDS = (
    Case("commands.run()", "r = await box.commands.run('echo out; echo err >&2; touch ran'); answer = [r.stdout, r.stderr, r.exitCode]", lambda s: s.answer == ["out\n", "err\n", 0] and s.there("ran")),
    Case("commands.run({ envs, cwd })", "answer = (await box.commands.run('echo $A; pwd', { envs: { A: '1' }, cwd: '/tmp' })).stdout", says("1\n/tmp\n")),
    Case("commands.run({ user: 'root' })", "answer = (await box.commands.run('id -u', { user: 'root' })).stdout", says("0\n")),
    Case("commands.run({ timeoutMs: 0 }), which is none", "answer = (await box.commands.run('echo endless', { timeoutMs: 0 })).stdout", says("endless\n")),
    Case("commands.run({ timeoutMs }), which kills", "try { await box.commands.run('sleep 3231', { timeoutMs: 1000 }) } catch (problem) { answer = problem.name }", lambda s: s.answer == "TimeoutError" and s.comes(lambda: not s.running("3231"))),
    Case("commands.run({ onStdout, onStderr })", "got = []; await box.commands.run('echo a; echo b >&2', { onStdout: (t) => { got.push(t) }, onStderr: (t) => { got.push(t) } }); answer = got.sort()", says(["a\n", "b\n"])),
    Case("commands.run({ background: true })", "h = await box.commands.run('sleep 3232', { background: true }); answer = h.pid", lambda s: s.running("3232") and s.program("answer = await h.kill()") is True),
    Case("handle.wait()", "h = await box.commands.run('echo waited', { background: true }); answer = (await h.wait()).stdout", says("waited\n")),
    Case("handle.kill()", "h = await box.commands.run('sleep 3233', { background: true }); answer = await h.kill(); await h.wait().catch(() => null)", lambda s: s.answer is True and s.comes(lambda: not s.running("3233"))),
    Case("handle.disconnect()", "h = await box.commands.run('sleep 3234', { background: true }); await h.disconnect(); answer = h.pid", lambda s: s.running("3234") and s.program("answer = await box.commands.kill(h.pid)") is True),
    Case("commands.list()", "h = await box.commands.run('sleep 3235', { background: true }); answer = (await box.commands.list()).some((p) => p.pid === h.pid)", lambda s: s.answer is True and s.running("3235") and s.program("answer = await h.kill()") is True),
    Case("commands.kill()", "h = await box.commands.run('sleep 3236', { background: true }); answer = [await box.commands.kill(h.pid), await box.commands.kill(99999)]; await h.wait().catch(() => null)", lambda s: s.answer == [True, False] and s.comes(lambda: not s.running("3236"))),
    Case("commands.sendStdin(), .closeStdin()", "h = await box.commands.run('cat > typed', { background: true, stdin: true }); await box.commands.sendStdin(h.pid, 'by script'); await box.commands.closeStdin(h.pid); await h.wait()", lambda s: s.text("typed") == "by script"),
    Case("commands.connect()", "h = await box.commands.run('while [ ! -e join ]; do sleep 0.05; done; echo joined', { background: true }); await h.disconnect(); again = await box.commands.connect(h.pid); await box.files.write('join', ''); answer = (await again.wait()).stdout", says("joined\n")),
    Case("pty.create(), .sendInput()", "t = await box.pty.create({ cols: 90, rows: 30, onData: () => {} }); await box.pty.sendInput(t.pid, new TextEncoder().encode('stty size > size; exit\\n')); await t.wait()", lambda s: s.text("size") == "30 90\n"),
    Case("pty.resize()", "t = await box.pty.create({ cols: 90, rows: 30, onData: () => {} }); await box.pty.resize(t.pid, { cols: 101, rows: 41 }); await box.pty.sendInput(t.pid, new TextEncoder().encode('stty size > resized; exit\\n')); await t.wait()", lambda s: s.text("resized") == "41 101\n"),
    Case("pty.connect()", "t = await box.pty.create({ cols: 90, rows: 30, onData: () => {} }); await t.disconnect(); shown = ''; again = await box.pty.connect(t.pid, { onData: (data) => { shown += new TextDecoder().decode(data) } }); await box.pty.sendInput(t.pid, new TextEncoder().encode(\"echo jo''ined; exit\\n\")); await again.wait(); answer = shown.includes('joined')", says(True)),
    Case("pty.kill()", "t = await box.pty.create({ cols: 90, rows: 30, onData: () => {} }); answer = await box.pty.kill(t.pid); await t.wait().catch(() => null)", lambda s: s.answer is True and s.comes(lambda: not s.running("-i"))),
    Case("git.init(), .add(), .commit()", "await box.git.init('repo'); await box.files.write('repo/a', 'x'); await box.git.add('repo'); await box.git.commit('repo', 'first', { authorName: 'A', authorEmail: 'a@b.test' })", lambda s: s.box.exec(["git", "-C", f"{HOME}/repo", "log", "--format=%s"]).stdout == "first\n"),
)  # fmt: skip

CODE = (
    Case("runCode()", "await box.runCode('x = 41'); r = await box.runCode('print(1); x + 1'); answer = [r.text, r.logs.stdout]", says(["42", ["1\n"]])),
    Case("runCode({ onStdout, … }), as it happens", "got = []; await box.runCode(\"import os, time\\nprint('first', flush=True)\\nwhile not os.path.exists('goes-on'): time.sleep(0.02)\\nprint('then')\\n7\", { onStdout: async (out) => { got.push(out.line); await box.files.write('goes-on', '') }, onResult: (r) => { got.push(r.text) } }); answer = [got[0], got.join('')]",
        lambda s: s.answer == ["first\n", "first\nthen\n7"] and s.there("goes-on")),
    Case("runCode({ onError })", "got = []; await box.runCode('1/0', { onError: (e) => { got.push(e.name) } }); answer = got", says(["ZeroDivisionError"])),
    Case("runCode({ envs })", "answer = (await box.runCode('import os; os.environ[\"ONCE\"]', { envs: { ONCE: 'yes' } })).text", says("yes")),
    Case("runCode({ language: 'bash' })", "answer = (await box.runCode('echo made > by-bash; echo 21', { language: 'bash' })).logs.stdout", lambda s: s.answer == ["21\n"] and s.text("by-bash") == "made\n"),
    Case("runCode({ timeoutMs }), which interrupts", "try { await box.runCode('import time\\nwhile True: time.sleep(0.05)', { timeoutMs: 1000 }) } catch (problem) { answer = [problem.name, (await box.runCode('1 + 1')).text] }", says(["TimeoutError", "2"])),
    Case("createCodeContext(), listCodeContexts()", "c = await box.createCodeContext({ cwd: '/tmp' }); answer = [c.id, (await box.listCodeContexts()).some((one) => one.id === c.id)]", lambda s: s.answer[1] and s.answer[0] in [c.id for c in s.box.contexts.list()]),
    Case("restartCodeContext()", "c = await box.createCodeContext(); await box.runCode('mine = 1', { context: c }); await box.restartCodeContext(c); answer = (await box.runCode('mine', { context: c })).error.name", says("NameError")),
    Case("removeCodeContext()", "c = await box.createCodeContext(); await box.removeCodeContext(c); answer = c.id", lambda s: s.answer not in [c.id for c in s.box.contexts.list()]),
)  # fmt: skip

TABLE = (*SANDBOXES, *FILES, *COMMANDS, *CODE)

ERRORS = (
    ("CommandExitError", "await box.commands.run('exit 3')"),
    ("TimeoutError", "await box.commands.run('sleep 300', { timeoutMs: 1000 })"),
    ("FileNotFoundError", "await box.files.read('nothing')"),
    ("InvalidArgumentError", "await box.commands.run('true', { cwd: '/no/such/place' })"),
    ("SandboxNotFoundError", "await Sandbox.connect('a'.repeat(20))"),
    ("AuthenticationError", "await Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) })"),
    ("AuthenticationError", "await box.commands.run('true', { user: 'mallory' })"),
    (
        "SandboxNotFoundError",
        "own = await Sandbox.create(); await own.kill(); await own.commands.run('true')",
    ),
    ("TimeoutError", "own = await Sandbox.create(); await own.kill(); await own.files.read('a')"),
    ("NotFoundError", "await box.commands.connect(99999)"),
    ("InvalidArgumentError", "await box.files.read('/tmp')"),
    ("SandboxError", "await Sandbox.create({ mcp: { fetch: {} } })"),
)
