"""A plan in numbers and pictures (matplotlib, the optional extra ``viz``)."""
