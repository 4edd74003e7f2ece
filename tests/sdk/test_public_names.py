"""The public surface: short, asserted, typed, and free until it is used."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cloche

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import assert_type


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Sandboxes'"):
        cloche.Sandboxes  # type: ignore[attr-defined]  # noqa: B018


def test_the_names_are_these():
    assert cloche.__all__ == sorted(cloche.__all__)
    assert len(set(cloche.__all__)) == len(cloche.__all__)
    assert {
        "AsyncSandbox", "ClocheError", "CodeResult", "CommandFailed", "Denied", "ExecResult", "Exited", "Output",
        "Policy", "Sandbox", "SandboxInfo", "Truncated", "run",
    } < set(cloche.__all__)  # fmt: skip
    assert set(dir(cloche)) >= set(cloche.__all__)


def test_every_name_resolves_to_its_own_thing():
    for name in cloche.__all__:
        value = getattr(cloche, name)
        assert getattr(value, "__name__", name) in (name, "Union", "StreamEvent", "CodeEvent"), name


def test_the_three_lists_agree():
    tree = ast.parse(Path(cloche.__file__).read_text())
    typed = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - {("importlib", "import_module")}
    assert typed == {(home, name) for home, names in cloche._HOMES.items() for name in names.split()}
    assert sorted(name for _, name in typed) == cloche.__all__


def test_every_error_class_is_public():
    from cloche import errors

    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes < set(cloche.__all__)


def test_importing_cloche_costs_nothing(python):
    said = python("""
        import sys
        before = set(sys.modules)
        import cloche
        print(sorted(set(sys.modules) - before))
    """).stdout
    assert said == "['cloche']\n"


def test_the_sdk_does_not_load_the_machine(python):
    said = python("""
        import sys, cloche
        cloche.Sandbox, cloche.AsyncSandbox, cloche.Policy
        rooms = {name.split(".")[1] for name in sys.modules if name.startswith("cloche.")}
        print(sorted(rooms & {"linux", "drivers", "engine", "guest", "images", "store", "wiring", "server"}))
    """).stdout
    assert said == "[]\n"


def test_elsewhere_it_is_a_client(python):
    said = python("""
        import sys
        sys.platform = "darwin"
        import cloche
        for make in (cloche.Sandbox, lambda: cloche.run("true"), cloche.Sandbox.list):
            try:
                make()
            except cloche.NotSupported as problem:
                print(problem.code, "CLOCHE_URL" in problem.hint)
    """).stdout
    assert said == "linux_only True\n" * 3


def test_the_plugin_is_cheap_to_load(python):
    said = python("""
        import sys, pytest
        before = set(sys.modules)
        import cloche.testing.plugin
        print(sorted(name for name in set(sys.modules) - before))
    """).stdout
    assert said == "['cloche', 'cloche.testing', 'cloche.testing.plugin']\n"


def check_types(box: cloche.Sandbox, aio: cloche.AsyncSandbox) -> None:
    """Never called: mypy reads it."""
    assert_type(cloche.run("true"), cloche.ExecResult)
    assert_type(box.exec("true").exit_code, int | None)
    assert_type(box.exec_stream("true"), Iterator[cloche.StreamEvent])
    assert_type(box.start("true"), cloche.Process)
    assert_type(box.files.read("a"), str)
    assert_type(box.files.read("a", format="bytes"), bytes)
    assert_type(box.files.read("a", format="stream"), Iterator[bytes])
    assert_type(box.run_code("1").text, str | None)
    assert_type(box.contexts.create(), cloche.Context)
    assert_type(cloche.Sandbox.list(), list[cloche.SandboxInfo])
    assert_type(cloche.Sandbox.get("x"), cloche.Sandbox)
    assert_type(aio.exec_stream("true"), AsyncIterator[cloche.StreamEvent])
    with cloche.Sandbox() as entered:
        assert_type(entered, cloche.Sandbox)
    for event in box.exec_stream("true"):
        match event:
            case cloche.Output(data=data):
                assert_type(data, bytes)
            case cloche.Exited(result=result):
                assert_type(result, cloche.ExecResult)


async def check_async_types(aio: cloche.AsyncSandbox) -> None:
    """Never called: mypy reads it."""
    assert_type(await cloche.AsyncSandbox.create(memory_mib=64), cloche.AsyncSandbox)
    assert_type(await aio.exec("true"), cloche.ExecResult)
    assert_type(await aio.files.read("a", format="stream"), AsyncIterator[bytes])
    assert_type(await aio.start("true"), cloche.AsyncProcess)
