"""Programs that measure. A folder is a subject; `lib` has what several subjects share."""
