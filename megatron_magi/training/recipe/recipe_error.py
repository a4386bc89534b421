"""The error of everything that a recipe asks for and that cannot be had."""


class RecipeError(ValueError):
    """A recipe that cannot run: says what is required, what came and what to do."""
