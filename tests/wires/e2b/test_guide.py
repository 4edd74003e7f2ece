"""The guide is held to the code: its program runs with the real SDK, its table is the table that serves."""

import re
from pathlib import Path

import pytest

from cloche.compat.e2b import control
from tests.wires.e2b import table
from tests.wires.e2b.conftest import Client

pytestmark = pytest.mark.timeout(900)
GUIDE = (Path(__file__).parents[3] / "docs/guides/e2b.md").read_text()


def test_the_program_does_what_the_guide_says(program: Client) -> None:
    [source] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    told = program(
        f"import contextlib, io\nsaid = io.StringIO()\nwith contextlib.redirect_stdout(said):\n    exec({source!r})\nanswer = said.getvalue()"
    )
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
    refused = re.findall(r"^\| `([^|]*)` \| (501|the SDK) \|", GUIDE, re.MULTILINE)
    assert refused == [(case.call, case.by) for case in table.REFUSED]
