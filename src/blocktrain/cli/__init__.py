"""The command line. Importing it imports no torch, so that `--help` answers at once."""
