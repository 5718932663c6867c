"""The protocols over torch's store: sign-in, vote, lead, gather, failure flag; `primitives.wait_for` is their wait."""
