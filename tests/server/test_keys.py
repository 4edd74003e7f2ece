"""Keys: what is not one, what was one, and what the file shows."""

import json
import os
import threading

import pytest

from cloche import errors
from cloche.server import keys
from tests.server.conftest import Clock


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def known(tmp_path, clock):
    return keys.Keys(str(tmp_path), clock)


def refusal(known, secret):
    with pytest.raises(errors.ClocheError) as caught:
        known.check(secret)
    return caught.value


@pytest.mark.parametrize("overlap_s", [-1, float("inf"), float("nan"), 1e12])
def test_an_overlap_that_is_no_time_is_refused_and_nothing_changes(known, overlap_s):
    secret = known.create("ci", ("exec",))
    with pytest.raises(errors.ClocheError) as caught:
        known.rotate("ci", overlap_s=overlap_s)
    assert caught.value.code == "limit_invalid"
    assert known.check(secret).name == "ci"


def test_a_key_that_is_not_there_is_not_rotated(known):
    with pytest.raises(errors.ClocheError) as caught:
        known.rotate("ci")
    assert caught.value.code == "key_not_found"
    assert known.list() == []


@pytest.mark.parametrize("tenant", ["red/blue", "-red", "a" * 64, "ré", "red\n", " "])
def test_a_tenant_that_could_be_taken_for_another_is_refused(known, tenant):
    with pytest.raises(errors.ClocheError) as caught:
        known.create("ci", ("exec",), tenant=tenant)
    assert caught.value.code == "name_invalid"
    assert known.list() == []


def test_a_rotated_key_is_another_secret_and_the_same_key(known, clock):
    old = known.create("ci", ("exec",), tenant="red", lifetime_s=1000)
    clock.now = 1010
    new = known.rotate("ci")
    assert refusal(known, old).code == "key_refused"
    found = known.check(new)
    assert (found.name, found.tenant, found.scopes, found.created_at, found.expires_at, found.rotated_at) == (
        "ci", "red", ("exec",), 1000, 2000, 1010,
    )  # fmt: skip
    assert known.check("e2b_" + new.removeprefix("cl_")) == found
    assert found.prefix == new[:9]


def test_the_secret_before_is_good_for_the_overlap(known, clock):
    first = known.create("ci", ("exec",))
    second = known.rotate("ci", overlap_s=60)
    third = known.rotate("ci", overlap_s=30)
    assert {known.check(secret).name for secret in (first, second, third)} == {"ci"}
    clock.now += 30
    assert refusal(known, second).code == "key_refused"
    assert known.check(first).name == "ci"
    clock.now += 30
    assert refusal(known, first).code == "key_refused"
    assert known.check(third).name == "ci"
    known.rotate("ci")
    assert known.list()[0].former == ()
    known.revoke("ci")
    assert refusal(known, third).code == "key_refused"


def test_an_overlap_does_not_outlive_the_key(known, clock):
    first = known.create("ci", ("exec",), lifetime_s=10)
    known.rotate("ci", overlap_s=1000)
    clock.now += 10
    assert "expired" in refusal(known, first).message


def test_no_secret_is_in_any_file(known, tmp_path):
    secret = known.create("ci", ("exec",))
    known.check(secret)
    rotated = known.rotate("ci", overlap_s=60)
    for directory, _, names in os.walk(tmp_path):
        for name in names:
            path = os.path.join(directory, name)
            assert os.stat(path).st_mode & 0o077 == 0 or name == "api.lock"
            with open(path) as file:
                text = file.read()
            assert secret[3:] not in text
            assert rotated[3:] not in text


def test_last_use_is_told_within_a_minute_and_goes_with_the_key(known, clock):
    secret = known.create("ci", ("exec",))
    assert known.last_used("ci") is None
    refusal(known, "cl_" + "0" * 40)
    assert known.last_used("ci") is None
    known.check(secret)
    assert known.last_used("ci") == 1000
    clock.now += 59
    known.check(secret)
    assert known.last_used("ci") == 1000
    clock.now += 1
    known.check(secret)
    assert known.last_used("ci") == 1060
    known.revoke("ci")
    assert known.last_used("ci") is None


def test_rotations_at_once_do_not_lose_a_key(known, tmp_path):
    for name in ("a", "b", "c", "d"):
        known.create(name, ("exec",))
    made: dict[str, str] = {}

    def rotate(name: str) -> None:
        own = keys.Keys(str(tmp_path), lambda: 1000.0)
        for _ in range(5):
            made[name] = own.rotate(name)

    threads = [threading.Thread(target=rotate, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {known.check(secret).name for secret in made.values()} == set("abcd")


def test_a_key_from_the_environment_is_one_for_this_process(known):
    known.accept("cl_" + "a" * 40)
    assert known.check("e2b_" + "a" * 40).scopes == ("*",)
    known.accept("a word of my own")
    assert known.check("a word of my own").name == "environment"
    assert known.list() == []


def test_the_command_rotates_and_keeps_the_owner_s_file_right(served):
    refused = served.cloche("key", "rotate", "nobody", "--json")
    assert json.loads(refused.stdout)["error"]["code"] == "key_not_found"
    assert "belongs to" in served.cloche("key", "create", "x", "--overlap", "5").stderr
    first = served.cloche("key", "create", "turning").stdout.strip()
    second = served.cloche("key", "rotate", "turning", "--overlap", "600").stdout.strip()
    third = json.loads(served.cloche("key", "rotate", "turning", "--json").stdout)["key"]
    statuses = []
    for secret in (first, second, third):
        with served.client(secret) as client:
            statuses.append(client.get("/v1/sandboxes").status_code)
    assert statuses == [200, 401, 200]
    listed = {key["name"]: key for key in json.loads(served.cloche("key", "list", "--json").stdout)}
    assert listed["turning"]["last_used_at"]
    assert not {"hash", "former"} & set(listed["turning"])
    assert "LAST USED" in served.cloche("key", "list").stdout
    assert served.cloche("key", "revoke", "turning").returncode == 0
    before = (served.home / "s/keys/default.key").read_text()
    after = served.cloche("key", "rotate", "default", "--overlap", "100000").stdout
    assert (served.home / "s/keys/default.key").read_text() == after != before
