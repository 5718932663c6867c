"""START: from a command line to running workers, and to their end.

Reading order: options (the command line) → spec (what is to be started) → agent (the process on each node) →
nursery (the agent's hand on the zygote) → zygote (forks) → worker (inside the child) → keeper (hosts the store).
"""
