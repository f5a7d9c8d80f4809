"""Values that outlive their process: `disk_cache` keeps them, `keys` names executables by words, those of code are in `sources`."""
