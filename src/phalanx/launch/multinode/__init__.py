"""The nodes of a run: how they meet, find each other alive, and carry messages for the watchdogs."""
