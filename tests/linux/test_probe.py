"""The probe on this host, on hosts made worse on purpose, and its reasoning on hosts we do not have."""

import errno
import os
import socket
import time
from collections.abc import Callable

import pytest

from cloche.linux import cgroups, landlock, probe, processes, seccomp, syscalls

InChild = Callable[[Callable[[], None]], None]

LOOK_IN_LOG = "look for a denial in the kernel log"
FACTS = {fact.name: fact for fact in probe.probe()}


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def can_make_user_namespaces() -> bool:
    return FACTS["user_namespaces"].state == probe.OK


# --- this host ----------------------------------------------------------------------------------------------


def test_every_name_is_answered_in_order() -> None:
    assert tuple(FACTS) == probe.NAMES


@pytest.mark.parametrize("name", probe.NAMES)
def test_a_fact_that_is_not_well_says_why(name: str) -> None:
    fact = FACTS[name]
    assert fact.state in (probe.OK, probe.LIMITED, probe.MISSING)
    assert fact.detail
    assert bool(fact.cause) == (fact.state != probe.OK)
    assert "\n" not in "".join(fact)


def test_facts_agree_with_the_modules_they_speak_of() -> None:
    limits = cgroups.detect().enforceable
    for name in ("memory", "cpus", "pids"):
        assert (FACTS[f"cgroup_{name}"].state == probe.OK) == (name in limits)
    assert (FACTS["landlock"].state != probe.MISSING) == (landlock.abi() > 0)
    assert FACTS["architecture"].detail == syscalls.ARCH
    assert FACTS["kernel"].detail == os.uname().release


@pytest.mark.alone
def test_the_probe_leaves_nothing_behind() -> None:
    def state() -> tuple[object, ...]:
        return (
            read("/proc/self/mountinfo"),
            sorted(os.listdir("/proc/self/fd")),
            {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")},
            socket.gethostname(),
            # Ended orphans of its attempts are adopted by this process, which the tests made a reaper.
            [pid for pid in processes.descendants(os.getpid()) if processes.is_running(pid)],
            [group.name for group in cgroups.detect().sweep(f"cloche-probe-{os.getpid()}")],
            syscalls.prctl(syscalls.PR_GET_NO_NEW_PRIVS),
            [name for name in os.listdir("/tmp") if name.startswith(".cloche-probe")],
        )

    before = state()
    probe.probe()
    assert state() == before


# --- attempts -----------------------------------------------------------------------------------------------


def test_an_attempt_that_hangs_is_ended() -> None:
    def hang(trail: probe.Trail) -> str:
        time.sleep(60)
        return ""

    started = time.monotonic()
    before = set(processes.descendants(os.getpid()))
    outcome = probe.attempt(hang, timeout_s=0.1)
    assert time.monotonic() - started < 5
    assert outcome == probe.Outcome(False, "no answer within 0.1 s")
    assert set(processes.descendants(os.getpid())) <= before


def test_an_attempt_tells_where_it_failed() -> None:
    def fail(trail: probe.Trail) -> str:
        trail.at = "first"
        trail.at = "second"
        raise PermissionError(errno.EPERM, "no")

    assert probe.attempt(fail) == probe.Outcome(
        False, "second: Operation not permitted", "second", errno.EPERM
    )


def test_an_attempt_that_crashes_is_told() -> None:
    def die(trail: probe.Trail) -> str:
        os.kill(os.getpid(), 31)
        return ""

    def raise_(trail: probe.Trail) -> str:
        raise RuntimeError("odd")

    assert probe.attempt(die).text == "ended by signal 31"
    assert "odd" in probe.attempt(raise_).text
    assert not probe.attempt(raise_).ok


def test_an_attempt_that_works_says_so() -> None:
    assert probe.attempt(lambda trail: "done") == probe.Outcome(True, "done")


# --- hosts made worse ---------------------------------------------------------------------------------------


def facts_of(
    in_child: InChild, worsen: Callable[[], None], check: Callable[[dict[str, probe.Fact]], None]
) -> None:
    def work() -> None:
        worsen()
        check({fact.name: fact for fact in probe.probe()})

    in_child(work)


@pytest.mark.skipif(not can_make_user_namespaces(), reason="no user namespaces here anyway")
def test_an_outer_filter_is_recognised(in_child: InChild) -> None:
    def check(facts: dict[str, probe.Fact]) -> None:
        assert facts["user_namespaces"].state == probe.MISSING
        assert "seccomp filter around this process" in facts["user_namespaces"].cause
        assert facts["mounts"].state == probe.MISSING
        assert facts["overlay"].state == probe.MISSING
        assert facts["seccomp"].state == probe.OK
        assert facts["seccomp_notify"].state == probe.MISSING
        assert facts["landlock"].state == FACTS["landlock"].state

    def worsen() -> None:
        seccomp.load(seccomp.build("moderate"))

    facts_of(in_child, worsen, check)


@pytest.mark.skipif(not can_make_user_namespaces(), reason="no user namespaces here anyway")
def test_a_limit_of_zero_is_recognised(in_child: InChild) -> None:
    def worsen() -> None:
        uid, gid = os.getuid(), os.getgid()
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")

    def check(facts: dict[str, probe.Fact]) -> None:
        fact = facts["user_namespaces"]
        assert (fact.state, fact.cause) == (probe.MISSING, "user.max_user_namespaces is 0")
        assert fact.fix == "sudo sysctl -w user.max_user_namespaces=15000"
        assert facts["mounts"].state == probe.OK, "we own a namespace already"

    facts_of(in_child, worsen, check)


def test_an_unwritable_tmpdir_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/no/such/place")
    fact = probe._tmpdir()
    assert (fact.state, fact.detail) == (probe.MISSING, "/no/such/place")
    assert "TMPDIR" in fact.fix


# --- hosts we do not have -----------------------------------------------------------------------------------

APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
CLONE = "kernel.unprivileged_userns_clone"
LIMIT = "user.max_user_namespaces"


@pytest.mark.parametrize(
    ("stage", "code", "sysctls", "filtered", "cause", "fix"),
    [
        ("unshare", errno.ENOSPC, {LIMIT: "0"}, False, f"{LIMIT} is 0", f"{LIMIT}=15000"),
        ("unshare", errno.ENOSPC, {LIMIT: "9"}, False, "is reached", f"{LIMIT}=15000"),
        ("unshare", errno.EUSERS, {LIMIT: "9"}, False, "nested too deep", "outside of other sandboxes"),
        ("unshare", errno.EPERM, {CLONE: "0"}, False, f"{CLONE} is 0", f"{CLONE}=1"),
        ("unshare", errno.EPERM, {APPARMOR: "1"}, False, "AppArmor", f"{APPARMOR}=0"),
        ("uid_map", errno.EPERM, {APPARMOR: "1"}, False, "AppArmor", "profile"),
        ("mount in it", errno.EACCES, {APPARMOR: "1"}, False, "AppArmor", "profile"),
        ("unshare", errno.EPERM, {APPARMOR: "0"}, True, "a seccomp filter", "--security-opt seccomp"),
        ("", errno.ENOSYS, {}, True, "a seccomp filter", "--security-opt seccomp"),
        ("unshare", errno.EINVAL, {}, False, "CONFIG_USER_NS", "another kernel"),
        ("uid_map", errno.EPERM, {}, True, "writing uid_map", "systempaths=unconfined"),
        ("uid_map", errno.EROFS, {}, False, "writing uid_map", "systempaths=unconfined"),
        ("unshare", errno.EPERM, {}, False, "a security module, or this process is in a chroot", LOOK_IN_LOG),
        ("mount in it", errno.EPERM, {}, False, "gives no rights", LOOK_IN_LOG),
        ("mount in it", errno.EPERM, {}, True, "refuses mount", "--security-opt seccomp"),
    ],
)
def test_causes_of_failing_user_namespaces_are_told_apart(
    stage: str, code: int, sysctls: dict[str, str], filtered: bool, cause: str, fix: str
) -> None:
    outcome = probe.Outcome(False, os.strerror(code), stage, code)
    reason = probe.explain_user_namespaces(outcome, sysctls, root=False, filtered=filtered)
    assert cause in reason.cause
    assert fix in reason.fix


def test_settings_for_ordinary_users_are_not_blamed_for_root() -> None:
    outcome = probe.Outcome(False, "", "unshare", errno.EPERM)
    reason = probe.explain_user_namespaces(outcome, {CLONE: "0", APPARMOR: "1"}, root=True, filtered=True)
    assert "a seccomp filter" in reason.cause


@pytest.mark.parametrize(
    ("version", "state", "detail"),
    [
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", probe.MISSING, "WSL 1"),
        ("Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host)", probe.OK, "WSL 2"),
        ("Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)", probe.OK, "not WSL"),
    ],
)
def test_wsl(version: str, state: str, detail: str) -> None:
    fact = probe.explain_wsl(version)
    assert (fact.state, fact.detail) == (state, detail)
