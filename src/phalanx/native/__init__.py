"""The compiled C library, and how ctypes sees it."""
