"""Every behaviour, on a driver that is broken so that it must fail there. A check that cannot fail proves nothing.

The plain driver has no glass: what is about isolation and limits fails on it as it is. The rest holds on it, and fails with
one flaw added, which shows that it was the flaw that the behaviour saw.
"""

import os
from collections.abc import Iterator

import pytest

from cloche.testing import conformance
from cloche.testing.conformance import broken

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
DEADLINE_S = 0.5  # several flaws show as a hang, and each costs this much

FLAWED = {
    "arguments": """
        arguments_with_spaces_and_quotes_arrive_unchanged
        arguments_with_newlines_arrive_unchanged
        arguments_in_unicode_arrive_unchanged
        an_empty_argument_stays_an_argument
        an_argument_that_is_not_utf8_arrives_unchanged
        an_argument_vector_of_1_mib_succeeds
    """,
    "content": """
        a_context_works_where_files_are
        a_written_file_is_read_back
        a_file_of_16_mib_makes_the_round_trip
        what_a_command_wrote_is_read
        odd_names_are_names
    """,
    "contexts": """
        a_context_keeps_its_state
        a_context_returns_the_last_expression
        a_context_keeps_its_streams_apart
        a_context_gives_rich_results
        an_error_in_code_is_data
        a_syntax_error_is_data
        a_restarted_context_has_forgotten
        contexts_do_not_share_their_state
        a_deleted_context_is_gone
        a_context_that_dies_says_so
        a_bash_context_keeps_its_state
        a_bash_context_tells_the_exit_code
        a_context_ends_with_its_sandbox
    """,
    "costs": """
        the_cost_of_a_command_is_reported
        usage_shows_what_is_used
        processor_time_is_counted
    """,
    "deaf": """
        a_killed_command_leaves_the_sandbox_usable
        a_hard_limit_kills_the_command
    """,
    "descriptors": """
        a_context_holds_nothing_but_its_own_descriptors
        no_descriptor_is_inherited
    """,
    "directory": """
        commands_start_where_relative_paths_lead
        a_working_directory_is_obeyed
        missing_directories_are_made
        a_written_script_runs
        a_missing_working_directory_is_refused
        changing_directory_stays_within_the_command
    """,
    "environment": """
        a_context_has_the_sandboxs_environment
        nothing_of_the_callers_environment_enters
        home_locale_and_path_are_set
    """,
    "owners": "files_belong_to_the_user",
    "errors": """
        what_is_not_there_says_so
        making_a_directory_tells_whether_it_was_there
        a_socket_is_not_opened
        a_loop_of_symlinks_says_so
        a_directory_is_not_a_file
    """,
    "exit codes": """
        output_can_be_followed_before_the_end
        exit_code_1_is_reported
        exit_code_42_is_reported
        exit_code_255_is_reported
        a_command_missing_in_a_shell_line_gives_127
        a_leader_killed_by_a_signal_says_which
        executions_are_listed_with_how_they_ended
        a_hard_limit_longer_than_the_command_changes_nothing
        exit_code_0_is_reported
        a_program_that_is_not_there_gives_127
        a_file_that_cannot_be_executed_gives_126
        a_soft_limit_hands_back_a_running_command
    """,
    "input": """
        input_is_empty_unless_given
        input_given_is_read_to_its_end
        input_of_4_mib_arrives_whole
        input_can_be_written_while_the_command_runs
        output_of_every_byte_arrives_unchanged
        output_within_the_cap_is_not_truncated
    """,
    "kill": """
        deleting_leaves_no_process
        deleting_twice_is_harmless
        a_deleted_sandbox_says_so
        the_end_is_announced_with_its_reason
        a_command_under_way_learns_of_the_end
        a_sandbox_ends_when_its_time_is_up
        a_sandbox_that_nobody_uses_ends
        a_paused_sandbox_can_be_deleted
        closing_the_driver_leaves_nothing
        a_machine_that_dies_is_lost
    """,
    "lies": """
        limits_are_the_ones_asked_for
    """,
    "limits": """
        every_limit_says_how_it_is_held
    """,
    "links": """
        a_symlink_is_told_from_its_target
        writing_through_a_symlink_writes_its_target
        a_file_can_be_removed
        a_full_directory_is_removed_only_when_asked
        a_tree_can_be_downloaded
        removing_does_not_follow_out
    """,
    "listing": """
        a_listing_tells_type_size_mode_and_target
        a_listing_can_go_deeper
        a_directory_of_1500_entries_is_listed_whole
    """,
    "modes": """
        a_mode_given_is_set
        replacing_keeps_the_mode
        a_tree_can_be_uploaded
    """,
    "moves": """
        an_empty_file_is_a_file
        replacing_a_file_is_atomic
        writing_leaves_no_draft
        a_file_can_be_moved
        a_move_need_not_overwrite
    """,
    "output": """
        output_without_a_last_newline_arrives
        stdout_and_stderr_are_kept_apart
        the_order_within_a_stream_is_exact
        merged_streams_keep_the_exact_order
        large_output_keeps_its_head_and_tail
        a_flood_of_output_is_counted_to_the_last_byte
        the_full_log_is_readable_by_cursor
        temporary_files_can_be_made
        a_hard_limit_keeps_what_was_written
        what_was_written_before_the_end_is_in_the_result
        a_follower_that_leaves_stops_nothing
        loopback_works_inside
        a_terminal_has_one_stream_in_exact_order
    """,
    "pause": """
        a_paused_sandbox_stands_still
        use_wakes_a_paused_sandbox
    """,
    "reckless": """
        a_hard_limit_spares_other_commands
    """,
    "required": """
        a_feature_that_is_missing_fails_the_creation
    """,
    "rlimits": """
        no_core_is_dumped
        memory_within_the_limit_is_granted
    """,
    "shared": """
        a_sandbox_starts_clean
    """,
    "shell": """
        a_shell_line_of_200_kib_succeeds
        a_shell_line_keeps_its_quoting
        a_shell_line_does_not_run_in_a_login_shell
    """,
    "signals": """
        a_context_can_be_interrupted
        a_run_past_its_time_is_stopped
        a_signal_ends_a_started_command
        a_hard_limit_kills_a_command_that_ignores_signals
        a_hard_limit_kills_background_jobs
        a_hard_limit_kills_what_nohup_started
        a_hard_limit_kills_what_setsid_started
        a_hard_limit_kills_what_was_forked_twice
        a_hard_limit_kills_process_substitutions
        killing_the_tree_of_a_command_kills_all_of_it
        a_signal_can_be_caught
        a_signal_reaches_the_whole_group
        cancelling_kills_the_command
    """,
    "specials": """
        a_fifo_is_not_opened
        a_device_is_not_opened
    """,
    "sweep": """
        sweeping_spares_the_living
    """,
    "terminals": """
        control_c_interrupts
        a_terminal_can_be_resized
        a_terminal_is_a_terminal
        without_a_terminal_there_is_none
        a_terminal_has_the_size_asked_for
        control_d_ends_the_input
        a_terminal_echoes_what_is_typed
        a_shell_on_a_terminal_has_job_control
        two_terminals_are_two
    """,
    "variables": """
        variables_of_the_sandbox_reach_commands
        variables_of_a_command_stay_with_it
        variables_can_be_bound_later files_can_be_bound_later
        commands_run_side_by_side
        sandboxes_can_be_made_side_by_side
    """,
    "waits": """
        input_that_nobody_reads_does_not_hang
        the_end_of_a_terminal_hangs_up
        an_orphan_that_holds_the_pipes_does_not_delay_the_result
    """,
    "watching": """
        a_watch_tells_of_changes
        a_recursive_watch_follows_new_directories
        a_watch_ends_with_its_sandbox
    """,
}
NO_GLASS = """
    a_hard_limit_kills_daemons_while_others_run
    commands_start_in_slash_workspace
    a_failed_write_leaves_the_old_file
    a_file_without_permission_is_refused
    two_dots_are_refused
    a_path_of_the_host_is_not_there
    a_symlink_does_not_lead_out
    a_magic_link_does_not_lead_out
    an_archive_does_not_lead_out
    nothing_written_inside_appears_outside
    commands_have_no_capabilities
    commands_cannot_gain_rights
    commands_run_under_a_filter
    commands_run_as_uid_1000
    root_inside_is_nobody_outside
    namespaces_cannot_be_made
    nothing_can_be_mounted
    programs_cannot_be_traced
    io_uring_is_closed
    keyrings_are_closed
    bpf_and_perf_are_closed
    userfaultfd_is_closed
    nobody_types_on_a_terminal_but_its_user
    what_the_glass_stopped_is_told
    a_flood_of_refused_calls_ends
    a_file_of_the_host_is_not_read
    a_file_of_the_host_is_not_written
    the_state_directory_is_hidden
    the_hosts_accounts_are_hidden
    programs_of_the_host_are_not_changed
    root_may_write_the_root_and_the_host_stays
    a_restrictive_root_is_read_only
    the_kernels_settings_cannot_be_opened
    devices_of_the_host_cannot_be_opened
    processes_of_the_host_are_unseen
    processes_of_the_host_cannot_be_signalled
    the_agent_cannot_be_read
    the_host_has_another_name
    the_hosts_loopback_is_unreachable_by_tcp
    the_hosts_loopback_is_unreachable_by_udp
    unix_sockets_of_the_host_are_unreachable
    there_is_no_network_but_loopback
    a_port_inside_can_be_reached_by_the_engine
    sandboxes_do_not_see_each_others_files
    sandboxes_do_not_see_each_others_processes
    sandboxes_cannot_signal_each_other
    sandboxes_cannot_meet_at_an_abstract_socket
    a_sandbox_says_how_strong_it_is
    a_memory_hog_is_killed
    a_memory_hog_does_not_take_its_sandbox_along
    a_memory_hog_spares_other_sandboxes
    a_fork_bomb_meets_its_limit
    a_fork_bomb_spares_other_sandboxes
    the_disk_has_the_size_asked_for
    a_full_disk_is_told_by_the_api
    a_full_disk_spares_other_sandboxes
    a_snapshot_brings_files_back
    a_snapshot_is_taken_while_things_run
    forks_have_files_of_their_own
    an_archived_sandbox_comes_back
    a_volume_outlives_its_sandboxes
    one_writes_a_volume_or_several_read_it
"""
CAUGHT_BY = {name: flaw for flaw, names in FLAWED.items() for name in names.split()}


def _plain(*flaws: str) -> conformance.MakeDriver:
    return lambda home: broken.PlainDriver(home, flaws=frozenset(flaws))


@pytest.fixture(autouse=True)
def _bury() -> Iterator[None]:
    yield
    broken.bury()


@pytest.fixture(scope="module")
def plain() -> Iterator[conformance.Session]:
    with conformance.Session(_plain()) as session:
        yield session


def test_every_behaviour_is_shown_to_fail() -> None:
    assert sorted([*CAUGHT_BY, *NO_GLASS.split()]) == sorted(conformance.BEHAVIOURS)
    assert set(FLAWED) <= set(broken.FLAWS)


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0, reason="without glass the kernel itself stops an ordinary user here and there"
)
@pytest.mark.parametrize("name", NO_GLASS.split())
def test_it_fails_without_glass(name: str) -> None:
    assert conformance.run(_plain(), only=[name], deadline_s=DEADLINE_S).failed


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_it_holds_without_a_flaw(plain: conformance.Session, name: str) -> None:
    plain.check(conformance.BEHAVIOURS[name])


@pytest.mark.parametrize(("name", "flaw"), CAUGHT_BY.items())
def test_it_fails_with_its_flaw(name: str, flaw: str) -> None:
    assert conformance.run(_plain(flaw), only=[name], deadline_s=DEADLINE_S).failed
