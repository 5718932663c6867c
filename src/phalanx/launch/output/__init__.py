"""What the ranks print, on its way to the console, the logs and other nodes."""
