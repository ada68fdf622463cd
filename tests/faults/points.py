"""What broke from outside once, and the tests that show that it does not any more.

``python benchmarks/resilience.py --list`` prints this table; ``tests/faults/test_points.py`` checks that every test is
there. A test is ``file::name``, below ``tests/``; parametrised ones count as one.
"""

from __future__ import annotations

__all__ = ["POINTS"]

#: number -> (what broke, its tests); the numbers are stable, for messages and commits to refer to.
POINTS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "a file written through a link that the script had made was the user's own; so were hard links and modes",
        (
            "trial/inside/isolate/test_overlay_calls.py::test_what_is_written_is_read_back",
            "trial/inside/isolate/test_overlay_calls.py::test_an_overlay_behaves_like_the_directory",
            "faults/test_files_kept.py::test_random_programs_change_nothing",
        ),
    ),
    2: (
        "a shell that a step started emptied the user's folder",
        (
            "trial/inside/isolate/test_namespace.py::test_children_work_on_a_copy_and_each_fork_on_its_own",
            "trial/inside/isolate/test_landlock.py::test_shells_and_c_libraries_cannot_write_elsewhere",
            "trial/inside/isolate/test_isolation.py::test_a_script_and_its_children_change_nothing",
            "faults/test_files_kept.py::test_random_programs_and_their_children_work_on_the_kernels_copy",
        ),
    ),
    3: (
        "-o on a device, FIFO or link replaced it by a regular file",
        (
            "support/test_files.py::test_a_write_goes_through_a_link_and_into_what_is_not_a_regular_file",
            "support/test_files.py::test_an_open_descriptor_is_written_to_and_not_replaced",
        ),
    ),
    4: (
        "a command in another PID namespace deleted a running search's folder",
        ("trial/test_processes.py::test_a_folder_that_is_held_stays_though_no_process_has_its_number",),
    ),
    5: (
        "secrets in arguments were stored; ordinary arguments were hidden",
        (
            "faults/test_secrets.py::test_a_secret_is_hidden_in_arguments_and_in_the_text_of_a_command",
            "faults/test_secrets.py::test_what_was_seen_in_a_command_is_hidden_in_whatever_a_script_prints",
            "faults/test_secrets.py::test_a_search_stores_none",
            "faults/test_secrets.py::test_no_ordinary_argument_of_300_real_command_lines_is_hidden",
        ),
    ),
    6: (
        "sync sent the user's token to the address that a folder named",
        ("tracking/test_replay.py::test_a_server_is_never_taken_from_the_folder",),
    ),
    7: (
        "a password among the parameters of --storage was printed and stored",
        (
            "support/test_redact.py::test_an_address_shows_no_login_and_no_secret_parameter",
            "tuning/study/test_storage.py::test_addresses",
        ),
    ),
    8: (
        "a policy of 1 MiB took minutes to apply",
        ("policy/test_matching.py::test_a_policy_of_a_mebibyte_is_loaded_and_applied_in_seconds",),
    ),
    9: (
        "escape sequences of a policy reached the terminal",
        (
            "test_security.py::test_a_policy_says_nothing_to_a_terminal",
            "test_security.py::test_a_page_runs_nothing_that_a_name_says",
            "support/test_text.py::test_nothing_that_acts_is_left",
            "support/test_text.py::test_no_markup_comes_of_a_name",
            "tracking/test_notes.py::test_a_hostile_name_makes_no_markup",
        ),
    ),
    10: (
        "files without an end and numbers without a bound were read",
        (
            "graph/test_report.py::test_a_file_without_an_end_is_refused",
            "graph/test_report.py::test_a_step_nested_without_a_bound_is_refused",
            "cli/policies/test_export.py::test_a_list_of_names_without_an_end_is_refused",
            "cost/test_transformer.py::test_a_configuration_of_a_hundred_million_layers_is_refused",
        ),
    ),
    11: (
        "--engine ray listened on all interfaces",
        ("tuning/workers/test_ray.py::test_a_cluster_of_our_own_listens_on_the_loopback",),
    ),
    12: (
        "files that were written ignored umask and mode",
        ("support/test_files.py::test_a_write_keeps_the_mode_of_a_file_and_follows_the_umask_for_a_new_one",),
    ),
}
