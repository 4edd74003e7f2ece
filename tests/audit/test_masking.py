import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import events
from cloche.audit import masking

SECRET = "Zx9qLm4Tt7Kp2Vw8Rs5"

HIDDEN = [
    f"curl -H 'Authorization: Bearer {SECRET}' https://x.test",
    f"curl -H 'authorization: {SECRET}' https://x.test",
    f'curl -H "X-Api-Key: {SECRET}" x.test',
    f"curl -u me:{SECRET} https://x.test",
    f"curl --user me:{SECRET} https://x.test",
    f"git clone https://me:{SECRET}@git.test/r.git",
    f"psql postgres://me:{SECRET}@db.test/x",
    f"mysql --password={SECRET} x",
    f"tool --password {SECRET}",
    f"tool --api-key '{SECRET}'",
    f"PGPASSWORD={SECRET} psql",
    f"export AWS_SECRET_ACCESS_KEY={SECRET}",
    f"env GITHUB_TOKEN={SECRET} make",
    f"curl 'https://x.test/?access_token={SECRET}&page=2'",
    f'curl -d \'{{"client_secret": "{SECRET}"}}\' x.test',
    f"curl -H 'Cookie: {SECRET}' x.test",
    f"gh auth login ghp_{SECRET}{SECRET}",
    f"use github_pat_{SECRET}{SECRET}",
    f"use sk-{SECRET}",
    f"use sk-ant-api03-{SECRET}",
    f"use xoxb-1234-{SECRET}",
    f"use glpat-{SECRET}",
    f"use hf_{SECRET}",
    f"use npm_{SECRET}{SECRET}",
    f"use pypi-{SECRET}",
    f"use eyJhbGciOi{SECRET}.eyJzdWIi{SECRET}.{SECRET}",
    f"cl_{SECRET}",
    f"docker login -u me -p x --token={SECRET}",
    f"echo '-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----'",
    f"echo '-----BEGIN RSA PRIVATE KEY-----\n{SECRET}",
]

KEPT = [
    "echo hello",
    "pytest -q tests/test_tokens.py",
    "git clone https://github.com/a/b.git",
    "curl https://x.test:8080/path@2",
    "pip install tokenizers==1.0",
    "ls -la /home/user",
    "python3 -c 'print(1+1)'",
    "sudo -u user ls",
    "npm run build && npm test",
    "grep -rn basic src",
]


@pytest.mark.parametrize("command", HIDDEN)
def test_what_looks_like_a_credential_is_masked(command):
    kept = masking.Masker().text(command)
    assert SECRET not in kept
    assert masking.MASK in kept


@pytest.mark.parametrize("command", KEPT)
def test_other_commands_stay_as_they_are(command):
    assert masking.Masker().text(command) == command


def test_an_access_key_id_is_masked():
    assert masking.Masker().text("aws AKIAIOSFODNN7EXAMPLE") == "aws ***"


def test_words_around_a_credential_stay():
    kept = masking.Masker().text(f"curl -H 'Authorization: Bearer {SECRET}' https://x.test/a")
    assert kept == "curl -H 'Authorization: Bearer ***' https://x.test/a"


def test_the_owners_patterns_come_on_top():
    masker = masking.Masker([r"project-\w+"])
    assert masker.text("deploy project-falcon --token abc") == "deploy *** --token ***"


def test_masking_twice_changes_nothing_more():
    masker = masking.Masker()
    for command in HIDDEN:
        once = masker.text(command)
        assert masker.text(once) == once


@given(st.text(max_size=300))
def test_any_text_can_be_masked(text):
    assert isinstance(masking.Masker().text(text), str)


def test_an_event_is_masked_wherever_words_of_a_caller_stand_in_it():
    masker = masking.Masker()
    ran = events.Started(sandbox="a", time=0, actor="x", execution="e", command=f"x --token {SECRET}")
    refused = events.Refused(
        sandbox="a",
        time=0,
        actor="x",
        operation="exec",
        code="argument_invalid",
        message=f"TOKEN={SECRET} is wrong",
    )
    assert SECRET not in repr(masker.event(ran))
    assert SECRET not in repr(masker.event(refused))
    plain = events.Started(sandbox="a", time=0, actor="x", execution="e", command="true")
    assert masker.event(plain) is plain
