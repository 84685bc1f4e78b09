"""What a person should know: rules over the ledger and the status, records, log and webhook."""
