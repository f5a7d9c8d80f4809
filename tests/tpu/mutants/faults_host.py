"""Faults of the rooms that work on the host: sharding, mesh, config, devices, checkpoint, residency, stages, files, fidelity, cli."""

from table import TPU, in_file


PARTS, TRACE = "test_compare_modules.py", "test_compare_trace.py"
CONFIG, WEIGHTS, STAGES, CLI, FIDELITY = (f"test_{x}.py" for x in ("config", "weights", "stages", "cli", "fidelity"))

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "chips/sharding.py",
        ("sharding-gathered", "if axis not in STORAGE_AXES) for entry in spec", "if axis in STORAGE_AXES) for entry in spec",
         "weights stay split over storage axes while the block computes", "test_program.py::test_one_loop_over_blocks_that_gathers_weights_and_reduces_nothing"),
        ("sharding-peft", 'plain = name.replace(".base_layer", "")', "plain = name",
         "a weight that PEFT wraps loses its rule", f"{CONFIG}::test_a_weight_that_peft_wraps_keeps_its_rule"),
        ("sharding-dead", "if pattern not in used]", "if pattern in ()]",
         "a dead rule is not seen", f"{CONFIG}::test_dead_rules_are_refused_and_replication_is_reported"),
        ("sharding-replicated", "if ways == 1 and math.prod(shape) >= LARGE_ELEMENTS", "if ways == 0 and math.prod(shape) >= LARGE_ELEMENTS",
         "what is replicated is not reported", f"{CONFIG}::test_dead_rules_are_refused_and_replication_is_reported"),
    ),
    *in_file(
        TPU + "chips/mesh.py",
        ("mesh-odd", "dp = 2 if paired and chips % 2 == 0 else 1", "dp = 2 if paired else 1",
         "an odd number of chips is halved", f"{CONFIG}::test_a_mesh_is_planned_or_refused"),
        ("mesh-all", "if used > chips:", "if used >= chips:", "a mesh of all chips is refused", f"{CONFIG}::test_a_mesh_is_planned_or_refused"),
    ),
    *in_file(
        TPU + "config.py",
        ("config-blocks", " or blocks[1] % blocks[2]:", ":", "keys that their products do not divide are taken", f"{CONFIG}::test_config_is_checked_when_made"),
        ("config-devices", "int(devices) < 1:", "int(devices) < 0:", "no chip at all is taken", f"{CONFIG}::test_environment_is_checked"),
    ),
    *in_file(
        TPU + "chips/devices.py",
        ("devices-count", "len(devices) < target.simulated:", "len(devices) < 0:",
         "fewer chips than asked for are taken in silence", f"{CONFIG}::test_more_chips_than_jax_was_started_with"),
        ("devices-rounding", "return {**WITHOUT_LIBRARY}", "return {}",
         "a sum that is rounded to bfloat16 keeps float32", "test_runner.py::test_a_sum_that_upstream_rounds_is_rounded"),
        ("devices-unit", "return rows * 2 * self.matrix_side**2", "return rows * self.matrix_side**2",
         "a multiplication and an addition counted as one", "test_planner_program.py::test_a_matrix_unit_is_occupied_as_long_as_the_peak_says"),
        ("devices-sparse-cores", "return lowered.compile(dict.fromkeys(options, False))", "raise",
         "what the SparseCores cannot exchange is an error", "test_planner_program.py::test_what_the_sparse_cores_cannot_exchange_stays_on_the_core"),
    ),
    *in_file(
        TPU + "weights/checkpoint.py",
        ("checkpoint-dtype", "functools.reduce(torch.Tensor.to, () if values is None else dtypes, part[index])", "part[index]",
         "a dropped dtype conversion", f"{WEIGHTS}::test_weights_are_upstreams_however_they_are_used"),
        ("checkpoint-missing", "        if missing:\n", "        if missing and path is None:\n",
         "a missing weight keeps its random values", f"{WEIGHTS}::test_missing_and_surplus_weights_are_named"),
        ("checkpoint-alias", "return FileTensor._around(torch.Tensor.detach(tensor), tensor.source)",
         "return FileTensor.of(tensor.source.values, *tensor.source.dtypes)",
         "an alias does not see what becomes of its tensor", f"{WEIGHTS}::test_an_alias_sees_what_becomes_of_its_tensor"),
        ("checkpoint-chain", "return FileTensor.of(values, *dtypes, dtype)", "return FileTensor.of(values, dtype)",
         "the second of two conversions starts from the file", f"{WEIGHTS}::test_weights_are_upstreams_however_they_are_used"),
    ),
    *in_file(
        TPU + "weights/residency.py",
        ("residency-room", "limit is None or held + need <= limit", "limit is None or held <= limit",
         "a model moves in where there is no room", f"{WEIGHTS}::test_what_has_no_room_waits_on_the_host"),
        ("residency-alone", "if self.limit is None or need <= self.limit:", "if True:",
         "a model that no chip holds goes to the chips", f"{WEIGHTS}::test_a_model_that_no_chip_holds"),
    ),
    *in_file(
        TPU + "files.py",
        ("files-draft", "draft.unlink(missing_ok=True)", "pass", "a half-written file stays",
         (f"{STAGES}::test_a_stage_cut_short_leaves_nothing_and_runs_again", f"{CLI}::test_a_writer_that_fails_leaves_nothing")),
    ),
    *in_file(
        TPU + "apps/stages/file.py",
        ("stages-changed", "if described != there:", "if False:", "a file that was changed is taken", f"{STAGES}::test_a_spoilt_file_is_refused"),
        ("stages-half-written", "with whole_files([Path(path)]) as (draft,):", "for draft in (Path(path),):",
         "a file is written in its place, half of it if the run ends", f"{STAGES}::test_a_stage_cut_short_leaves_nothing_and_runs_again"),
    ),
    *in_file(
        TPU + "apps/stages/running.py",
        ("stages-prompts", "for name, x in zip(names, answer, strict=True)", "for name, x in zip(names[::-1], answer, strict=True)",
         "prompt and negative prompt are swapped", f"{STAGES}::test_three_stages_give_what_one_run_gives"),
        ("stages-second-prompt", 'f"{name}.{number}" if number else name', "name", "the negative prompt takes the prompt's place",
         f"{STAGES}::test_three_stages_give_what_one_run_gives[hunyuan_text_to_video-float32]"),
    ),
    *in_file(
        TPU + "apps/stages/loading.py",
        ("stages-fingerprint", "for k, v in c.items() if k not in VERSIONS}", "for k, v in c.items() if k in VERSIONS}",
         "another model has the same fingerprint", f"{STAGES}::test_a_fingerprint_is_of_settings_and_not_of_versions"),
        ("stages-guider", 'CONFIGURED = (*LOOP, "vae"', 'CONFIGURED = ("scheduler", "vae"', "a model with other guidance has the same fingerprint",
         f"{STAGES}::test_a_fingerprint_is_of_settings_and_not_of_versions"),
    ),
    *in_file(
        TPU + "compare/pipelines.py",
        ("fidelity-limit", "LOW_PRECISION_FACTOR * upstream", "LOW_PRECISION_FACTOR", "bfloat16 is held to an error of 1.25",
         f"{FIDELITY}::test_bfloat16_is_held_to_upstreams_own_error"),
        ("fidelity-norm", "(np.linalg.norm(o) or 1.0)", "1.0", "the error is not relative", f"{FIDELITY}::test_relative_error_by_hand"),
        ("fidelity-nan", "if not np.isnan(errors).any() else np.nan", "if errors else np.nan",
         "NaN is left out of the largest error", f"{FIDELITY}::test_relative_error_by_hand"),
    ),
    *in_file(
        TPU + "compare/forms.py",
        ("forms-block", "return f\"{prefix}{start + step}{", "return f\"{prefix}{start}{", "values of all scanned blocks go by the first one's name",
         f"{PARTS}::test_equal_weights_part_nowhere_and_every_scanned_block_is_there"),
    ),
    *in_file(
        TPU + "compare/harvest.py",
        ("harvest-order", "part.outputs[:carried], (part.outputs[carried:], part.values)", "part.outputs[:carried], (part.outputs[carried:], part.values[::-1])",
         "values of a loop go by each other's names", f"{PARTS}::test_equal_weights_part_nowhere_and_every_scanned_block_is_there"),
        ("harvest-lost", "found.lost += [*(place.tag for place in part.places), *part.lost]\n            return", "return",
         "what a branch computes is not said to be lost", f"{PARTS}::test_harvest_by_hand"),
    ),
    *in_file(
        TPU + "compare/modules.py",
        ("parts-inherited", "limit = max(rung, GROWTH * (last if inherited is None else inherited))", "limit = rung",
         "what comes after a fault is told as one", f"{PARTS}::test_the_submodule_with_a_planted_fault_is_named_first"),
        ("parts-innermost", "if not any(_inside(other, name) for other in names)", "if True",
         "the whole is named, not the part", f"{PARTS}::test_errors_by_hand"),
    ),
    *in_file(
        TPU + "compare/matching.py",
        ("matching-first", "for start in (0, x.shape[axis] - shape[axis]):", "for start in (0,):",
         "frames before the first are taken for the first", f"{PARTS}::test_layouts_are_told_by_shapes"),
    ),
    *in_file(
        TPU + "bridge/obstacles.py",
        ("obstacles-view", "        if not again:\n", "        if True:\n", "a bound of a slice is told where the slice is used",
         f"{TRACE}::test_what_stops_video_models"),
        ("obstacles-answers", "return self.answer if asked <= PATIENCE else bool(asked % 2)", "return False",
         "one branch is never traced", f"{TRACE}::test_every_sin_is_named_with_its_line"),
    ),
    *in_file(
        TPU + "apps/cli/arguments.py",
        ("cli-needed", "if p.default is inspect.Parameter.empty and n not in names]", "if False]",
         "an argument that is needed is not asked for", f"{CLI}::test_arguments_follow_the_signature"),
    ),
    *in_file(
        TPU + "apps/cli/staged.py",
        ("staged-callback", "call, takes_callback, lambda", "call, True, lambda", "a pipeline without callbacks is given one",
         f"{STAGES}::test_three_commands_for_a_pipeline_without_callbacks"),
    ),
    *in_file(
        TPU + "apps/cli/flags.py",
        ("flags-ring", "sp_num if sp_num > 1 else None", "None", "--sp_num makes no ring", "test_generate_flax.py::test_flags_as_configuration"),
    ),
    *in_file(
        TPU + "apps/cli/errors.py",
        ("cli-traceback", "return bool(frames) and frames[-1].filename.startswith(PACKAGE + os.sep)", "return True",
         "an error of ours is told as the user's", f"{CLI}::test_an_error_of_our_own_keeps_its_traceback"),
    ),
]
