"""``phalanx doctor``: each group of checks is a file with its facts, how they are read, and what is judged of them."""
