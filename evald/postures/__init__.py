"""Who owns the engines: every posture fulfils ``contract.Posture``."""
