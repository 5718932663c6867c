"""`phalanx test`: a short real run on this machine that shows what works here."""
