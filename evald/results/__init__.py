"""Results go out: records, ledger, samples, and the one reader."""
