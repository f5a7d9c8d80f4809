"""Values that outlive their process: `disk_cache` keeps them, `keys` names executables, `stable_key` and `sources` write keys as strings."""
