"""The output of the ranks, on its way to the console, the logs and other nodes."""
