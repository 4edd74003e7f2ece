"""The programs in the guides run as they stand."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
PROGRAMS = [
    pytest.param(code, f"{page}, program {number}", id=f"{page}-{number}")
    for page in ("pools.md", "ports.md")
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```$", (GUIDES / page).read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize(("code", "where"), PROGRAMS)
def test_a_program_runs(code, where):
    exec(compile(code, where, "exec"), {})
