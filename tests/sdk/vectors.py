"""The shared test vectors, and how an outcome is compared with what they expect. sdk/vectors/README.md says what the words mean.

The TypeScript suite has a twin of this module, `sdk/typescript/tests/vectors.ts`: a rule that changes here changes there.
"""

import base64
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parents[2] / "sdk/vectors"
_REFERENCE = re.compile(r"<<([a-z0-9_.]+)>>")
_MISSING = object()


def load() -> list[tuple[str, dict[str, Any]]]:
    """Every vector by `file/name`."""
    return [
        (f"{file.stem}/{vector['name']}", vector)
        for file in sorted(PLACE.glob("*.json"))
        for vector in json.loads(file.read_text())["vectors"]
    ]


def fill(value: Any, names: dict[str, Any]) -> Any:
    """With what was saved in place of `<<name.path>>`, and bytes in place of `{"$bytes": …}`."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda found: str(find(names, found[1])), value)
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if isinstance(value, dict):
        if "$bytes" in value:
            return base64.b64decode(value["$bytes"])
        return {key: fill(item, names) for key, item in value.items()}
    return value


def find(whole: Any, path: str) -> Any:
    for part in path.split("."):
        whole = whole[int(part)] if part.isdecimal() else get(whole, part)
        assert whole is not _MISSING, f"there is no {part} in {path}"
    return whole


def get(whole: Any, name: str) -> Any:
    return whole.get(name, _MISSING) if isinstance(whole, dict) else getattr(whole, name, _MISSING)


def compare(expected: Any, actual: Any, where: str) -> None:
    """The actual value has everything that is expected; what is not mentioned may be anything."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key.startswith("$"):
                _rule(key, value, actual, where)
            else:
                found = get(actual, key)
                assert found is not _MISSING, f"{where} has no {key}: {actual!r}"
                compare(value, found, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), f"{where}: {actual!r}"
        for number, value in enumerate(expected):
            compare(value, actual[number], f"{where}[{number}]")
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def _rule(rule: str, value: Any, actual: Any, where: str) -> None:
    match rule:
        case "$any":
            pass
        case "$match":
            assert re.search(value, actual), f"{where}: {actual!r} does not match {value!r}"
        case "$min":
            assert actual >= value, f"{where}: {actual!r} is less than {value!r}"
        case "$length":
            assert len(actual) == value, f"{where}: {actual!r} is not {value} long"
        case "$type":
            kinds: dict[str, Any] = {"string": str, "boolean": bool, "number": (int, float), "bytes": bytes}
            assert isinstance(actual, kinds[value]), f"{where}: {actual!r} is no {value}"
        case "$has":
            for wanted in value:
                assert any(_matches(wanted, item) for item in actual), f"{where}: no {wanted!r} in {actual!r}"
        case "$tar":
            with tarfile.open(fileobj=io.BytesIO(actual)) as archive:
                found = {
                    member.name.removeprefix("./"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                    for member in archive
                    if member.isfile()
                }
            assert found == value, f"{where}: {found!r}"
        case _:
            raise ValueError(f"no rule is called {rule}")


def _matches(expected: Any, actual: Any) -> bool:
    try:
        compare(expected, actual, "")
    except AssertionError:
        return False
    return True
