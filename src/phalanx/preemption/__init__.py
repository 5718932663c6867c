"""An end that saves: what a scheduler's signal does to the ranks of a run and to their helper processes."""
