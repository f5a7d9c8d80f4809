"""A model beside upstream's: same weights, same inputs, one process.

`pipelines`: every module of a pipeline, and its whole result; `roundings`: how much wider limits are on a TPU. One component, submodule by
submodule, is `examples/tpu/submodules/`.
"""
