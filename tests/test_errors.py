import inspect
import pickle
import re
from pathlib import Path

import pytest

from cloche import errors, model

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, errors.ClocheError)
]
CODES = sorted(errors.TABLE)
PAGE = Path(__file__).parent.parent / "docs/reference/errors.md"

# Codes that are not noun first, because the sentence needs no noun: "it needs…", "it is a directory".
NO_NOUN = {
    "is_directory", "linux_only", "needs_subuids", "not_directory", "not_regular_file", "not_supported_by_driver",
    "not_text", "used_after_fork",
}  # fmt: skip
NOUNS = {
    "action", "address", "body", "claim", "key", "method", "pool", "rate", "route", "scope", "snapshot", "startup", "version", "volume",
    "image", "recipe",
    "apply", "argument", "audit", "capacity", "command", "connection", "context", "cwd", "directory", "disk", "environment",
    "execution", "field", "file", "flag", "guest", "head", "host", "internal", "isolation", "kernel", "language", "launcher",
    "limit", "link", "mode", "name", "network", "output", "path", "peer", "permission", "policy", "port", "profile", "question", "quota", "reader", "request", "sandbox", "secret", "secrets", "server",
    "settings", "signal", "socket", "state", "template", "tls", "token", "url", "user", "wait", "workspace",
}  # fmt: skip


def result_that_failed() -> model.ExecResult:
    return model.ExecResult(exit_code=3, isolation=model.Isolation(level="namespaces", driver="fake"))


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_snake_case_and_noun_first(code):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    assert code in NO_NOUN or code.split("_")[0] in NOUNS


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_class_and_a_complete_row(code):
    raised = errors.error(code, "it is wrong", hint="do this", key="value")
    face = errors.TABLE[code]
    assert type(raised) is errors.class_of(code)
    assert 400 <= face.http <= 599
    assert 1 <= face.cli <= 125
    assert -32768 <= face.mcp <= -32000
    assert re.fullmatch(r"([A-Z][a-z]+)+", face.kube)
    assert raised.retryable is face.retryable


def test_every_class_has_a_code_of_its_own():
    for kind in CLASSES:
        assert errors.class_of(kind.default_code) is kind or kind is errors.ClocheError


def test_no_code_is_given_a_class_without_having_a_row():
    assert set(errors._CLASS_OF_CODE) <= set(errors.TABLE)


def test_a_code_without_a_row_cannot_be_raised():
    with pytest.raises(KeyError):
        errors.error("moon_missing", "no moon")
    with pytest.raises(KeyError):
        errors.NotFound("no moon", code="moon_missing")


def test_there_are_at_most_fifteen_classes():
    assert len(CLASSES) <= 15


def test_the_tree_in_the_head_is_the_tree_of_the_classes():
    parents = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"    ([│├└─ ]*)([A-Z]\w+)  ", line)
        if drawn:
            depth, name = len(drawn[1]), drawn[2]
            above = [entry for entry in above if entry[0] < depth]
            parents[name] = above[-1][1] if above else "Exception"
            above.append((depth, name))
    assert parents == {kind.__name__: kind.__base__.__name__ for kind in CLASSES if kind.__base__}


@pytest.mark.parametrize("code", CODES)
def test_an_error_survives_the_wire(code):
    sent = errors.error(code, "it is wrong", hint="do this", path="/x", count=3)
    received = errors.from_dict(sent.to_dict())
    assert type(received) is type(sent)
    assert received.to_dict() == sent.to_dict()
    assert received.retryable is sent.retryable


def test_a_code_of_a_newer_server_stays_readable():
    received = errors.from_dict({"code": "moon_missing", "message": "no moon", "hint": None, "details": "?"})
    assert isinstance(received, errors.InternalError)
    assert "moon_missing" in str(received)
    assert "no moon" in str(received)
    assert received.details == {}


@pytest.mark.parametrize("code", CODES)
def test_an_error_survives_pickling(code):
    sent = errors.error(code, "it is wrong", hint="do this", path="/x")
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is type(sent)
    assert received.to_dict() == sent.to_dict()


def test_pickling_keeps_class_result_and_notes():
    sent = errors.CommandFailed("make failed")
    sent.result = result_that_failed()
    sent.add_note("in step 3")
    received = pickle.loads(pickle.dumps(sent))
    assert received.result == sent.result
    assert received.__notes__ == ["in step 3"]
    unusual = pickle.loads(pickle.dumps(errors.Conflict("odd", code="file_not_found")))
    assert type(unusual) is errors.Conflict


def test_the_text_says_what_and_which_code_and_what_to_do():
    text = str(errors.error("limit_invalid", "pids is -1", hint="leave it out"))
    assert text == "pids is -1 (limit_invalid)\n\nhint: leave it out"
    assert (
        repr(errors.error("limit_invalid", "pids is -1"))
        == "InvalidInput('pids is -1', code='limit_invalid')"
    )


def test_a_mistyped_word_gets_the_likely_one_and_a_strange_one_all():
    assert errors.nearest("moderat", ("moderate", "permissive")) == "did you mean 'moderate'?"
    assert errors.nearest("zzz", ("b", "a")) == "use one of a, b"


def test_every_code_has_its_heading_and_says_what_to_do():
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.+?)(?=\n+#|\Z)", PAGE.read_text(), re.M | re.S))
    assert sorted(sections) == CODES
    for code, text in sections.items():
        face = errors.TABLE[code]
        assert "*Do:* " in text, code
        assert f"HTTP {face.http}{'; may be retried' if face.retryable else ''}." in text, code


def test_every_section_of_the_page_stands_under_its_class():
    for name, body in re.findall(r"^## (\w+)\n(.+?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S):
        for code in re.findall(r"^### `(\w+)`", body, re.M):
            assert errors.class_of(code).__name__ == name, code
