"""The guide is held to the code: its program runs with the real SDK, its table is the table that serves."""

import re
from pathlib import Path

import pytest

from cloche.compat.e2b import control
from tests.wires.e2b import table, table_js
from tests.wires.e2b.conftest import Client, environment_of

pytestmark = pytest.mark.timeout(900)
GUIDE = (Path(__file__).parents[3] / "docs/guides/e2b.md").read_text()


def test_the_program_does_what_the_guide_says(program: Client) -> None:
    first, second = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)

    def run(source: str) -> str:
        lines = f"said = io.StringIO()\nwith contextlib.redirect_stdout(said):\n    exec({source!r}, {{}})\nanswer = said.getvalue()"
        told: str = program("import contextlib, io\n" + lines)
        return told

    assert run(second) == "0\n1\n2\npaused\nkept\n"
    told = run(first)
    assert told.startswith("hello world\n\n[")
    assert "'numbers.txt'" in told
    assert told.endswith("]\n6\n")


def test_the_table_is_the_one_that_serves() -> None:
    shown = re.findall(r"^\| `([A-Z]+) (/[^`]*)` \| (.*?) \| (yes|501) \|$", GUIDE, re.MULTILINE)
    assert shown == [
        (route.method, route.path, route.name, "yes" if route.handler else "501") for route in control.TABLE
    ]


def test_the_calls_are_those_that_are_tested() -> None:
    shown = re.findall(r"^\| `([^|]*)` \| (2\.31|2\.45|newest) \|$", GUIDE, re.MULTILINE)
    assert shown == [(case.call, case.since) for case in table.TABLE]
    assert f"{len(table.TABLE)} calls" in GUIDE
    script = re.findall(r"^\| `([^|]*)` \| JavaScript \|$", GUIDE, re.MULTILINE)
    assert script == [case.call for case in table_js.TABLE]
    assert f"{len(table_js.TABLE)} calls of the JavaScript" in GUIDE
    refused = re.findall(r"^\| `([^|]*)` \| (501|the SDK) \|", GUIDE, re.MULTILINE)
    assert refused == [(case.call, case.by) for case in table.REFUSED]


def test_every_route_of_the_newest_client_is_known() -> None:
    """Known, be it honoured or not: what a client may ask for has a name here."""
    [clients] = environment_of("newest").parents[1].glob("lib/python3*/site-packages/e2b/api/client/api")
    asked = set()
    for file in clients.rglob("*.py"):
        text = file.read_text()
        method, path = re.search(r'"method": "(\w+)"', text), re.search(r'"url": f?"([^"]*)"', text)
        if method and path:
            asked.add((method[1].upper(), re.sub(r"\{\w+\}", "{}", path[1])))
    assert len(asked) > 30
    assert asked <= {(route.method, re.sub(r"\{\w+\}", "{}", route.path)) for route in control.TABLE}
