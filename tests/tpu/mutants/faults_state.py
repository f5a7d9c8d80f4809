"""Planted faults of state: cache keys, traces, branches, scans, weights, processes, requests."""

from table import TPU, in_file


# fmt: off
MUTANTS = [
    *in_file(
        TPU + "compile/state/values.py",
        ("key-objects", "return key, self.attributes_of(x, foreign)", "return key, ()",
         "a processor's settings are no part of the key",
         "test_changes.py::test_every_change_after_a_first_call_is_seen"),
    ),
    *in_file(
        TPU + "compile/state/key.py",
        ("key-hooks", "return seen, self.type(type(module)), tuple(own), hooks, tuple(children)",
         "return seen, self.type(type(module)), tuple(own), (), tuple(children)",
         "a hook inside of a block is no part of the key",
         "test_changes.py::test_every_change_after_a_first_call_is_seen"),
    ),
    *in_file(
        TPU + "compile/state/state.py",
        ("key-stale", "if all(map(operator.is_, self._values(), self.held)):", "if True:",
         "changed attributes are not seen", "test_changes.py::test_every_change_after_a_first_call_is_seen"),
    ),
    *in_file(
        TPU + "compile/state/undo.py",
        ("key-undone", "        state.restore()\n", "        pass\n", "what a trace did to a module stays",
         "test_bridge.py::test_a_trace_leaves_no_tracer_in_the_module"),
    ),
    *in_file(
        TPU + "compile/guidance.py",
        ("branches-swapped", "*before, mine = self.execute", "mine, *before = self.execute",
         "guidance branches get each other's values", "test_changes.py::test_three_branches"),
    ),
    *in_file(
        TPU + "compile/call.py",
        ("call-versions", "return all(_is_same(mine.versions[n], theirs.versions[n]) for n in shared)",
         "return True", "a tensor that was written to counts as the same",
         "test_changes.py::test_writes_in_place_while_a_call_waits"),
    ),
    *in_file(
        TPU + "compile/tracing/blocks.py",
        ("blocks-written", "elif value is not None and leaf.jax() is not value:", "elif False:",
         "a scanned block sees the first block's context",
         "test_changes.py::test_blocks_see_the_values_of_their_call"),
        ("blocks-alike", "if self.settings[path, run.start] == self.settings[path, index]:", "if True:",
         "blocks with other settings are scanned as one",
         "test_changes.py::test_every_change_after_a_first_call_is_seen"),
    ),
    *in_file(
        TPU + "compile/tracing/function.py",
        ("function-buffers", "            _put(self.module, name, weight)\n", "            pass\n",
         "what a forward writes into a buffer is lost",
         "test_changes.py::test_what_a_forward_leaves_and_reads_is_upstreams"),
    ),
    *in_file(
        TPU + "compile/weights.py",
        ("weights-samples", "                del self.versions[key]\n", "                pass\n",
         "writes through .data are not seen", "test_changes.py::test_every_change_after_a_first_call_is_seen"),
        ("weights-numbers", "[scales.get(name, 0.0) for scales in of_blocks]",
         "[scales.get(name, 0.0) for scales in of_blocks[::-1]]", "LoRA scales of blocks in the other order",
         "test_changes.py::test_lora"),
    ),
    *in_file(
        TPU + "compile/tracing/caches/whole.py",
        ("caches-branches", "pairs = zip(residual.chunk(branches), before.chunk(branches))",
         "pairs = [(residual, before)] * branches", "branches decide together",
         "test_caches.py::test_each_branch_decides_for_itself"),
        ("caches-lasts", "results[0] if lasts else None", "results[0]",
         "the next video begins with the last one's residual",
         "test_caches.py::test_a_model_by_itself_that_hands_two_streams_on"),
    ),
    *in_file(
        TPU + "compile/state/adapters.py",
        ("adapters-merged", "    if layer.merged or layer.disable_adapters:", "    if layer.disable_adapters:",
         "a merged adapter is added again", "test_lora.py::test_a_session_with_loras"),
    ),
    *in_file(
        TPU + "compile/module.py",
        ("runner-scale", "self._numbers[0] != call.scale", "False", "a call's scale is the one before's",
         "test_lora.py::test_a_session_with_loras"),
        ("runner-alone",
         "                self.guards.alone[key[:-1]] = True\n                return self.program(call)\n",
         "                pass\n", "guidance branches that decide run in parts",
         "test_ladder.py::test_branches_that_decide_run_alone_by_their_own_values"),
    ),
    *in_file(
        TPU + "compile/guards.py",
        ("decided-stale", "return tuple(map(_hashable, decisions.made.values()))",
         "return ((),) * len(decisions.made)", "a program is kept without the answers that it was made for",
         "test_ladder.py::test_a_line_that_asks_of_a_mask_has_upstreams_values_for_every_answer"),
    ),
    *in_file(
        TPU + "compile/eager.py",
        ("eager-draws", "return bool(effects.persistent or effects.draws)", "return bool(effects.persistent)",
         "random numbers are constants of a program",
         "test_changes.py::test_a_decision_by_a_value_and_random_numbers_run_eagerly"),
    ),
    *in_file(
        TPU + "compile/executables.py",
        ("executables-state", '"state": words.of((runner.read_state, process_key())),', '"state": "",',
         "a program of another state of the model is used",
         "test_executables.py::test_another_state_is_another_program"),
        ("executables-settings", '"settings": repr((fixed, runner.config.matmul_precision)),', '"settings": "",',
         "a program of another precision is used",
         "test_executables.py::test_what_is_of_another_run_is_not_used_and_its_parts_are_named"),
    ),
    *in_file(
        TPU + "chips/sharding.py",
        ("sharding-gathered", "if axis not in STORAGE_AXES) for entry in spec",
         "if axis in STORAGE_AXES) for entry in spec",
         "weights stay split over storage axes while the block computes",
         "test_program.py::test_one_loop_over_blocks_that_gathers_weights_and_reduces_nothing"),
    ),
    *in_file(
        TPU + "weights/checkpoint.py",
        ("checkpoint-dtype", "functools.reduce(torch.Tensor.to, () if values is None else dtypes, part[index])",
         "part[index]", "a dropped dtype conversion",
         "test_weights.py::test_weights_are_upstreams_however_they_are_used"),
        ("checkpoint-missing", "        if missing:\n", "        if missing and path is None:\n",
         "a missing weight keeps its random values",
         "test_weights.py::test_missing_and_surplus_weights_are_named"),
    ),
    *in_file(
        TPU + "weights/transfer.py",
        ("placing-start", "whole = _write(aval.sharding)(whole, some, chunk.start)",
         "whole = _write(aval.sharding)(whole, some, 0)", "layers of a stack are written over each other",
         "test_weights.py::test_what_is_on_the_chips_is_upstreams_and_follows_the_host"),
    ),
    *in_file(
        TPU + "apps/stages/running.py",
        ("stages-prompts", "for name, x in zip(names, answer, strict=True)",
         "for name, x in zip(names[::-1], answer, strict=True)", "prompt and negative prompt are swapped",
         "test_stages.py::test_three_stages_give_what_one_run_gives"),
    ),
    *in_file(
        TPU + "chips/hosts/agreement.py",
        ("agree-digest", "if digests.get(name) != said[0][1].get(name)", "if name not in digests",
         "another program in another process is not seen", "test_hosts.py::test_what_differs_is_named"),
    ),
    *in_file(
        TPU + "pipelines/stepping.py",
        ("stepping-tables", "return leaf.dtype, leaf.shape, _bytes(leaf)", "return leaf.dtype, leaf.shape",
         "a step of another schedule is used",
         "test_stepping.py::test_what_somebody_changes_between_steps_is_seen"),
        ("stepping-effects", "            for name, tree in recorded.changed.items():\n                _put(",
         "            for name, tree in ():\n                _put(", "a scheduler does not count its steps",
         "test_stepping.py::test_steps_are_upstreams_the_first_time_and_later"),
    ),
    *in_file(
        TPU + "apps/generation/call.py",
        ("generation-seeds", "manual_seed(request.seed) for request in requests",
         "manual_seed(requests[0].seed) for request in requests", "all of a batch have the first one's noise",
         "test_bulk.py::test_a_batch_gives_what_single_calls_give"),
    ),
    *in_file(
        TPU + "apps/bulk/claims.py",
        ("bulk-shared", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
         "two processes may have one prompt",
         "test_bulk.py::test_a_prompt_is_its_owners_until_the_owner_is_killed"),
    ),
]
# fmt: on
