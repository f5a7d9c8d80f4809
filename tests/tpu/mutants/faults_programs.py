"""Faults of the rooms that make programs: compile, call, branches, eager, runner, weights, scanned blocks."""

from table import TPU, in_file


CHANGES = "test_changes.py"
LADDER = "test_ladder.py"
EVERY_CHANGE = f"{CHANGES}::test_every_change_after_a_first_call_is_seen"
LORA = "test_lora.py::test_a_session_with_loras"
LEFT = f"{CHANGES}::test_what_a_forward_leaves_and_reads_is_upstreams"
DECLARED = "test_declared.py::test_the_declared_stream_is_split_between_blocks"
READ = "test_key.py::test_what_code_of_the_users_reads_is_seen_when_it_changes"
NOT_READ = "test_key.py::test_what_no_one_can_read_or_keeps_something_runs_line_by_line"
GIVEN = "test_key.py::test_objects_that_a_call_is_given"
WRITES = "test_key.py::test_a_tensor_that_a_call_writes_into_is_the_callers"
SCRATCH = f"{CHANGES}::test_scratch_tables_and_what_the_first_call_does_stay_compiled"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "compile/state/values.py",
        ("key-objects", "return key, self.attributes_of(x, foreign)", "return key, ()",
         "a processor's settings are no part of the key", EVERY_CHANGE),
        ("key-names", "read += self.named(function)", "pass",
         "what the user's functions name is no part of the key", READ),
        ("key-unread", "self.state.unread.setdefault(self.at, why)", "pass",
         "an iterator is taken for a constant", NOT_READ),
        ("key-bytes", "return \"tensor\", x.dtype, tuple(x.shape), _digest(memory)", "return \"tensor\", x.dtype, tuple(x.shape)",
         "a plain tensor's values are no part of the key", READ),
    ),
    *in_file(
        TPU + "compile/state/key.py",
        ("key-hooks", "return seen, self.type(type(module)), tuple(own), hooks, tuple(children)", "return seen, self.type(type(module)), tuple(own), (), tuple(children)",
         "a hook inside of a block is no part of the key", EVERY_CHANGE),
        ("key-scale-tensors", "                self.tensor(scale)\n", "                pass\n",
         "a scale that is written to in place is not seen", LORA),
    ),
    *in_file(
        TPU + "compile/state/libraries.py",
        ("key-classes", "if not dicts_differ(now, before):", "if True:",
         "a method replaced on a class is not seen", f"{CHANGES}::test_a_method_replaced_on_the_class_is_seen"),
    ),
    *in_file(
        TPU + "compile/state/state.py",
        ("key-stale", "if all(map(operator.is_, self._values(), self.held)):", "if True:",
         "changed attributes are not seen", EVERY_CHANGE),
        ("key-kinds", "if not all_alike(now, self.held):", "if now != self.held:",
         "1, 1.0 and True are one", READ),
    ),
    *in_file(
        TPU + "compile/state/arguments.py",
        ("arguments-holders", "    for number, content in written.holders:\n", "    for number, content in ():\n",
         "what a call leaves in an object that it is given is lost", GIVEN),
        ("arguments-tensors", "    for number, value in zip(written.tensors, outputs):\n", "    for number, value in ():\n",
         "what a call writes into a tensor that it is given is lost", WRITES),
    ),
    *in_file(
        TPU + "compile/state/undo.py",
        ("key-undone", "        state.restore()\n", "        pass\n",
         "what a trace did to a module stays", "test_bridge.py::test_a_trace_leaves_no_tracer_in_the_module"),
        ("key-caches", "setattr(owner, name, plain)", "setattr(owner, name, value)",
         "a cache on a class keeps a tracer", f"{CHANGES}::test_a_cache_on_the_class_keeps_nothing_of_a_trace"),
        ("key-draws", "                trace.draws += 1\n", "                pass\n",
         "a number that Python draws is a constant", NOT_READ),
    ),
    *in_file(
        TPU + "pipelines/declared.py",
        ("declared-split", '"sp" if axis == dim else', 'None if axis == dim else',
         "tokens that are declared split lie whole on every chip", DECLARED),
        ("declared-there", 'there = [glob for glob in globs if fnmatch.filter(names, f"{glob}.{kind}")]', "there = globs",
         "a rule for weights that the module lacks", "test_declared.py::test_only_what_can_be_said_is_taken_from_a_declaration"),
    ),
    *in_file(
        TPU + "compile/branches.py",
        ("branches-swapped", "*before, mine = self.execute", "mine, *before = self.execute",
         "guidance branches get each other's values", f"{CHANGES}::test_three_branches"),
    ),
    *in_file(
        TPU + "compile/call.py",
        ("call-axes", "in named_batched and t.ndim > 0 for", "in named_batched for", "a number in a batch's place is an error of ours",
         "test_runner.py::test_a_batched_argument_without_axes_is_the_models_to_refuse"),
        ("call-versions", "return all(_is_same(mine.versions[n], theirs.versions[n]) for n in shared)", "return True",
         "a tensor that was written to counts as the same", f"{CHANGES}::test_writes_in_place_while_a_call_waits"),
    ),
    *in_file(
        TPU + "compile/tracing/blocks.py",
        ("blocks-names", "signature(type(block).forward).parameters][1:]", "signature(type(block).forward).parameters]",
         "what a block hands on goes by the name of the argument before", DECLARED),
        ("blocks-written", "elif value is not None and leaf.jax() is not value:", "elif False:",
         "a scanned block sees the first block's context", f"{CHANGES}::test_blocks_see_the_values_of_their_call"),
        ("blocks-settings", "if (group.path, index) not in self.settings:", "if True:",
         "blocks in which a call wrote something are no longer alike to the next", SCRATCH),
        ("blocks-twice", "if started.setdefault(number[id(leaf)], value) is not value:", "if False:",
         "of two arguments that become one the first call gets one for both", f"{CHANGES}::test_blocks_see_the_values_of_their_call"),
        ("blocks-alike", "if self.settings[path, run.start] == self.settings[path, index]:", "if True:",
         "blocks with other settings are scanned as one", EVERY_CHANGE),
        ("blocks-words", "return answer.form == run.answer.form and _words(traced) == run.words", "return True",
         "blocks that compute with their own number are scanned as one", EVERY_CHANGE),
    ),
    *in_file(
        TPU + "compile/tracing/following.py",
        ("following-inputs", "if self.second & self.inputs:", "if False:",
         "a call that is made of the first one's inputs is like it", LEFT),
        ("following-within", "return bool(self.second & self.within) or", "return",
         "a value without a value is taken for a constant", SCRATCH),
    ),
    *in_file(
        TPU + "compile/tracing/function.py",
        ("function-buffers", "            _put(self.module, name, weight)\n", "            pass\n",
         "what a forward writes into a buffer is lost", LEFT),
    ),
    *in_file(
        TPU + "compile/weights.py",
        ("weights-samples", "                del self.versions[key]\n", "                pass\n",
         "writes through .data are not seen", EVERY_CHANGE),
        ("weights-numbers", "[scales.get(name, 0.0) for scales in of_blocks]", "[scales.get(name, 0.0) for scales in of_blocks[::-1]]",
         "LoRA scales of blocks in the other order", f"{CHANGES}::test_lora"),
    ),
    *in_file(
        TPU + "compile/tracing/caches/whole.py",
        ("caches-branches", "pairs = zip(residual.chunk(branches), before.chunk(branches))",
         "pairs = [(residual, before)] * branches", "branches decide together",
         "test_caches.py::test_each_branch_decides_for_itself"),
        ("caches-residual", "head, *tails = self._where(ran, [head, *tails], tensors)\n", "pass\n",
         "a skipped step forgets what was kept", "test_caches.py::test_a_cache_enabled_after_a_first_call_and_disabled_again"),
        ("caches-lasts", "results[0] if lasts else None", "results[0]", "the next video begins with the last one's residual",
         "test_caches.py::test_a_model_by_itself_that_hands_two_streams_on"),
    ),
    *in_file(
        TPU + "compile/tracing/caches/modules.py",
        ("caches-fill", "if here.filled is None:", "if False:", "tokens that are none of the model's are looked for in a block that has none",
         "test_caches.py::test_a_model_by_itself_that_hands_two_streams_on"),
    ),
    *in_file(
        TPU + "compile/tracing/caches/kept.py",
        ("caches-failed", "            self.undo()\n            raise", "            raise", "a call that fails is counted",
         "test_caches.py::test_a_model_by_itself_that_hands_two_streams_on"),
    ),
    *in_file(
        TPU + "compile/tracing/caches/modules.py",
        ("caches-elapsed", "float(state.current_step - state.last_update_step)", "1.0", "a series is of neighbouring steps",
         "test_caches.py::test_a_cache_enabled_after_a_first_call_and_disabled_again"),
        ("caches-apart", "(*self.hooks, *(hook.current_timestep_callback for hook in self.hooks))", "(*self.hooks,)",
         "a program for each timestep", "test_caches.py::test_a_cache_enabled_after_a_first_call_and_disabled_again"),
        ("caches-leave", "if held is not None:\n", "if False:\n", "upstream's hooks go on from what they cannot read",
         "test_caches.py::test_a_cache_goes_on_where_no_program_stands_for_a_step"),
    ),
    *in_file(
        TPU + "compile/tracing/blocks.py",
        ("blocks-condition", "        if self.condition is None:", "        if True:",
         "blocks run that a cache skips", "test_caches.py::test_a_cache_enabled_after_a_first_call_and_disabled_again"),
    ),
    *in_file(
        TPU + "compile/state/adapters.py",
        ("adapters-dora", "        return additive and type(layer)", "        return type(layer)",
         "zeros stand for a term that is no sum", "test_lora.py::test_what_zeros_cannot_stand_for_is_scanned_apart"),
        ("adapters-merged", "    if layer.merged or layer.disable_adapters:", "    if layer.disable_adapters:",
         "a merged adapter is added again", LORA),
        ("adapters-order", "found[path] = full\n", "found[path] = 0\n",
         "a block without the adapter lends its layer", "test_lora.py::test_blocks_with_and_without_an_adapter_are_one_scan"),
    ),
    *in_file(
        TPU + "compile/runner.py",
        ("runner-scale-of-zero", "            unscale_lora_layers(self.module, 0)  #", "                pass  #",
         "what upstream forgets after a scale of zero is kept", LORA),
        ("runner-scale", "self._numbers[0] != call.scale", "False", "a call's scale is the one before's", LORA),
    ),
    *in_file(
        TPU + "compile/decided.py",
        ("decided-stale", "return tuple(map(_hashable, decisions.made.values()))", "return ((),) * len(decisions.made)",
         "a program is kept without the answers that it was made for", f"{LADDER}::test_a_line_that_asks_of_a_mask_has_upstreams_values_for_every_answer"),
        ("decided-fickle", "if len(last) < MOST_RUN_ONCE or", "if True or",
         "a number that is another one in each call makes a program each time", f"{LADDER}::test_answers_that_are_others_in_each_call_are_worth_no_program_each"),
    ),
    *in_file(
        TPU + "bridge/decisions.py",
        ("decisions-size", "            if x.size > MOST_ENTRIES:\n                raise _Unknown\n", "",
         "latents are asked before each call", f"{LADDER}::test_what_is_no_small_input_is_not_asked_before_each_call"),
        ("decisions-same", "if question not in self.made:", "if not self.made:",
         "a second question gets the first one's answer", f"{LADDER}::test_a_line_that_asks_of_a_mask_has_upstreams_values_for_every_answer"),
    ),
    *in_file(
        TPU + "compile/tracing/function.py",
        ("function-entangled", "        if self.part:\n            _apart(given, inputs, output)\n", "",
         "what a part writes into its arguments is lost", f"{LADDER}::test_a_part_shares_its_callers_memory"),
    ),
    *in_file(
        TPU + "compile/runner.py",
        ("runner-opaque", "hides = call.others[0] if self.part and call.others else None", "hides = None",
         "a store that a part is given has values of a trace", f"{LADDER}::test_a_part_shares_its_callers_memory"),
        ("runner-held", "next(filter(goes_on_from, call.others), None)", "None",
         "a trace leaves its tensors in the keys and values that a language model is given",
         f"{LADDER}::test_a_language_model_goes_on_from_its_keys_and_values"),
        ("runner-parts-state", "self._in_parts.get(LASTING if self.uncompiled.lasting else self._state.key)", "self.parts",
         "a module stays in parts when what kept it from being compiled is gone", f"{LADDER}::test_a_submodule_that_cannot_be_compiled_runs_while_the_rest_is"),
        ("runner-alone", "                self.decided.alone[key[:-1]] = True\n                return self.program(call)\n", "                pass\n",
         "guidance branches that decide run in parts", f"{LADDER}::test_branches_that_decide_run_alone_by_their_own_values"),
    ),
    *in_file(
        TPU + "compile/eager.py",
        ("eager-draws", "return bool(effects.lasting or effects.draws)", "return bool(effects.lasting)",
         "random numbers are constants of a program", f"{CHANGES}::test_a_decision_by_a_value_and_random_numbers_run_eagerly"),
        ("eager-seed", "            generator.set_state(state)\n", "            pass\n",
         "a trace uses up random numbers", f"{CHANGES}::test_a_decision_by_a_value_and_random_numbers_run_eagerly"),
    ),
    *in_file(
        TPU + "compile/runner.py",
        ("runner-window", "self.config.attention_window if self._denoises else None", "self.config.attention_window",
         "a window of attention reaches text encoders and VAEs", f"{CHANGES}::test_a_window_of_attention_is_the_denoisers_alone"),
    ),
]
