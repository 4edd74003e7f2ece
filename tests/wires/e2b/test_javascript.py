"""The JavaScript SDKs, unmodified: every call of the table, its effect through our own SDK, and the classes of what is raised."""

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import cloche
from tests.server import conftest as server
from tests.wires.e2b import table, table_js
from tests.wires.e2b.conftest import PATIENCE_S, ROOT, Client, Raised

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PACKAGES = ("e2b@2.51.0", "@e2b/code-interpreter@2.8.0")
LEAST = 60
WORKER = """
import readline from 'node:readline'
import * as e2b from 'e2b'
import { Sandbox } from '@e2b/code-interpreter'
Object.assign(globalThis, { e2b, Sandbox })
const Program = (async () => {}).constructor
for await (const line of readline.createInterface({ input: process.stdin })) {
  globalThis.answer = undefined
  let told
  try {
    await new Program(JSON.parse(line))()
    told = { answer: globalThis.answer ?? null }
  } catch (problem) {
    told = { raised: problem.name, words: String(problem.message), trace: String(problem.stack) }
  }
  process.stdout.write(JSON.stringify(told) + '\\n')
}
process.exit(0)
"""


def packages() -> Path:
    """Where the SDKs are installed; done once, by whoever comes first."""
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


def variables(served: server.Served) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(served.home),
        "E2B_API_KEY": served.key.replace("cl_", "e2b_"),
        "E2B_API_URL": served.url,
        "E2B_SANDBOX_URL": served.url,
    }


@pytest.fixture(scope="module")
def script(served: server.Served) -> Iterator[Client]:
    place = packages()
    worker = place / f"worker-{os.getpid()}.mjs"
    worker.write_text(WORKER)
    made = Client(["node", str(worker)], variables(served))
    try:
        yield made
    finally:
        made.close()
        worker.unlink()


@pytest.fixture(scope="module")
def shared(script: Client) -> Iterator[str]:
    yield script("box = await Sandbox.create({ timeoutMs: 3000000 }); answer = box.sandboxId")
    script("await box.kill()")


@pytest.mark.parametrize("case", table_js.TABLE, ids=[case.call for case in table_js.TABLE])
def test_a_call_and_its_effect(
    case: table.Case, script: Client, shared: str, served: server.Served, http: httpx.Client, monkeypatch
) -> None:
    monkeypatch.setenv("CLOCHE_API_KEY", served.key)
    script("own = null")

    def ours(sandbox: str) -> cloche.Sandbox:
        return cloche.Sandbox.get(sandbox, server=served.url)

    try:
        answer = script(case.source)
        assert case.effect(table.Seen(answer, ours(shared), ours, http, script)), answer
    finally:
        script("if (own) await own.kill()")


@pytest.mark.parametrize(("name", "source"), table_js.ERRORS, ids=[source for _, source in table_js.ERRORS])
def test_what_is_raised(name: str, source: str, script: Client, shared: str) -> None:
    with pytest.raises(Raised) as caught:
        script(source)
    assert caught.value.name == name, caught.value


def test_the_guides_program(served: server.Served) -> None:
    place = packages()
    [source] = re.findall(r"```js\n(.*?)```", (ROOT / "docs/guides/e2b.md").read_text(), re.DOTALL)
    program = place / f"guide-{os.getpid()}.mjs"
    program.write_text(source)
    try:
        ran = subprocess.run(
            ["node", program],
            env=variables(served),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        program.unlink()
    assert (ran.returncode, ran.stdout) == (0, "hello\n42\n"), ran.stderr


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    names = [case.call for case in table_js.TABLE]
    assert len(set(names)) == len(names)
    with capsys.disabled():
        print(f" {json.dumps(len(names))} calls of the JavaScript SDK ", end="")
    assert len(names) >= LEAST
