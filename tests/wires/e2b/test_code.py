"""The code interpreter through E2B's SDK."""

import json

import httpx
import pytest

from tests.server import conftest as server
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


def test_every_form_of_a_result_and_a_chart(program: Client, box: str) -> None:
    chart = {
        "type": "line", "title": "T", "x_label": "t (s)", "y_label": "V", "x_unit": "s", "y_unit": None, "x_ticks": [0, 1], "x_tick_labels": ["0", "1"],
        "x_scale": "linear", "y_ticks": [1], "y_tick_labels": ["1"], "y_scale": "log", "elements": [{"label": "a", "points": [[1.0, 3.5]]}],
    }  # fmt: skip
    bundle = {
        "text/plain": "T", "text/html": "<b>", "text/markdown": "*", "image/svg+xml": "<svg/>", "image/png": "cG5n", "image/jpeg": "anBn", "application/pdf": "cGRm",
        "text/latex": "$x$", "application/json": {"a": 1}, "application/javascript": "1", "application/vnd.cloche.chart+json": chart,
        "application/vnd.cloche.table+json": {"column": [1, 2]}, "application/x-other": "more",
    }  # fmt: skip
    code = f"class Everything:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {bundle!r}\nEverything()"
    program(f"r = box.run_code({code!r}).results[0]")
    told = program(
        "answer = [r.text, r.html, r.markdown, r.svg, r.png, r.jpeg, r.pdf, r.latex, r.json, r.javascript, r.data, r.extra]"
    )
    assert told == ["T", "<b>", "*", "<svg/>", "cG5n", "anBn", "cGRm", "$x$", {"a": 1}, "1", {"column": [1, 2]}, {"application/x-other": "more"}]  # fmt: skip
    drawn = program(
        "answer = [type(r.chart).__name__, r.chart.title, r.chart.x_unit, r.chart.elements[0].points, r.chart.y_scale.value]"
    )
    assert drawn == ["LineChart", "T", "s", [[1.0, 3.5]], "log"]


def test_callbacks_come_in_order_and_runs_of_a_context_queue(program: Client, box: str) -> None:
    told = program("""
        got = []
        box.run_code("import sys; print('a', flush=True); display(1); print('b', file=sys.stderr, flush=True); display(2); 1/0",
            on_stdout=lambda o: got.append(o.line), on_stderr=lambda o: got.append(o.line),
            on_result=lambda r: got.append(r.text), on_error=lambda e: got.append(e.name))
        answer = got
    """)
    assert sorted(told) == sorted(["a\n", "1", "b\n", "2", "ZeroDivisionError"])
    at = told.index
    assert (
        at("a\n") < at("1") < at("2") < at("ZeroDivisionError")
    )  # what was printed is told before what came after it
    assert at("b\n") < at("2")
    counts = program("""
        async def main():
            from e2b_code_interpreter import AsyncSandbox
            other = await AsyncSandbox.connect(box.sandbox_id)
            await other.run_code("order = []")
            await asyncio.gather(*(other.run_code(f"import time; order.append({n}); time.sleep(0.01); order.append({n})") for n in range(4)))
            return (await other.run_code("order")).text
        answer = asyncio.run(main())
    """)
    order = json.loads(counts)
    assert order[::2] == order[1::2]  # none came in between


def test_what_is_asked_wrongly(program: Client, box: str, served: server.Served) -> None:
    headers = {"E2b-Sandbox-Id": box, "E2b-Sandbox-Port": "49999", "X-Access-Token": program("answer = box._envd_access_token")}  # fmt: skip
    with httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=50) as client:
        made = client.post("/contexts", json={"language": "python", "cwd": "/tmp"}).json()
        both = client.post("/execute", json={"code": "1", "context_id": made["id"], "language": "python"})
        assert both.status_code == 400
        assert client.post("/execute", json={"code": "1", "context_id": "none"}).status_code == 404
        assert client.post("/execute", json={"code": 1}).status_code == 400
        assert client.post("/contexts", json={"language": "cobol"}).status_code == 400
        assert client.post("/contexts", json={"cwd": "/no/such"}).status_code in (400, 404)
        assert client.post("/contexts/none/restart").status_code == 404
        assert client.delete("/contexts/none").status_code == 404
        lines = client.post("/execute", json={"code": "print(1)\n2"}).text.split("\n")
        assert [json.loads(line)["type"] for line in lines if line] == [
            "number_of_executions", "stdout", "result", "end_of_execution",
        ]  # fmt: skip
        assert lines[-1] == ""
        assert "" not in lines[:-1]
