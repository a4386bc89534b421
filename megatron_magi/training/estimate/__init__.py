"""What a recipe will cost, counted without running it."""
