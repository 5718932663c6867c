"""Why a run failed: the cause, and the text about it."""
