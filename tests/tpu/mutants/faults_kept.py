"""Faults of the rooms that keep programs for other processes, and of schedulers' steps as programs."""

from table import TPU, in_file


EXECUTABLES, STEPPING = "test_executables.py", "test_stepping.py"
STATE = f"{EXECUTABLES}::test_another_state_is_another_program"
ANOTHER = f"{EXECUTABLES}::test_what_is_of_another_run_is_not_used_and_its_parts_are_named"
SCRIPT = f"{EXECUTABLES}::test_code_of_a_script_is_never_anothers"
CHANGED = f"{STEPPING}::test_what_somebody_changes_between_steps_is_seen"
STEPS = f"{STEPPING}::test_steps_are_upstreams_the_first_time_and_later"
KNOWN = "test_bridge.py::test_values_that_the_host_knows"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "compile/executables.py",
        ("executables-state", '"state": words.of((runner.read_state, process_key())),', '"state": "",',
         "a program of another state of the model is used", STATE),
        ("executables-settings", '"settings": repr((fixed, runner.config.matmul_precision)),', '"settings": "",',
         "a program of another precision is used", ANOTHER),
        ("executables-flags", "(sorted(runner.compiler_options.items()), _flags(), ", "(sorted(runner.compiler_options.items()), (), ",
         "a program that was compiled with other flags is used", ANOTHER),
        ("executables-answers", '"answers": words.of(answers),', '"answers": "",',
         "the program of other answers is used", f"{EXECUTABLES}::test_questions_lead_to_the_program_of_their_answers"),
        ("executables-not-kept", "            self.store.keep(program.key, kept, ahead)\n", "            pass\n",
         "nothing is kept for other processes", f"{EXECUTABLES}::test_another_process_traces_nothing_and_answers_the_same"),
    ),
    *in_file(
        TPU + "compile/store/describing.py",
        ("store-scripts", "    if where is None:\n        raise NotPortable(", "    if where is None:\n        return code.co_qualname\n        raise NotPortable(",
         "two scripts' functions of one name are taken for one", SCRIPT),
        ("store-modules", "        held.append((name, _held(value)))\n        if isinstance(value, (types.FunctionType", "        if isinstance(value, (types.FunctionType",
         "a function that somebody put into a library's module is not seen", SCRIPT),
        ("store-files", 'return f"{where}:{code.co_qualname}:{code.co_firstlineno}"', 'return f"{code.co_qualname}:{code.co_firstlineno}"',
         "codes of two files that look alike are one", f"{EXECUTABLES}::test_a_code_is_told_from_one_alike_in_another_file"),
    ),
    *in_file(
        TPU + "compile/store/files.py",
        ("store-digest", 'if len(body) != head["bytes"] or hashlib.sha256(body).hexdigest() != head["sha256"]:', "if False:",
         "a damaged executable is loaded", f"{EXECUTABLES}::test_a_damaged_file_is_said_removed_and_made_anew",
         "zlib's own checksum finds what this one does, only later"),
        ("store-key", 'if head["key"] != key.parts:', "if False:",
         "a file under another one's name is used", f"{EXECUTABLES}::test_a_damaged_file_is_said_removed_and_made_anew"),
        ("store-used", "            os.utime(path)\n", "            pass\n",
         "what is used goes as if it were not", f"{EXECUTABLES}::test_the_longest_unused_go"),
    ),
    *in_file(
        TPU + "pipelines/stepping.py",
        ("stepping-tables", "return leaf.dtype, leaf.shape, _bytes(leaf)", "return leaf.dtype, leaf.shape",
         "a step of another schedule is used", CHANGED),
        ("stepping-configuration", "        return repr(leaf)\n", "        return type(leaf)\n",
         "a changed configuration is not seen", CHANGED),
        ("stepping-numbers", "return isinstance(x, Literal) and not x.aval.shape and x.aval.dtype != jnp.bool_", "return False",
         "every step of a schedule is compiled", f"{STEPPING}::test_steps_that_differ_in_numbers_are_one_executable"),
        ("stepping-effects", "            for name, tree in recorded.changed.items():\n                _put(", "            for name, tree in ():\n                _put(",
         "a scheduler does not count its steps", STEPS),
        ("stepping-draws", "        if env.draws != drawn:\n", "        if False:\n",
         "a step repeats the noise that its trace drew", f"{STEPS}[jax-ancestral]"),
        ("stepping-tables-on-chips", "                words[number] += (values.tobytes(),)\n", "",
         "a step of another schedule that lies on the chips is used", CHANGED),
        ("stepping-tables-apart", "{n: bridge.known_apart(t) for n", "{n: t for n",
         "a step that writes into its tables leaves a trace's value in them",
         f"{STEPPING}::test_a_step_that_writes_into_its_tables_runs_as_it_is"),
        ("stepping-tables-asked", "if leaf.ndim <= 1 else None", "if False else None",
         "a step that branches by a timestep has no program", f"{STEPPING}::test_steps_that_differ_in_numbers_are_one_executable"),
    ),
    *in_file(
        TPU + "bridge/known.py",
        ("known-asked", "    return None if values is None else from_numpy(values)\n", "    return None\n",
         "who asks for an entry of a schedule waits for the chips", KNOWN),
        ("known-views", "        return None if values is None else np.asarray(values[slices])\n", "        return None\n",
         "an entry of a table is asked of the chips", KNOWN),
        ("known-writes", "    return of_array(t.jax())\n", "    return vars(t).setdefault('_first', of_array(t.jax()))\n",
         "a written tensor has the value that it had", KNOWN),
        ("known-rounding", 'v.dtype.kind in "iub" or v.dtype == np.float32 for v', "True for v",
         "a number beside 16-bit tensors is rounded otherwise than on the chips", KNOWN),
        ("known-integers", "np.array(values, array.dtype)", "np.array(values)",
         "64-bit values for what is 32-bit on the chips", KNOWN),
    ),
    *in_file(
        TPU + "compile/executables.py",
        ("executables-agree", "_kind(found)) or found is None:", "_kind(found)) and found is None or found is None:",
         "one process of several waits for those that compile", "test_hosts.py::test_what_one_process_lacks_all_compile"),
    ),
]
