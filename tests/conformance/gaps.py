"""What the rungs are known not to do, by name and reason. A gap that turns out to hold fails the run."""

_ONE_UID = "root inside needs a range of uids, and this sandbox has one"
_ONE_ROOT = "no private root: programs see the host's, and Landlock says what they may touch"
_NO_SOCKETS = "no network namespace: sockets are refused altogether, those of the sandbox's own loopback too"
_ONE_PROC = "no pid namespace: /proc shows that the host's processes exist"
_NO_DISK = "its files have no disk of their own that could be kept; it refuses with not_supported_by_driver"

ONE_UID = {
    "root_inside_is_nobody_outside": _ONE_UID,
    "root_may_write_the_root_and_the_host_stays": _ONE_UID,
}
NO_DISK = dict.fromkeys(
    (
        "a_snapshot_brings_files_back",
        "a_snapshot_is_taken_while_things_run",
        "forks_have_files_of_their_own",
        "an_archived_sandbox_comes_back",
        "a_volume_outlives_its_sandboxes",
        "one_writes_a_volume_or_several_read_it",
    ),
    _NO_DISK,
)
PROCESS = {
    "commands_start_in_slash_workspace": "/workspace exists in the API only; commands see the real path",
    "files_belong_to_the_user": "no user namespace: the owner is the caller",
    "commands_run_as_uid_1000": "no user namespace: commands run as the caller",
    "a_restrictive_root_is_read_only": _ONE_ROOT,
    "the_host_has_another_name": "no uts namespace",
    "processes_of_the_host_are_unseen": _ONE_PROC,
    "sandboxes_do_not_see_each_others_processes": _ONE_PROC,
    "a_socket_is_not_opened": _NO_SOCKETS,
    "there_is_no_network_but_loopback": _NO_SOCKETS,
    "loopback_works_inside": _NO_SOCKETS,
    "a_port_inside_can_be_reached_by_the_engine": _NO_SOCKETS,
    "a_hard_limit_kills_daemons_while_others_run": "an orphan in a session of its own belongs to no command while two run",
    "the_disk_has_the_size_asked_for": "RLIMIT_FSIZE bounds each file only; info().limits says none",
    "a_full_disk_is_told_by_the_api": "RLIMIT_FSIZE bounds each file only; info().limits says none",
}
PROCESS_ORDINARY = {
    "commands_have_no_capabilities": "emptying the bounding set needs a capability itself; no_new_privs makes it moot",
}


def of(driver: str, *, root: bool) -> dict[str, str]:
    """The gaps of a rung, for root or for an ordinary user of this host."""
    found: dict[str, str] = {}
    if driver != "namespaces" or not root:
        found |= ONE_UID
    if driver != "namespaces":
        found |= NO_DISK
    if driver == "process":
        found |= PROCESS
        found |= {} if root else PROCESS_ORDINARY
    return found
