"""The reference page has every name and its examples run; so do the programs in examples/."""

import re
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.sdk import sync, sync_pools
from cloche.testing import plugin

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/python.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
EXPECTED = {
    "hello": ["hello from under the glass", "user", "exit code 7"],
    "untrusted_code": [
        "in /workspace",
        "no network",
        "no writing there",
        "timed out: True",
        "isolation: namespaces",
    ],
    "code_interpreter": ["[1, 2, 3]", "sum 6", "IndexError: list index out of range", "3"],
    "streaming": ["step 3", "careful", "ended with 4", "hello world"],
    "many_at_once": ["['0', '1', '4', '9', '16', '25', '36', '49', '64', '81']"],
}


def methods():
    kinds = (
        sync.Sandbox,
        sync.Process,
        sync.Processes,
        sync.Tunnel,
        sync.Forward,
        sync.Files,
        sync.Context,
        sync.Contexts,
        sync.Snapshot,
        sync.Volume,
        sync.Image,
        sync_pools.Pool,
    )
    for kind in kinds:
        yield from (f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_"))


def test_every_public_method_has_its_heading_and_no_heading_is_stale():
    headings = set(re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE))
    fixtures = {name for name in ("sandbox", "make_sandbox", "sandbox_options") if hasattr(plugin, name)}
    assert headings == {
        *methods(),
        "run",
        "Sandbox",
        "AsyncSandbox.create",
        "Pool",
        "Template",
        "put_template",
        *fixtures,
    }


def test_every_public_name_is_mentioned():
    missing = [name for name in cloche.__all__ if f"`{name}" not in PAGE]
    assert missing == []


def test_every_field_of_a_result_is_mentioned():
    for kind in (cloche.ExecResult, cloche.CodeResult, cloche.Denial, cloche.FileInfo, cloche.SandboxUsage):
        (row,) = re.findall(rf"^\| `{kind.__name__}` \|(.*)$", PAGE, re.MULTILINE)
        for field in kind.__struct_fields__:
            assert f"`{field}`" in row, f"{kind.__name__}.{field}"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number):
    names: dict[str, Any] = {"cloche": cloche}
    exec(compile(EXAMPLES[number], f"python.md, example {number}", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test_"):
            with cloche.Sandbox() as box:
                value(box)


def test_the_guide_to_the_network_runs_from_top_to_end():
    text = (ROOT / "docs/guides/network.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 7
    names: dict[str, Any] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"network.md, example {number}", "exec"), names)


def test_there_are_expectations_for_every_program():
    assert {program.stem for program in PROGRAMS} == set(EXPECTED)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs(program, python):
    done = python(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    for expected in EXPECTED[program.stem]:
        assert expected in done.stdout
    assert done.stderr == ""
