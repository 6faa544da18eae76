"""The run's log: its records and the file that holds them."""
