"""`cloche mcp` with the official client over real pipes. Refusals first."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from cloche import Sandbox, errors
from cloche.cli import client as keepers
from cloche.cli import thin
from cloche.mcp import tools
from tests.mcp.conftest import Connect, failure, run, settings_file, success


def test_refusals(connect: Connect) -> None:
    """What is wrong with a call is told to the model, and the server goes on."""

    async def main() -> None:
        async with connect() as client:
            call = client.call_tool
            with pytest.raises(MCPError) as unknown:
                await call("sandbox_rum", {"command": ["true"]})
            assert unknown.value.code == -32602
            assert "sandbox_run" in str(unknown.value.data)

            told = failure(await call("sandbox_run", {}))
            assert (told["code"], "command" in told["message"]) == ("argument_invalid", True)
            for wrong in ("true", [1], [], {"a": 1}):
                told = failure(await call("sandbox_run", {"command": wrong}))
                assert (told["code"], told["details"]["field"].startswith("command")) == (
                    "argument_invalid",
                    True,
                )
            assert failure(await call("sandbox_run", {"command": [""]}))["code"] == "command_empty"
            for field, value in {"timeout_ms": 0, "env": {"A": 1}, "cwd": 5, "streaming": "yes"}.items():
                told = failure(await call("sandbox_run", {"command": ["true"], field: value}))
                assert told["code"] == "argument_invalid", field
                assert told["details"]["field"].startswith(field)
            told = failure(await call("sandbox_run", {"command": ["true"], "profile": "yolo"}))
            assert (told["code"], "moderate" in told["hint"]) == ("profile_unknown", True)
            told = failure(await call("sandbox_run", {"command": ["true"], "comand": ["true"]}))
            assert (told["code"], told["hint"]) == ("field_unknown", "did you mean 'command'?")
            assert (
                failure(await call("sandbox_run", {"command": ["true"], "cwd": "../x"}))["code"]
                == "path_invalid"
            )

            told = failure(await call("sandbox_run", {"command": ["true"], "network": {"enabled": True}}))
            assert (told["code"], "allowed_domains" in told["hint"]) == ("network_refused", True)
            for domains in (["*"], ["0.0.0.0/0"], ["https://pypi.org/simple"]):
                network = {"enabled": True, "allowed_domains": domains}
                told = failure(await call("sandbox_run", {"command": ["true"], "network": network}))
                assert told["code"] in ("argument_invalid", "policy_invalid"), domains

            for tool in ("sandbox_exec", "sandbox_file_list", "sandbox_delete", "sandbox_fork"):
                arguments = {"sandbox": "a" * 20} | ({"command": ["true"]} if tool == "sandbox_exec" else {})
                assert failure(await call(tool, arguments))["code"] == "sandbox_not_found", tool
            assert success(await call("sandbox_list"))["sandboxes"] == []

    run(main)


def test_run(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            line = "echo out; echo err >&2; echo $A; pwd; exit 3"
            arguments = {"command": ["bash", "-c", line], "env": {"A": "1"}, "cwd": "/tmp"}
            result = success(await client.call_tool("sandbox_run", arguments))
            assert (result["exit_code"], result["stdout"], result["stderr"]) == (3, "out\n1\n/tmp\n", "err\n")
            assert result["isolation"]["level"] == "namespaces"
            assert (result["denials"], result["truncated"], result["timed_out"]) == ([], False, False)

            killed = success(await client.call_tool("sandbox_run", {"command": ["bash", "-c", "kill -9 $$"]}))
            assert killed["exit_code"] == 128 + 9
            late = success(
                await client.call_tool("sandbox_run", {"command": ["sleep", "600"], "timeout_ms": 200})
            )
            assert (late["exit_code"], late["timed_out"]) == (124, True)
            missing = success(await client.call_tool("sandbox_run", {"command": ["no-such-program"]}))
            assert missing["exit_code"] == 127
            # Nothing of it is left.
            assert success(await client.call_tool("sandbox_list"))["sandboxes"] == []

    run(main)


def test_huge_output_keeps_head_and_tail(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            line = "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last"
            result = success(await client.call_tool("sandbox_run", {"command": ["bash", "-c", line]}))
            assert result["truncated"]
            assert result["stdout_bytes"] == 5_000_012
            assert len(result["stdout"]) < 20_000
            assert result["stdout"].startswith("first\nxxx")
            assert result["stdout"].endswith("xxx\nlast\n")
            assert "bytes not kept" in result["stdout"]

    run(main)


def test_a_session_is_kept_between_calls_and_dies(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            box = success(await client.call_tool("sandbox_session_create", {"env": {"B": "2"}}))["sandbox"]

            async def line(text: str) -> str:
                arguments = {"sandbox": box, "command": ["bash", "-c", text]}
                return str(success(await client.call_tool("sandbox_exec", arguments))["stdout"])

            assert await line("echo $B > kept; echo done") == "done\n"
            assert await line("cat kept") == "2\n"
            listed = success(await client.call_tool("sandbox_list"))["sandboxes"]
            assert [found["sandbox"] for found in listed] == [box]

            assert success(await client.call_tool("sandbox_delete", {"sandbox": box})) == {"deleted": box}
            told = failure(await client.call_tool("sandbox_exec", {"sandbox": box, "command": ["true"]}))
            assert told["code"] in ("sandbox_not_found", "sandbox_lost")
            assert failure(await client.call_tool("sandbox_delete", {"sandbox": box}))["code"] == told["code"]

    run(main)


def test_files(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            call = client.call_tool
            box = success(await call("sandbox_session_create"))["sandbox"]
            told = failure(await call("sandbox_file_read", {"sandbox": box, "path": "none"}))
            assert told["code"] == "file_not_found"
            told = failure(
                await call("sandbox_file_write", {"sandbox": box, "path": "a/../b", "content": ""})
            )
            assert told["code"] == "path_invalid"
            arguments = {"sandbox": box, "path": "b", "content": "%%%", "encoding": "base64"}
            assert failure(await call("sandbox_file_write", arguments))["code"] == "argument_invalid"

            await call("sandbox_file_write", {"sandbox": box, "path": "d/käse.txt", "content": "Käse\n"})
            read = success(await call("sandbox_file_read", {"sandbox": box, "path": "d/käse.txt"}))
            assert (read["content"], read["encoding"], read["size"], read["truncated"]) == (
                "Käse\n",
                "utf-8",
                6,
                False,
            )
            # Cut within a character: the half of it is left to the next part.
            part = success(
                await call("sandbox_file_read", {"sandbox": box, "path": "d/käse.txt", "length": 2})
            )
            assert (part["content"], part["truncated"]) == ("K", True)
            rest = success(
                await call("sandbox_file_read", {"sandbox": box, "path": "d/käse.txt", "offset": 1})
            )
            assert (rest["content"], rest["truncated"]) == ("äse\n", False)

            raw = base64.b64encode(bytes(range(256))).decode()
            arguments = {
                "sandbox": box,
                "path": "raw",
                "content": raw,
                "encoding": "base64",
                "executable": True,
            }
            assert success(await call("sandbox_file_write", arguments))["size"] == 256
            read = success(await call("sandbox_file_read", {"sandbox": box, "path": "raw"}))
            assert (read["content"], read["encoding"]) == (raw, "base64")
            listed = success(await call("sandbox_file_list", {"sandbox": box, "depth": 2}))["files"]
            assert {file["name"]: file["type"] for file in listed} == {
                "d": "directory", "käse.txt": "file", "raw": "file",
            }  # fmt: skip

            # The same files as resources.
            templates = (await client.list_resource_templates()).resource_templates
            assert [template.uri_template for template in templates] == ["cloche://sandbox/{id}/{+path}"]
            resources = {r.name: r.uri for r in (await client.list_resources()).resources}
            found = (await client.read_resource(resources["/workspace/d/käse.txt"])).contents[0]
            assert isinstance(found, types.TextResourceContents)
            assert found.text == "Käse\n"
            found = (await client.read_resource(f"cloche://sandbox/{box}/workspace/raw")).contents[0]
            assert isinstance(found, types.BlobResourceContents)
            assert found.blob == raw
            for wrong in (
                f"cloche://sandbox/{box}/workspace/none",
                f"cloche://sandbox/{box}",
                "file:///etc/passwd",
            ):
                with pytest.raises(MCPError):
                    await client.read_resource(wrong)

    run(main)


def test_code_keeps_its_variables(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            call = client.call_tool
            box = success(await call("sandbox_session_create"))["sandbox"]
            assert failure(
                await call("sandbox_run_code", {"sandbox": box, "code": "1", "language": "cobol"})
            )["code"] == ("language_unknown")
            raised = success(await call("sandbox_run_code", {"sandbox": box, "code": "1/0"}))
            assert raised["error"]["name"] == "ZeroDivisionError"
            await call("sandbox_run_code", {"sandbox": box, "code": "x = 41"})
            ran = success(await call("sandbox_run_code", {"sandbox": box, "code": "print('p'); x + 1"}))
            assert (ran["text"], ran["stdout"], ran["error"]) == ("42", "p\n", None)
            assert success(await call("sandbox_run_code", {"code": "2 ** 10"}))["text"] == "1024"

    run(main)


def test_snapshot_restore_fork(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            call = client.call_tool
            box = success(await call("sandbox_session_create"))["sandbox"]
            told = failure(await call("sandbox_restore", {"sandbox": box, "snapshot": "none"}))
            assert told["code"] == "snapshot_not_found"
            await call("sandbox_file_write", {"sandbox": box, "path": "a", "content": "then"})
            kept = success(await call("sandbox_snapshot", {"sandbox": box}))["snapshot"]
            await call("sandbox_file_write", {"sandbox": box, "path": "a", "content": "now"})
            copy = success(await call("sandbox_fork", {"sandbox": box}))["sandboxes"][0]["sandbox"]
            await call("sandbox_restore", {"sandbox": box, "snapshot": kept})
            assert (
                success(await call("sandbox_file_read", {"sandbox": box, "path": "a"}))["content"] == "then"
            )
            assert (
                success(await call("sandbox_file_read", {"sandbox": copy, "path": "a"}))["content"] == "now"
            )

    run(main)


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_both_protocol_revisions(connect: Connect, mode: str) -> None:
    async def main() -> None:
        async with connect(mode=mode) as client:
            assert client.protocol_version == {"legacy": "2025-11-25"}.get(mode, mode)
            listed = (await client.list_tools()).tools
            assert [tool.name for tool in listed] == list(tools.TABLE)
            for tool in listed:
                assert tool.input_schema["type"] == "object"
                assert tool.output_schema is not None
                assert tool.output_schema["type"] == "object"
                assert tool.annotations is not None
                assert tool.annotations.read_only_hint is (tool.name in _READ_ONLY)
            assert listed[0].input_schema["required"] == ["command"]
            result = await client.call_tool("sandbox_run", {"command": ["echo", "hi"]})
            assert success(result)["stdout"] == "hi\n"

    run(main)


_READ_ONLY = ("sandbox_list", "sandbox_file_read", "sandbox_file_list")


def test_output_arrives_while_the_command_runs(connect: Connect, tmp_path: Path) -> None:
    """The command holds a lock file until the test, having seen the first output, takes it away."""

    async def main() -> None:
        async with connect("--workspace", str(tmp_path)) as client:
            seen: list[str] = []
            first = anyio.Event()
            lock = tmp_path / "lock"

            async def heard(progress: float, total: float | None, message: str | None) -> None:
                seen.append(message or "")
                first.set()

            results = []

            async def call() -> None:
                line = "touch lock; echo first; while test -e lock; do sleep 0.05; done; echo last >&2"
                arguments = {"command": ["bash", "-c", line], "cwd": str(tmp_path), "streaming": True}
                results.append(await client.call_tool("sandbox_run", arguments, progress_callback=heard))

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await first.wait()
                assert lock.exists()
                assert seen == ["first\n"]
                assert results == []
                lock.unlink()
            result = success(results[0])
            assert (result["exit_code"], result["stdout"], result["stderr"]) == (0, "first\n", "last\n")
            assert "".join(seen) == "first\nlast\n"

    run(main)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancelled_call_kills_the_tree(connect: Connect, tmp_path: Path, streaming: bool) -> None:
    async def main() -> None:
        async with connect("--workspace", str(tmp_path)) as client:
            box = success(await client.call_tool("sandbox_session_create"))["sandbox"]
            mark = tmp_path / "running"
            line = "(setsid sleep 7777 &) ; touch running; sleep 7777"

            async def call(tool: str) -> None:
                arguments = {"command": ["bash", "-c", line], "cwd": str(tmp_path), "streaming": streaming}
                if tool == "sandbox_exec":
                    arguments["sandbox"] = box
                await client.call_tool(tool, arguments)

            for tool in ("sandbox_exec", "sandbox_run"):
                async with anyio.create_task_group() as group:
                    group.start_soon(call, tool)
                    while not mark.exists():
                        await anyio.sleep(0.01)
                    group.cancel_scope.cancel()
                mark.unlink()
            count = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p | grep -q '^sleep 7777' && echo $p; done; true"
            while True:
                arguments = {"sandbox": box, "command": ["bash", "-c", count]}
                if not success(await client.call_tool("sandbox_exec", arguments))["stdout"]:
                    break
                await anyio.sleep(0.05)
            while len(success(await client.call_tool("sandbox_list"))["sandboxes"]) > 1:
                await anyio.sleep(0.05)

    run(main)


def test_the_settings_of_a_client(connect: Connect, tmp_path: Path) -> None:
    """By the name that the client gives itself."""
    path = settings_file(
        tmp_path,
        '[mcp]\noutput_limit_bytes = 100\n[mcp.clients.strict]\nprofile = "restrictive"\nnetwork = "off"\n',
    )

    async def main() -> None:
        network = {"enabled": True, "allowed_domains": ["example.test"]}
        async with connect("--config", path, name="strict") as client:
            told = failure(await client.call_tool("sandbox_run", {"command": ["true"], "network": network}))
            assert told["code"] == "network_refused"
            assert success(await client.call_tool("sandbox_session_create"))["profile"] == "restrictive"
        async with connect("--config", path) as client:
            made = success(await client.call_tool("sandbox_session_create", {"network": network}))
            assert (made["profile"], made["isolation"]["network"]) == ("moderate", "rules")
            result = success(await client.call_tool("sandbox_run", {"command": ["seq", "1000"]}))
            assert result["truncated"]
            assert len(result["stdout"]) < 200

    run(main)


def test_permissive_has_no_open_network_by_default(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            made = success(await client.call_tool("sandbox_session_create", {"profile": "permissive"}))
            assert (made["profile"], made["isolation"]["network"]) == ("permissive", "off")

    run(main)


def test_other_sandboxes_are_out_of_reach(connect: Connect, until: Callable[..., None]) -> None:
    """A keeper has sandboxes of its user's; a model that knows an id does not get in."""
    socket_path = os.path.join(os.environ["CLOCHE_HOME"], "cloche.sock")
    keeper = keepers.reach_keeper()
    try:
        with Sandbox(server=f"unix:{socket_path}") as own:
            kept = own.snapshot()

            async def main() -> None:
                async with connect() as client:
                    call = client.call_tool
                    told = failure(await call("sandbox_exec", {"sandbox": own.id, "command": ["true"]}))
                    assert told["code"] == "sandbox_not_found"
                    assert own.id not in str(success(await call("sandbox_list")))
                    with pytest.raises(MCPError):
                        await client.read_resource(f"cloche://sandbox/{own.id}/etc/hostname")
                    made = success(await call("sandbox_session_create"))["sandbox"]
                    assert made in [info.id for info in Sandbox.list(server=f"unix:{socket_path}")]
                    told = failure(await call("sandbox_restore", {"sandbox": made, "snapshot": kept.id}))
                    assert told["code"] == "snapshot_not_found"

            run(main)
            kept.delete()
    finally:
        until(lambda: _leaves(keeper))
        keeper.close()
        until(lambda: _nobody_answers(socket_path))


def _nobody_answers(socket_path: str) -> bool:
    sock = thin.connect(socket_path)
    if sock is not None:
        sock.close()
    return sock is None


def _leaves(keeper: keepers.Client) -> bool:
    """A keeper stays while it has a sandbox, and the client's may still be ending."""
    try:
        return bool(keeper.call("stop")["stopped"])
    except errors.ClocheError:
        return True


def test_what_the_network_refused_is_told(connect: Connect) -> None:
    async def main() -> None:
        program = "import urllib.request as u\ntry: u.urlopen('http://other.test/', timeout=20)\nexcept OSError as e: print('refused')"
        network = {"enabled": True, "allowed_domains": ["allowed.test"]}
        arguments = {"command": ["python3", "-c", program], "network": network}
        async with connect() as client:
            result = success(await client.call_tool("sandbox_run", arguments))
            assert result["stdout"] == "refused\n"
            assert [denial["kind"] for denial in result["denials"]][:1] == ["network"]
            assert "other.test" in result["denials"][0]["target"]

    run(main)


def test_the_wire_by_hand() -> None:
    """Garbage is answered and survived; an old revision is spoken, an unknown one countered; standard output is the protocol's alone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cloche", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(number: int, method: str, **params: object) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        while True:
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            if answer.get("id") == number:
                return answer

    try:
        process.stdin.write("nonsense\n\n{}\n[1, 2]\n\x00\n")
        info = {"name": "hand", "version": "1"}
        said = ask(1, "initialize", protocolVersion="2024-11-05", capabilities={}, clientInfo=info)["result"]
        assert (said["protocolVersion"], said["serverInfo"]["name"]) == ("2024-11-05", "cloche")
        process.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        assert ask(2, "no/such/method")["error"]["code"] == -32601
        assert ask(3, "tools/call", name=7)["error"]["code"] == -32602
        called = ask(4, "tools/call", name="sandbox_run", arguments={"command": ["echo", "hi"]})["result"]
        assert json.loads(called["content"][0]["text"])["stdout"] == "hi\n"
    finally:
        process.stdin.close()
        rest = process.stdout.read()
        process.stdout.close()
        assert process.wait(40) == 0
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in rest.splitlines())


def test_the_end_of_the_client_ends_what_runs(tmp_path: Path, until: Callable[..., None]) -> None:
    """A client that dies in the middle of a call leaves nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cloche", "mcp", "--workspace", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    info = {"name": "hand", "version": "1"}
    line = "touch running; sleep 7778"
    arguments = {"command": ["bash", "-c", line], "cwd": str(tmp_path), "timeout_ms": 600_000}
    for message in (
        {
            "id": 1,
            "method": "initialize",
            "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info},
        },
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "sandbox_run", "arguments": arguments}},
    ):
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()
    until((tmp_path / "running").exists)
    process.stdin.close()
    assert process.wait(40) == 0
    assert not [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if _reads(path).startswith(b"sleep\x007778")
    ]


def _reads(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
