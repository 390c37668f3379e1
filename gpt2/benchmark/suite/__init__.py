"""All of a machine's figures in one command, for the hour in which one has a GPU."""
