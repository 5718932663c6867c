"""The commands that explain a run from its directory, and a machine: report, inspect and doctor."""
