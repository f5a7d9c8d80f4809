"""One call of a module: flatten, key, guards, look up or trace, batch, execute; what runs where nothing can be traced."""
