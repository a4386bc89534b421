"""Text into packed tokens, and packed tokens into samples."""
