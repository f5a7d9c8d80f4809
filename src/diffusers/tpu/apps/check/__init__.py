"""`diffusers-tpu check`: ten stages that say whether what this package was built on without a TPU holds on one.

`running` starts each stage of `stages.toml` as a child process (`child`) with a limit of its own; `report` holds the rows. A stage is a
file with `run(rows, request)`: the request has the sizes of `stages.toml` for a TPU or for simulated chips, the code is the same.
"""
