"""The examples of the concept pages run, and print what the pages lead one to expect."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs/concepts"
EXPECTED = {
    "states": [
        "[('modified', '/workspace/project/n'), ('added', '/workspace/project/new')]\n1\n\n2\n\n",
        "used\n\n",
        "kept\n\n",
    ]
}
EXAMPLES = [
    (page, code, shown)
    for page, expected in EXPECTED.items()
    for code, shown in zip(
        re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL),
        expected,
        strict=True,
    )
]


@pytest.mark.parametrize(("page", "code", "shown"), EXAMPLES, ids=lambda value: value[:12].strip())
def test_an_example_prints_what_it_should(page, code, shown, capsys):
    exec(compile(code, f"{page}.md", "exec"), {})
    assert capsys.readouterr().out == shown
