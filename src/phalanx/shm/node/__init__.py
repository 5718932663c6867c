"""The shm backend within one node."""
