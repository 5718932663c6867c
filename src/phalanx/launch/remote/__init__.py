"""Runs that one command starts on several hosts."""
