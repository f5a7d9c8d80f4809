"""From a checkpoint's bytes to arrays on chips, and whose weights are there when not all fit."""
