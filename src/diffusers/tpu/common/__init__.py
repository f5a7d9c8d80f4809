"""What every package may use: what the user asked for, errors, warnings that are given once, files that are whole or not there."""
