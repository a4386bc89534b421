"""The error for whatever a recipe asks for and cannot have."""


class RecipeError(ValueError):
    """A recipe that cannot run: says what is required, what came and what to do."""
