"""Faults of weights on their way from disk to chips, and of what is told where something goes wrong."""

from table import TPU, in_file


DISK, FAULTS, PROFILE = "test_disk.py", "test_faults.py", "test_profile.py"
SLICES = f"{DISK}::test_parts_are_numpys_slices_of_what_is_stored"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "weights/disk.py",
        ("disk-written", 'line.startswith(("Anonymous:", "Swap:"))', 'line.startswith(("Nothing:",))',
         "memory that was written to is taken for the file's", f"{DISK}::test_memory_is_a_files_until_it_is_written_to_or_the_file_is_another"),
    ),
    *in_file(
        TPU + "weights/filling.py",
        ("filling-dtypes", "functools.reduce(torch.Tensor.to, place.dtypes, stored)", "stored",
         "what is read from a file is not converted on its way", SLICES),
        ("filling-padded", "        into[...] = 0\n", "        pass\n", "behind a smaller tensor stands what was in memory", SLICES),
    ),
    *in_file(
        TPU + "weights/placing.py",
        ("placing-start", "whole = _write(aval.sharding)(whole, some, chunk.start)", "whole = _write(aval.sharding)(whole, some, 0)",
         "layers of a stack are written over each other", "test_weights.py::test_what_is_on_the_chips_is_upstreams_and_follows_the_host"),
    ),
    *in_file(
        TPU + "planner/answers.py",
        ("faults-kept", "except (ValueError, zlib.error) as error:", "except FileNotFoundError as error:",
         "a damaged answer of the compiler ends the planner", f"{FAULTS}::test_a_corrupt_answer_is_removed_and_asked_again"),
    ),
    *in_file(
        TPU + "__init__.py",
        ("faults-mesh", "        _check_chips()\n", "        pass\n", "a mesh that does not fit is found after all is loaded",
         f"{FAULTS}::test_a_mesh_that_does_not_fit_is_refused_before_anything_is_loaded"),
    ),
    *in_file(
        TPU + "planner/profile.py",
        ("profile-own", "return one[0], max(0.0, one[0].stop - one[0].start - one[1])", "return one[0], one[0].stop - one[0].start",
         "a loop's seconds are counted beside its body's", f"{PROFILE}::test_a_tpus_operations_are_summed_by_module_without_what_lies_in_them"),
        ("profile-runs", 'share = part["runs"] / plan["steps"]', "share = 1.0", "a plan's step has one run of the model",
         f"{PROFILE}::test_what_was_planned_stands_beside"),
    ),
]
