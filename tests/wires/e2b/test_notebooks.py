"""A notebook's `!command`: what is left alone, and what becomes of the rest."""

import pytest

from cloche.compat.e2b import notebooks
from tests.wires.e2b.conftest import Client


@pytest.mark.parametrize(
    "code",
    [
        "x = 1", "text = '''\n!echo not a command\n'''", "a != 1", "'%s' % 1\n5 % 2", "!", "%time x", "!echo a\nthis is no python", "x = !ls",
        "# !pip install", "await thing()\n'!'", "\x00!ls", "(" * 10_000 + "!",
    ],
)  # fmt: skip
def test_what_is_python_or_hopeless_stays_as_it_is(code: str) -> None:
    assert notebooks.plain(code) == code


def test_commands_become_calls() -> None:
    made = notebooks.plain("x = 1\nif x:\n    !echo 'it is'  \n%pip install a\ntext = 'not !this'")
    assert made.split("\n") == [
        "x = 1",
        "if x:",
        "    _exit_code = __import__('subprocess').call(\"echo 'it is'\", shell=True)",
        "_exit_code = __import__('subprocess').call('python3 -m pip install a', shell=True)",
        "text = 'not !this'",
    ]


@pytest.mark.timeout(900)
def test_a_command_in_a_run(program: Client, box: str) -> None:
    told = program("""
        r = box.run_code("!echo from the shell; exit 3\\nprint(_exit_code)")
        answer = ["".join(r.logs.stdout), r.error, r.results]
    """)
    assert told == ["from the shell\n3\n", None, []]
