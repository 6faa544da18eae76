"""The same run under other methods."""
