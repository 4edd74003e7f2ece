import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors, model

ISOLATION = model.Isolation(level="namespaces", driver="fake")


def code_of(check) -> str:
    with pytest.raises(errors.ClocheError) as caught:
        check()
    assert caught.value.message
    return caught.value.code


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["memory_mib", "cpus", "pids", "disk_mib"])
@pytest.mark.parametrize("value", [-1, 0, 1e12, float("nan"), float("inf"), True, "8"])
def test_a_limit_that_cannot_be_is_refused_and_named(field, value):
    resources = model.Resources(**{field: value})
    with pytest.raises(errors.InvalidInput) as caught:
        resources.check()
    assert caught.value.code == "limit_invalid"
    assert caught.value.details["field"] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a_b", "a.b", "a b", "a\n", "a\0", "ä", "a" * 64, "../a", "１"]
)
def test_a_name_that_is_no_dns_label_is_refused(name):
    assert code_of(model.SandboxSpec(name=name).check) == "name_invalid"


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}], ids=repr)
def test_an_environment_the_kernel_cannot_carry_is_refused(env):
    assert code_of(model.SandboxSpec(env=env).check) == "environment_invalid"
    assert code_of(model.ExecRequest(command="true", env=env).check) == "environment_invalid"


def test_a_variable_of_128_kib_is_too_long():
    spec = model.SandboxSpec(env={"A": "x" * (128 * 1024 - 3)})
    assert code_of(spec.check) == "argument_too_long"


@pytest.mark.parametrize("field", ["timeout_s", "idle_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, 1e10, float("nan"), float("inf")])
def test_a_life_of_no_or_absurd_length_is_refused(field, value):
    assert code_of(model.SandboxSpec(**{field: value}).check) == "limit_invalid"


@pytest.mark.parametrize("field", ["timeout_s", "background_after_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_command_limit_of_no_length_is_refused(field, value):
    assert code_of(model.ExecRequest(command="true", **{field: value}).check) == "limit_invalid"


@pytest.mark.parametrize("command", ["", [], [""]], ids=repr)
def test_an_empty_command_is_refused(command):
    assert code_of(model.ExecRequest(command=command).check) == "command_empty"


@pytest.mark.parametrize("command", ["a\0b", ["echo", "a\0b"]], ids=repr)
def test_a_nul_byte_is_refused(command):
    assert code_of(model.ExecRequest(command=command).check) == "argument_invalid"


@pytest.mark.parametrize(
    "command",
    [["echo", "x" * (128 * 1024)], ["echo", "ä" * (64 * 1024)], ["echo", *["x" * 1000] * 2100]],
    ids=["one of 128 KiB", "one of 128 KiB in UTF-8", "2 MiB in all"],
)
def test_arguments_beyond_the_kernels_limit_are_refused(command):
    assert code_of(model.ExecRequest(command=command).check) == "argument_too_long"


@pytest.mark.parametrize("path", ["", "a\0b", "a\nb", "x" * 4097, "..", "a/../b", "/..", "../a"])
def test_a_path_that_is_a_mistake_or_an_attempt_is_refused(path):
    assert code_of(lambda: model.check_path(path)) == "path_invalid"
    assert code_of(model.ExecRequest(command="true", cwd=path).check) == "path_invalid"


def test_a_user_that_is_not_inside_is_refused():
    assert code_of(model.ExecRequest(command="true", user="postgres").check) == "user_not_found"


@pytest.mark.parametrize("struct", [model.SandboxSpec, model.ExecRequest, model.Resources])
def test_a_request_with_an_unknown_field_is_refused(struct):
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        msgspec.convert(
            {"command": "true", "colour": "red"} if struct is model.ExecRequest else {"colour": 1}, struct
        )


# ── permissions ────────────────────────────────────────────────────────────────────────────────────


def test_defaults_are_acceptable():
    model.SandboxSpec().check()
    model.ExecRequest(command="true").check()
    model.ExecRequest(command=["true"]).check()


def test_what_is_large_but_possible_is_accepted():
    model.ExecRequest(command="x" * 200 * 1024).check()  # fed by descriptor, so no argument at all
    model.ExecRequest(command=["echo", *["x" * 100] * 10_000]).check()
    model.ExecRequest(command=["echo", "x" * (128 * 1024 - 1)]).check()


@pytest.mark.parametrize("path", ["a", "/workspace/a", "...", "a/..b", "ü", "a b", "x" * 255])
def test_an_honest_path_is_accepted(path):
    assert model.check_path(path) == path


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True))
def test_every_dns_label_is_a_name(name):
    model.check_name(name)


# ── shapes ─────────────────────────────────────────────────────────────────────────────────────────


def test_ids_have_one_shape_and_do_not_repeat():
    made = {model.new_id() for _ in range(2000)}
    assert len(made) == 2000
    assert all(re.fullmatch(r"[a-z][a-z0-9]{19}", one) for one in made)


def test_nouns_cannot_be_changed():
    with pytest.raises(AttributeError):
        model.Resources().pids = 3  # type: ignore[misc]


def test_nouns_are_made_by_keyword():
    with pytest.raises(TypeError):
        model.Resources(512)  # type: ignore[call-arg]


@given(st.binary(max_size=64), st.binary(max_size=64), st.one_of(st.none(), st.integers(0, 255)))
def test_a_result_survives_the_wire(out, err, code):
    sent = model.ExecResult(exit_code=code, stdout_bytes=out, stderr_bytes=err, isolation=ISOLATION)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=model.ExecResult) == sent
    assert isinstance(sent.stdout + sent.stderr, str)


@pytest.mark.parametrize(
    ("result", "expected"),
    [({"exit_code": 0}, 0), ({"exit_code": 7}, 7), ({"exit_code": None, "signal": 15}, 143),
     ({"exit_code": None, "signal": 9, "timed_out": True}, 124)],
    ids=["success", "failure", "signal", "time-out"],
)  # fmt: skip
def test_one_number_as_shells_say_it(result, expected):
    made = model.ExecResult(isolation=ISOLATION, **result)
    assert made.shell_code == expected
    assert made.ok is (expected == 0)


@pytest.mark.parametrize(
    "event",
    [
        model.Output(stream="stdout", data=b"\xff", seq=1),
        model.Truncated(stream="stderr", skipped=3, seq=2),
        model.Exited(result=model.ExecResult(exit_code=0, isolation=ISOLATION), seq=3),
    ],
    ids=lambda event: type(event).__name__,
)
def test_stream_events_are_told_apart_on_the_wire(event):
    assert msgspec.json.decode(msgspec.json.encode(event), type=model.StreamEvent) == event


def test_the_text_of_code_is_that_of_its_last_main_result():
    shown = ({"text/plain": "chart"}, {"text/plain": "42", "main": True})
    assert model.CodeResult(results=shown).text == "42"
    assert model.CodeResult(results=({"text/plain": "chart"},)).text is None
    assert model.CodeResult(results=({"image/png": "", "main": True},)).text is None
