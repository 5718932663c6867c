"""Order among the ranks (barrier, rank_zero_first, main_only, print), and the time spent in collectives."""
