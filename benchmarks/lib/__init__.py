"""What several subjects share: cases, masks, timing, options, records."""
