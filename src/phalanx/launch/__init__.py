"""From a command line to running workers, and to their end.

Reading order: parse (the command line) → spec (what is to be started) → agent (the process on each node) → in process:
zygote_client (how the agent talks to the zygote), zygote (forks), worker (inside the child), keeper (hosts the store).
"""
