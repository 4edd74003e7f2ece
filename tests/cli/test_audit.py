import csv
import io
import json

import pytest


def lines(cloche, *words):
    ran = cloche("audit", "list", "--json", *words)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["forget"], "invalid choice"),
        (["list", "--since", "yesterday-ish"], "is no time"),
        (["list", "--kind", "startd"], "did you mean 'started'?"),
        (["list", "--outcome", "good"], "invalid choice"),
        (["list", "--limit", "-1"], "--limit"),
        (["verify", "--since", "7d"], "has no flag '--since'"),
        (["list", "--strict"], "has no flag '--strict'"),
        (["verify", "--head", "7"], "N:HASH"),
        (["verify", "--key", "/nowhere"], "No such file"),
        (["export", "--format", "xml"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(bare, words, said):
    ran = bare("audit", *words)
    assert ran.returncode == 125
    assert said in ran.stderr.decode()
    assert b"Traceback" not in ran.stderr


def test_a_servers_log_is_not_ours_to_read(bare):
    ran = bare("audit", "list", env={"CLOCHE_URL": "http://localhost:1"})
    assert ran.returncode == 125
    assert b"where that server runs" in ran.stderr


def test_a_machine_that_did_nothing_has_nothing_on_record(bare):
    assert lines(bare) == []
    assert bare("audit", "verify").returncode == 0


def test_a_run_is_listed_filtered_and_exported(bare):
    assert bare("run", "--", "sh", "-c", "exit 3").returncode == 3
    assert bare("run", "--template", "none", "--", "true").returncode == 125
    assert [line["kind"] for line in lines(bare)] == ["created", "started", "exited", "deleted", "refused"]
    (failed,) = lines(bare, "--outcome", "failed")
    assert failed["data"]["exit_code"] == 3
    (refused,) = lines(bare, "--kind", "refused", "--since", "1h")
    assert refused["data"]["code"] == "template_not_found"
    assert len(lines(bare, "--sandbox", failed["sandbox"])) == 4
    assert lines(bare, "--until", "1h") == []
    assert lines(bare, "--actor", "uid:99999") == []
    assert [line["kind"] for line in lines(bare, "--limit", "2")] == ["deleted", "refused"]
    shown = bare("audit", "list").stdout.decode()
    assert "command=sh -c exit 3" in shown
    table = list(csv.DictReader(io.StringIO(bare("audit", "export", "--format", "csv").stdout.decode())))
    assert [row["kind"] for row in table] == [line["kind"] for line in lines(bare)]
    exported = [json.loads(line) for line in bare("audit", "export").stdout.splitlines()]
    assert exported == lines(bare)


def test_a_verdict_names_what_was_done(bare):
    assert bare("run", "--", "true").returncode == 0
    before = bare("audit", "verify")
    assert (before.returncode, b"unsigned" in before.stdout) == (0, True)
    assert bare("audit", "verify", "--strict").returncode == 1
    assert bare("gc").returncode == 0
    signed = json.loads(bare("audit", "verify", "--strict", "--json").stdout)
    assert (signed["damaged"], signed["findings"]) == (False, [])
    assert bare("audit", "verify", "--head", signed["head"]).returncode == 0
    first = sorted((bare.state / "audit").glob("2*.jsonl"))[0]
    first.write_bytes(first.read_bytes().replace(b'"exit_code":0', b'"exit_code":1'))
    after = bare("audit", "verify")
    assert after.returncode == 1
    assert f"damage: {first.stem} line" in after.stdout.decode()
    assert b"edited" in after.stdout
    assert after.stdout.splitlines()[-2].startswith(b"DAMAGED")


def test_acts_without_an_engine_are_on_record(bare, tmp_path):
    assert bare("key", "create", "ci").returncode == 0
    assert bare("key", "revoke", "ci").returncode == 0
    project = tmp_path / "cloche.toml"
    project.write_text("nonsense = 3\n")
    assert bare("policy", "trust", str(project)).returncode == 125
    project.write_text('[network]\nallow = ["pypi.org"]\n')
    assert bare("policy", "trust", str(project)).returncode == 0
    assert bare("policy", "untrust", str(project)).returncode == 0
    told = [(line["kind"], line["data"].get("operation") or line["data"]["change"]) for line in lines(bare)]
    assert told == [
        ("administered", "key_made"), ("administered", "key_revoked"), ("policy_changed", "trusted"), ("policy_changed", "distrusted"),
    ]  # fmt: skip
