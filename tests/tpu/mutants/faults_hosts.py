"""Faults of the room hosts, and of what several processes and slices ask of the others."""

from table import TPU, in_file


HOSTS = "test_hosts.py"
TWO = f"{HOSTS}::test_two_processes_give_what_one_gives_read_their_bytes_and_end_together"

# fmt: off
MUTANTS = [
    *in_file(
        TPU + "chips/hosts/agreement.py",
        ("agree-digest", "if digests.get(name) != said[0][1].get(name)", "if name not in digests",
         "another program in another process is not seen", f"{HOSTS}::test_what_differs_is_named"),
        ("agree-draws", "        same_draws()\n\n\ndef same_draws", "        pass\n\n\ndef same_draws",
         "each process draws its own noise", TWO),
        ("agree-generator", "return kind + leaf.get_state().numpy().tobytes()", "return kind",
         "generators that are elsewhere are alike", f"{HOSTS}::test_digests_tell_values_apart"),
    ),
    *in_file(
        TPU + "chips/hosts/watch.py",
        ("watch-name", "self.run.names[number]\n", "self.run.names[0]\n",
         "the wrong process is named", TWO),
        ("watch-left", "if number not in self.left:\n            if", "if False:\n            if",
         "who is killed takes nobody with it", TWO),
    ),
    *in_file(
        TPU + "chips/hosts/run.py",
        ("run-alone", "if given.count == 1:", "if False:",
         "JAX_NUM_PROCESSES=1 is not heard", f"{HOSTS}::test_clusters_are_asked_on_a_tpu_only"),
    ),
    *in_file(
        TPU + "chips/mesh.py",
        ("mesh-slices", "outer = math.gcd(dp, slices)", "outer = 1",
         "the sequence crosses from slice to slice before dp does", f"{HOSTS}::test_dp_then_sp_cross_from_slice_to_slice"),
        ("mesh-processes", "for device in own[:share])", "for device in own)[:count]",
         "a mesh of fewer chips leaves a process out", f"{HOSTS}::test_part_of_the_chips_is_of_every_process"),
    ),
    *in_file(
        TPU + "chips/sharding.py",
        ("sharding-slices", "else (\"sp\",)  # each slice", "else STORAGE_AXES  # each slice",
         "each block's weights cross from slice to slice", f"{HOSTS}::test_weights_are_stored_whole_in_each_slice"),
    ),
    *in_file(
        TPU + "planner/timing.py",
        ("timing-network", "network_free = max(now, network_free) + moved.seconds", "network_free = now",
         "what comes from another slice comes at once", f"{HOSTS}::test_what_comes_from_another_slice_takes_the_network"),
    ),
]
