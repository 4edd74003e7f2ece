"""Frameworks that speak E2B, unmodified and without a model: what they do in a sandbox shows in our own API.

Each is installed beside the pair of SDKs that it wants, in an environment below `.cache` that sees that pair's.
"""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import PATIENCE_S, ROOT, WORKER, Client, client_of, environment_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
FRAMEWORKS = {
    "smolagents": ("newest", "smolagents==1.26.0"),
    "openai-agents": ("2.31", "openai-agents==0.24.0"),
}


def framework(name: str) -> tuple[str, Path]:
    """The pair it goes with, and the Python that has both."""
    pair, package = FRAMEWORKS[name]
    beside = environment_of(pair).parents[1]
    place = ROOT / ".cache" / "e2b" / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place / "done"
        if not done.exists() or done.read_text() != package:
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True, timeout=PATIENCE_S)
            [packages] = place.glob("lib/python3*/site-packages")
            [theirs] = beside.glob("lib/python3*/site-packages")
            (packages / "e2b.pth").write_text(f"{theirs}\n")
            pip = [
                str(place / "bin/python"),
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                package,
            ]
            subprocess.run(pip, check=True, timeout=5 * PATIENCE_S)
            done.write_text(package)
    return pair, place / "bin/python"


def program_of(name: str, served: server.Served) -> Client:
    pair, python = framework(name)
    return client_of(pair, served, command=[str(python), "-c", WORKER])


@pytest.fixture
def smolagents(served: server.Served) -> Iterator[Client]:
    made = program_of("smolagents", served)
    yield made
    made.close()


@pytest.fixture
def agents(served: server.Served) -> Iterator[Client]:
    made = program_of("openai-agents", served)
    yield made
    made.close()


def names(http: httpx.Client, sandbox: str, path: str) -> list[str]:
    found = http.get(f"/v1/sandboxes/{sandbox}/files/list", params={"path": path}).raise_for_status().json()
    return [entry["name"] for entry in found["files"]]


def test_smolagents_executor(smolagents: Client, http: httpx.Client) -> None:
    smolagents("""
        from smolagents.remote_executors import E2BExecutor
        from smolagents.monitoring import AgentLogger, LogLevel
        executor = E2BExecutor([], AgentLogger(level=LogLevel.OFF))
    """)
    box = smolagents("answer = executor.sandbox.sandbox_id")
    raised = smolagents("""
        try:
            executor.run_code_raise_errors("1/0")
        except Exception as problem:
            answer = [type(problem).__name__, "ZeroDivisionError" in str(problem)]
    """)
    assert raised == ["AgentError", True]
    told = smolagents("""
        executor.send_variables({"number": 21})
        out = executor.run_code_raise_errors("print('seen', number)\\nopen('made', 'w').write('x')\\nnumber * 2")
        answer = [out.output, out.logs, out.is_final_answer]
    """)
    assert told == ["42", "seen 21\n", False]
    assert "made" in names(http, box, "/home/user")
    smolagents("executor.cleanup()")
    assert http.get(f"/v1/sandboxes/{box}").status_code in (404, 410)


TOOLS = '''
from smolagents import tool

@tool
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: the number.
    """
    return 2 * number
'''


def test_smolagents_agent(smolagents: Client, tmp_path: Path) -> None:
    """A whole agent, its model's words written down. Its tools import Pillow and numpy, which it asks pip for (`!pip install`) and for which
    stand-ins of a snapshot are here."""
    (tmp_path / "own_tools.py").write_text(TOOLS)  # in a file: the framework reads a tool's source
    smolagents(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from own_tools import double
        from e2b_code_interpreter import Sandbox
        from smolagents import ChatMessage, CodeAgent, MessageRole, Model
        from smolagents.monitoring import LogLevel
        with Sandbox.create(timeout=600) as seed:
            for path in ("PIL/__init__.py", "PIL/Image.py", "numpy/__init__.py"):
                seed.files.write(path, "")
            snapshot = seed.create_snapshot().snapshot_id

        class Written(Model):
            def __init__(self, *replies):
                super().__init__(model_id="written")
                self.replies = list(replies)
            def generate(self, messages, **more):
                return ChatMessage(role=MessageRole.ASSISTANT, content=self.replies.pop(0))
    """)
    told = smolagents("""
        said = ["Thought: look.\\n<code>\\nprint('seen', double(number))\\nkept = 1\\n</code>",
                "Thought: done.\\n<code>\\nfinal_answer(double(number) + kept)\\n</code>"]
        with CodeAgent(tools=[double], model=Written(*said), executor_type="e2b", executor_kwargs={"template": snapshot},
                       verbosity_level=LogLevel.OFF) as agent:
            answer = agent.run("what?", additional_args={"number": 21})
        Sandbox.delete_snapshot(snapshot)
    """)
    assert told == 43


def test_openai_agents_sandbox(agents: Client, http: httpx.Client) -> None:
    """Its client pins e2b 2.31."""
    agents("""
        import asyncio, io
        from pathlib import Path
        from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
        loop = asyncio.new_event_loop()
        run = loop.run_until_complete
        client = E2BSandboxClient()
        session = run(client.create(options=E2BSandboxClientOptions(sandbox_type="e2b", timeout=600)))
        run(session.start())
    """)
    told = agents("""
        ran = run(session.exec("sh", "-c", "echo out; echo err >&2; exit 3", shell=False))
        run(session.write(Path("deep/made.txt"), io.BytesIO(b"written")))
        answer = [ran.exit_code, ran.stdout.decode(), ran.stderr.decode(), run(session.read(Path("deep/made.txt"))).read().decode(), run(session.running())]
    """)
    assert told == [3, "out\n", "err\n", "written", True]
    state = agents("answer = [session.state.sandbox_id, str(session.state.manifest.root)]")
    assert names(http, state[0], f"{state[1]}/deep") == ["made.txt"]
    assert agents("answer = len(run(session.persist_workspace()).read())") > 0
    agents("run(session.stop()); run(session.shutdown()); run(client.delete(session))")
    assert http.get(f"/v1/sandboxes/{state[0]}").status_code in (404, 410)
