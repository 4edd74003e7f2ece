"""The code interpreter through E2B's SDK."""

import httpx
import pytest

from tests.wires.e2b.conftest import Client, Raised

pytestmark = pytest.mark.timeout(900)


def test_state_stays_and_results_are_told(program: Client, box: str) -> None:
    told = program("""
        box.run_code("x = 41")
        r = box.run_code("import sys; print('out'); print('err', file=sys.stderr); x + 1")
        answer = [r.text, r.logs.stdout, r.logs.stderr, r.error, r.execution_count]
    """)
    assert told == ["42", ["out\n"], ["err\n"], None, 2]
    assert program("answer = box.run_code(\"'plain'\").text") == "plain"
    assert program("answer = box.run_code('import os; os.getcwd()').text") == "/home/user"


def test_an_error_of_the_code_is_data(program: Client, box: str) -> None:
    told = program("e = box.run_code('1/0').error; answer = [e.name, e.value, 'Traceback' in e.traceback]")
    assert told == ["ZeroDivisionError", "division by zero", True]


def test_forms_of_a_result(program: Client, box: str) -> None:
    told = program('''
        r = box.run_code("""
        class Shown:
            def _repr_html_(self): return "<b>x</b>"
            def _repr_png_(self): return b"png!"
            def _repr_markdown_(self): return "**x**"
        Shown()
        """.replace("\\n        ", "\\n"))
        answer = [r.results[0].html, r.results[0].png, r.results[0].markdown, r.results[0].is_main_result]
    ''')
    assert told == ["<b>x</b>", "cG5nIQ==", "**x**", True]


def test_variables_of_one_run(program: Client, box: str) -> None:
    assert (
        program("answer = box.run_code('import os; os.environ[\"ONCE\"]', envs={'ONCE': 'yes'}).text")
        == "yes"
    )
    assert program('answer = box.run_code(\'os.environ.get("ONCE", "gone")\').text') == "gone"


def test_contexts(program: Client, box: str, http: httpx.Client) -> None:
    made = program("c = box.create_code_context(cwd='/tmp'); answer = c.id")
    ours = http.get(f"/v1/sandboxes/{box}/contexts").json()["contexts"]
    assert [(one["id"], one["cwd"]) for one in ours] == [(made, "/tmp")]
    assert (
        program("box.run_code('mine = 1', context=c)\nanswer = box.run_code('mine').error.name")
        == "NameError"
    )
    assert program("answer = box.run_code('mine', context=c).text") == "1"
    assert made in program("answer = [one.id for one in box.list_code_contexts()]")
    assert (
        program("box.restart_code_context(c)\nanswer = box.run_code('mine', context=c).error.name")
        == "NameError"
    )
    program("box.remove_code_context(c)")
    assert made not in [one["id"] for one in http.get(f"/v1/sandboxes/{box}/contexts").json()["contexts"]]
    with pytest.raises(Raised) as gone:
        program("box.run_code('1', context=c)")
    assert "not found" in gone.value.words.lower()


def test_other_languages(program: Client, box: str) -> None:
    assert program("answer = box.run_code('echo $((20 + 1))', language='bash').logs.stdout") == ["21\n"]
    with pytest.raises(Raised) as absent:
        program("box.run_code('1', language='javascript')")
    assert "javascript is not supported" in absent.value.words


def test_a_client_that_leaves_interrupts_its_run(program: Client, box: str) -> None:
    with pytest.raises(Raised) as slow:
        program("box.run_code('import time\\nwhile True: time.sleep(0.05)', timeout=1)")
    assert slow.value.name == "TimeoutException"
    assert program("answer = box.run_code('1 + 1').text") == "2"
