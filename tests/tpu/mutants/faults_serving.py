"""Faults of the rooms generation, bulk and serving."""

from table import TPU, in_file


BULK, SERVING, JOBS = "test_bulk.py", "test_serving.py", "test_serving_jobs.py"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "apps/generation/call.py",
        ("generation-seeds", "manual_seed(request.seed) for request in requests", "manual_seed(requests[0].seed) for request in requests",
         "all of a batch have the first one's noise", f"{BULK}::test_a_batch_gives_what_single_calls_give"),
        ("generation-alike", "return json.dumps(self.arguments, sort_keys=True, default=id)", 'return ""',
         "prompts of other arguments share a call", f"{BULK}::test_a_batch_gives_what_single_calls_give"),
    ),
    *in_file(
        TPU + "apps/generation/signature.py",
        ("generation-truth", 'return "bool" in types', "return True",
         "true is taken for a number", f"{BULK}::test_arguments_are_held_against_the_pipelines_signature"),
    ),
    *in_file(
        TPU + "apps/bulk/claims.py",
        ("bulk-shared", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
         "two processes may have one prompt", f"{BULK}::test_a_prompt_is_its_owners_until_the_owner_is_killed"),
        ("bulk-place", "fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)", "fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 9)",
         "nobody waits for another's prompt", f"{BULK}::test_a_prompt_that_another_process_has_is_waited_for_and_not_made_again"),
    ),
    *in_file(
        TPU + "apps/bulk/work.py",
        ("bulk-look", "if self._done(prompt):  # by another, between the look and the lock", "if False:",
         "what another process made meanwhile is made again", f"{BULK}::test_a_prompt_that_another_process_has_is_waited_for_and_not_made_again"),
        ("bulk-disk", "except (OSError, MemoryError):", "except MemoryError:",
         "an error of the machine is a prompt's", f"{BULK}::test_an_error_of_the_machine_is_no_prompts"),
        ("bulk-drafts", "            self.directory.clear(prompt)\n", "",
         "drafts of a killed process stay", f"{BULK}::test_a_full_disk_ends_the_run_and_the_next_one_goes_on"),
        ("bulk-alone", "self._answer([prompt], 1)", 'self.directory.write_record(prompt, error="its batch failed")',
         "one bad prompt of a batch spoils the others", f"{BULK}::test_one_bad_prompt_of_a_batch_spoils_no_other"),
    ),
    *in_file(
        TPU + "apps/bulk/directory.py",
        ("bulk-missing", "if len(there) > len(wanted):", "if False:",
         "a shorter list is taken for the same", f"{BULK}::test_another_list_of_prompts_is_refused_with_what_differs_and_a_longer_one_is_not"),
        ("bulk-old-manifest", '(self.path / "manifest.jsonl").unlink(missing_ok=True)', "pass",
         "the manifest of fewer prompts stays", f"{BULK}::test_another_list_of_prompts_is_refused_with_what_differs_and_a_longer_one_is_not"),
    ),
    *in_file(
        TPU + "apps/serving/jobs.py",
        ("serving-all-or-none", "if len(self._queue) + len(jobs) > self.limits.queue:", "if len(self._queue) >= self.limits.queue:",
         "the queue grows beyond its limit", f"{JOBS}::test_a_full_queue_says_when_to_come_again"),
        ("serving-late", "            if job.cancelling:\n                state, error = CANCELLED, None\n", "",
         "a cancelled job is completed", f"{JOBS}::test_a_job_that_waits_is_cancelled_at_once_and_one_that_is_done_too_late_leaves_no_file"),
        ("serving-bytes", "held <= self.limits.kept_bytes", "True",
         "files are kept without end", f"{JOBS}::test_finished_jobs_go_by_age_by_bytes_and_by_number"),
        ("serving-take", "if job.request.alike() == alike", "if job",
         "jobs of other arguments share a call", f"{JOBS}::test_jobs_that_are_alike_are_taken_together_and_in_order"),
    ),
    *in_file(
        TPU + "apps/serving/worker.py",
        ("serving-stop", "            if all(job.cancelling for job in jobs):\n                raise Stopped\n\n", "\n",
         "a cancelled job runs to its end", f"{SERVING}::test_a_running_job_ends_after_the_step_in_which_it_is_cancelled_and_the_next_is_right"),
    ),
    *in_file(
        TPU + "apps/serving/guard.py",
        ("serving-token", "not same(self.token, given.strip())", "not given.strip()",
         "any token is the token", f"{SERVING}::test_elsewhere_a_token_is_needed_and_held_against"),
        ("serving-stream", "if seen > self.body_bytes:", "if False:",
         "a body without a length has no limit", f"{SERVING}::test_other_requests_that_nothing_answers"),
        ("serving-host", "if self.loopback and not is_loopback(host):", "if False:",
         "a name that someone points at loopback is served", f"{SERVING}::test_other_requests_that_nothing_answers"),
    ),
    *in_file(
        TPU + "apps/serving/server.py",
        ("serving-open", "if not is_loopback(self.host) and not self.token:", "if False:",
         "a server without a token is reached from elsewhere", f"{SERVING}::test_elsewhere_a_token_is_needed_and_held_against"),
        ("serving-grace", "if not self.jobs.wait_idle(grace):", "if False:",
         "the end waits for a job for ever", f"{JOBS}::test_the_end_cancels_what_runs_when_its_time_is_over"),
    ),
    *in_file(
        TPU + "apps/serving/sizes.py",
        ("serving-size", "if not self.any_size:", "if False:",
         "a size that is not compiled is taken", f"{JOBS}::test_sizes_are_parsed_chosen_and_defaulted"),
    ),
    *in_file(
        TPU + "apps/serving/api.py",
        ("serving-gone", "                    jobs.drop(job)\n                else:", "                    pass\n                else:",
         "images that were answered stay", f"{SERVING}::test_images_are_the_pipelines_and_equal_requests_share_a_call"),
    ),
]
# fmt: on
