"""Faults of the planner."""

from table import TPU, in_file


PLANNER, PROGRAM, REPORT = "test_planner.py", "test_planner_program.py", "test_report.py"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "planner/bundles.py",
        ("planner-fill", "return rounds - 2 if rounds > 2 and", "return rounds if rounds > 2 and",
         "rounds that fill and drain a pipeline are counted", f"{PROGRAM}::test_a_schedule_by_hand"),
        ("planner-ways", "return (self.code == code) == self.ours", "return True",
         "all ways of one kernel are added up", f"{PROGRAM}::test_one_way_at_a_time_of_a_schedule_by_hand"),
    ),
    *in_file(
        TPU + "planner/ici.py",
        ("planner-all-reduce", 'rounds = 2 if kind == "all-reduce" else 1', "rounds = 1",
         "an all-reduce counted as a gather", f"{PROGRAM}::test_a_line_of_four_chips_by_hand"),
        ("planner-collective", 'COLLECTIVES = ("all-gather", ', 'COLLECTIVES = (', "a collective is forgotten",
         f"{PROGRAM}::test_a_program_is_read_with_loops_parts_and_hidden_transfers"),
        ("planner-groups", "grid = grid.transpose([int(d) for d in counted[4].split(\",\")])", "pass",
         "groups of chips along the wrong axis", f"{PROGRAM}::test_groups_of_a_collective"),
    ),
    *in_file(
        TPU + "planner/hlo.py",
        ("planner-tiles", "dims[-back] = -(-dims[-back] // size) * size", "dims[-back] = dims[-back]",
         "bytes without the padding of tiles", f"{PROGRAM}::test_a_program_is_read_with_loops_parts_and_hidden_transfers"),
        ("planner-no-estimate", "if found and int(found[1]) != NO_ESTIMATE else None", "if found else None",
         "no estimate is read as years", f"{PROGRAM}::test_no_estimate_is_none"),
    ),
    *in_file(
        TPU + "planner/timing.py",
        ("planner-unit", '(i.estimated_cycles or 0) / self.chip.clock, "estimate"', '(i.estimated_cycles or 0) * 1e-6, "estimate"',
         "a wrong unit: cycles as microseconds", f"{PROGRAM}::test_a_program_is_read_with_loops_parts_and_hidden_transfers"),
        ("planner-trips", "now += trips * self._run(i.called(\"body\"), runs * trips)", "now += self._run(i.called(\"body\"), runs)",
         "the body of a loop is counted once", f"{PROGRAM}::test_a_program_is_read_with_loops_parts_and_hidden_transfers"),
    ),
    *in_file(
        TPU + "planner/work.py",
        ("planner-scan", '(params.get("length", 1) if name == "scan" else 1)', "1",
         "one block is counted for all", f"{PLANNER}::test_floating_point_operations_are_torchs"),
        ("planner-values", "(dim + out_dim)", "dim",
         "the second product of attention is forgotten", f"{PLANNER}::test_floating_point_operations_are_torchs"),
    ),
    *in_file(
        TPU + "planner/meshes.py",
        ("planner-rows", "rows = (denoiser.batch or 1) * (2 if denoiser.pairs else 1)", "rows = (denoiser.batch or 1) * 2",
         "every model is taken for one of guidance pairs", f"{PLANNER}::test_the_cheap_model_prefers_what_compiled_programs_show"),
    ),
    *in_file(
        TPU + "planner/recording.py",
        ("planner-pairs", "            found.pairs += 1\n            self.last = None\n", "            found.pairs += 1\n            self.last = (found, call)\n",
         "a call is paired twice", f"{PLANNER}::test_guidance_branches_are_seen_as_pairs"),
    ),
    *in_file(
        TPU + "planner/worker.py",
        ("planner-frames", "frames and (frames - 1) % ratio:", "frames and False:",
         "frames that the VAE rounds are planned as asked", f"{PLANNER}::test_bad_input_is_one_line"),
        ("planner-named", "part.is_of = _digest(part, kept.name_of(compiler, lowered, runner.mesh, runner.compiler_options))", "part.is_of = _digest(part, None)",
         "another program has the same name", f"{PLANNER}::test_programs_are_named_without_compiling"),
    ),
    *in_file(
        TPU + "planner/markup.py",
        ("planner-escape", "x if isinstance(x, Html) else html.escape(str(x)) for x in inner", "x if isinstance(x, Html) else str(x) for x in inner",
         "text goes into the page as markup", f"{REPORT}::test_all_text_is_escaped"),
        ("planner-bar", "        end += amount\n", "        end = amount\n", "segments of a bar lie upon each other", f"{REPORT}::test_bars_are_proportional"),
    ),
]
