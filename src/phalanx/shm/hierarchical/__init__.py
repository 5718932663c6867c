"""The shm backend over several nodes: shared memory within a node, gloo between them."""
