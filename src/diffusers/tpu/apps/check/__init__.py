"""`diffusers-tpu check`: ten stages that test on a TPU the assumptions with which this package was made without one.

`running` starts each stage of `stages.toml` as a child process (`child`) with its own time limit; `report` holds the rows. A stage
is a file with `run(rows, request)`. The same code runs on a TPU and on simulated chips, with sizes of `stages.toml` in the request.
"""
