"""What broke from outside once, and the tests that show that it does not any more.

``python benchmarks/reliability/resilience.py --list`` prints this table; ``tests/faults/test_points.py`` checks that
every test is there. A test is ``file::name``, below ``tests/``; parametrised ones count as one.
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
        ("tracking/test_log.py::test_a_server_is_never_taken_from_the_folder",),
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
            "cost/test_configuration.py::test_what_is_not_built_is_refused_by_name_with_its_reason",
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
    13: (
        "a model with parametrised weights recursed without end",
        (
            "trial/inside/observe/test_hooks.py::test_what_the_watcher_calls_itself_is_not_watched",
            "applying/test_units.py::test_looking_at_a_parametrised_layer_does_not_change_it",
        ),
    ),
    14: (
        "os.makedirs and os.chdir in a trial",
        ("trial/inside/isolate/test_overlay_calls.py::test_what_is_written_is_read_back",),
    ),
    15: (
        "a directory written to hid the user's files from glob, scandir and walk",
        ("trial/inside/isolate/test_overlay_calls.py::test_what_is_written_is_read_back",),
    ),
    16: (
        "torch.save, then os.replace, getsize or torch.load; torch.save into a buffer",
        ("trial/inside/isolate/test_savers.py::test_what_c_libraries_save_is_loaded_again",),
    ),
    17: (
        "a script with a prefetch thread was forked and hung",
        ("trial/inside/test_host.py::test_threads_that_training_may_wait_for_are_an_obstacle",),
    ),
    18: (
        "a TMPDIR of over 70 characters",
        ("trial/test_messages.py::test_a_path_may_be_longer_than_the_address_of_a_socket",),
    ),
    19: (
        "a user without HOME and without an entry among the users",
        ("support/test_files.py::test_a_cache_lies_somewhere_for_a_user_without_a_home",),
    ),
    20: (
        "folders whose names mean something in a URL",
        ("support/test_files.py::test_a_database_lies_in_its_folder_whatever_that_is_called",),
    ),
    21: (
        "evidence keys that look like markup",
        ("cli/policies/test_show.py::test_keys_that_look_like_markup_are_printed_as_they_are",),
    ),
    22: (
        "layer names of 3,000 characters",
        ("policy/test_document.py::test_names_of_thousands_of_characters_are_written_and_read",),
    ),
    23: (
        "of several models only the first was run under the policy, and the audit was content",
        (
            "trial/inside/test_policy_run.py::test_every_fold_is_under_the_policy_and_in_the_audit",
            "trial/inside/test_policy_run.py::test_another_kind_of_model_is_named_and_left_as_it_is",
        ),
    ),
    24: (
        "a script that swallows everything trained on without the policy",
        ("trial/inside/test_policy_run.py::test_a_script_that_swallows_everything_does_not_train_without_its_policy",),
    ),
    25: (
        "a study was continued with an edited script",
        ("trial/test_source.py::test_another_text_is_another_script_and_another_comment_is_not",),
    ),
    26: (
        "a model pickled under a policy could not be loaded without AutoPrec",
        ("applying/test_swap.py::test_a_pickle_names_nothing_of_autoprec",),
    ),
    27: (
        "a policy on a TorchScript model did nothing",
        ("applying/test_policy.py::test_a_torchscript_model_is_refused_and_its_layers_are_not_tunable",),
    ),
    28: (
        "a vector loss was called not finite",
        ("trial/inside/observe/test_loop.py::test_a_vector_loss_counts_as_its_weighted_sum_where_nothing_else_does",),
    ),
    29: (
        "signals to autoprec run left an orphan and a folder",
        ("trial/driver/test_script.py::test_the_script_gets_the_signals_and_does_not_outlive_the_command",),
    ),
    31: (
        "removed directories, closed streams, empty names and impossible ports ended in tracebacks",
        (
            "cli/test_cli.py::test_a_command_works_with_its_streams_closed",
            "cli/test_cli.py::test_a_working_directory_that_is_gone_is_told",
            "cli/test_cli.py::test_an_address_that_is_none_is_told_without_its_password",
            "cli/test_cli.py::test_nonsense_is_refused_with_a_message",
        ),
    ),
    32: (
        "of unnamed searches begun at once all but one failed",
        ("tuning/study/test_naming.py::test_searches_that_start_at_once_take_the_next_names",),
    ),
    33: (
        "run --audit on a script that never trains said nothing",
        ("trial/driver/test_script.py::test_a_script_that_never_trains_is_told_that_no_policy_ran",),
    ),
    34: (
        "a script's alarm per step went off in a trial",
        ("trial/inside/isolate/test_timers.py::test_neither_a_running_alarm_nor_a_later_one_goes_off",),
    ),
    35: (
        "a model replaced by another was told as a script that ended",
        ("trial/driver/test_runner.py::test_a_throw_away_model_is_passed_over_and_named",),
    ),
    36: (
        "a Ray head that died ended the driver without a word",
        ("tuning/workers/test_head.py::test_a_lost_head_ends_the_waiting",),
    ),
    37: (
        "a database of another program was given tables by --resume",
        ("tuning/study/test_sqlite_check.py::test_the_database_of_another_program_is_not_resumed_and_stays_as_it_is",),
    ),
    38: (
        "gradient penalties, torch.func and the meta device ended in torch's own words",
        (
            "applying/test_policy.py::test_a_scaled_layer_that_is_differentiated_twice_is_named",
            "applying/test_policy.py::test_transforms_of_torch_func_name_the_scaled_layer",
            "applying/test_policy.py::test_shapes_are_computed_on_the_meta_device",
        ),
    ),
    39: (
        "an optimisation level that does not exist was imported",
        ("export/test_importers.py::test_an_optimisation_level_that_accelerate_does_not_have_is_refused",),
    ),
    40: (
        "an interrupted apply left half a policy",
        ("applying/test_stage.py::test_an_interrupted_stage_leaves_the_model_as_it_was",),
    ),
    41: (
        "classes of models that are gone stayed",
        ("applying/test_swap.py::test_classes_live_no_longer_than_the_models_that_have_them",),
    ),
    42: (
        "each autoprec ui left a folder in shared memory",
        ("tracking/test_page.py::test_another_mlflow_is_run_as_its_users_run_it",),
    ),
}
