"""Error for a run that cannot be compared."""


class RunError(ValueError):
    """Says what a comparison requires of a run, what came, and what to do."""
