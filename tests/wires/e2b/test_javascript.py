"""The JavaScript SDK, unmodified: one program, what it was told, and what became of it."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import PATIENCE_S, ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PACKAGES = ("e2b@2.51.0", "@e2b/code-interpreter@2.8.0")
PROGRAM = """
import { Sandbox } from '@e2b/code-interpreter'
const told = {}
const raised = async (act) => { try { await act(); return 'nothing' } catch (problem) { return problem.name } }
const box = await Sandbox.create({ timeoutMs: 600000, metadata: { purpose: 'of script' } })
told.id = box.sandboxId
told.failed = await raised(() => box.commands.run('exit 3'))
told.slow = await raised(() => box.commands.run('sleep 300', { timeoutMs: 1000 }))
told.ran = await box.commands.run('echo out; echo err >&2')
const cat = await box.commands.run('cat', { background: true, stdin: true })
await box.commands.sendStdin(cat.pid, 'x')
told.listed = (await box.commands.list()).some((one) => one.pid === cat.pid)
told.killed = await box.commands.kill(cat.pid)
await box.files.write([{ path: 'a/b', data: 'hello' }, { path: 'c', data: 'y' }])
told.made = [await box.files.makeDir('d'), await box.files.makeDir('d')]
await box.files.rename('c', 'd/c')
told.read = await box.files.read('a/b')
told.missing = await raised(() => box.files.read('nothing'))
let seen
const happened = new Promise((resolve) => { seen = resolve })
const watcher = await box.files.watchDir('d', (event) => seen([event.name, event.type]))
await box.files.write('d/new', 'z')
told.watched = await happened
await watcher.stop()
await box.runCode('x = 41')
told.code = (await box.runCode('x + 1')).text
told.context = (await box.createCodeContext({ cwd: '/tmp' })).cwd
let shown = ''
const terminal = await box.pty.create({ cols: 90, rows: 30, onData: (data) => { shown += new TextDecoder().decode(data) } })
await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\\n'))
await terminal.wait()
told.terminal = shown.includes('30 90')
told.signed = await (await fetch(await box.downloadUrl('a/b'))).text()
told.found = (await Sandbox.list({ query: { metadata: { purpose: 'of script' } } }).nextItems()).map((one) => one.sandboxId)
told.paused = await box.betaPause()
await box.connect({ timeoutMs: 600000 })
told.state = (await box.getInfo()).state
console.log(JSON.stringify(told))
process.exit(0)
"""


def packages() -> Path:
    place = ROOT / ".cache" / "e2b" / "javascript"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place / "done"
        if not done.exists() or done.read_text() != " ".join(PACKAGES):
            (place / "package.json").write_text('{"private": true}')
            subprocess.run(
                ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES],
                cwd=place,
                check=True,
                timeout=5 * PATIENCE_S,
            )
            done.write_text(" ".join(PACKAGES))
    return place


@pytest.mark.skipif(not shutil.which("npm"), reason="needs node and npm")
def test_the_javascript_client(served: server.Served, http: httpx.Client) -> None:
    place = packages()
    program = place / f"program-{os.getpid()}.mjs"
    program.write_text(PROGRAM)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(served.home),
        "E2B_API_KEY": served.key.replace("cl_", "e2b_"),
        "E2B_API_URL": served.url,
        "E2B_SANDBOX_URL": served.url,
    }
    try:
        ran = subprocess.run(
            ["node", program], env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
    finally:
        program.unlink()
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    box = told.pop("id")
    assert told.pop("ran") == {"exitCode": 0, "stdout": "out\n", "stderr": "err\n"}
    assert told == {
        "failed": "CommandExitError", "slow": "TimeoutError", "listed": True, "killed": True, "made": [True, False], "read": "hello",
        "missing": "FileNotFoundError", "watched": ["new", "create"], "code": "42", "context": "/tmp", "terminal": True, "signed": "hello",
        "found": [box], "paused": True, "state": "running",
    }  # fmt: skip
    there = http.get(f"/v1/sandboxes/{box}/files", params={"path": "/home/user/d/c"})
    assert there.text == "y"
    assert http.get(f"/v1/sandboxes/{box}").json()["labels"] == {"purpose": "of script"}
    http.delete(f"/v1/sandboxes/{box}").raise_for_status()
