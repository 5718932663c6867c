"""A rank that holds up the others: noticed and explained."""
