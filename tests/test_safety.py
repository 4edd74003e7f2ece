"""A comment that names a test names one that exists: a promise whose proof was moved away is no promise."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"tests/[\w/]+(?:\.py)?(?:::(\w+))?")


@pytest.mark.parametrize(
    "file", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_test_that_is_named_exists(file):
    # A long name may be broken over two lines of a comment.
    text = re.sub(r"\n\s*# ?", "\n", file.read_text())
    for named in NAMED.finditer(text):
        place = ROOT / named.group(0).partition("::")[0]
        assert place.exists(), named.group(0)
        if named.group(1):
            assert f"def {named.group(1)}" in place.read_text(), named.group(0)


def test_every_safety_comment_names_its_test():
    known = {
        name
        for test in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", test.read_text())
    }
    for file in sorted((ROOT / "src").rglob("*.py")):
        for block in re.findall(r"(?:^[ \t]*#.*\n)+", file.read_text(), re.M):
            for promise in re.split(r"(?=# SAFETY:)", block)[1:]:
                named = re.findall(r"\btest_\w+\b(?!\.py)", promise)
                assert "tests/" in promise or named, f"{file.name}: {promise.strip()[:100]}"
                assert {name for name in named if "tests/" not in promise} <= known, f"{file.name}: {named}"
