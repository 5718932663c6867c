"""The processes that the agent starts: zygote, keeper and workers."""
